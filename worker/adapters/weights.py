"""From an adapter's folder to factors for this model's linear layers."""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shared.adapters import WEIGHTS, InvalidAdapter, UnreadableAdapter, check_adapter, tensor_names
from worker.adapters.targets import Target, shapes_of
from worker.models.layers import Linear


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter on the device."""

    rank: int
    factor: float
    """alpha / rank, or what the adapter has in its place."""
    factors: Mapping[Linear, tuple[Tensor, Tensor]]
    """Of each linear a [projections * rank, inputs] and b [outputs, rank]; see `kernels.lora.Factors`."""
    of_text: Mapping[Linear, tuple[Tensor, Tensor]] = field(default_factory=dict[Linear, tuple[Tensor, Tensor]])
    """Those under which text is read, where a canvas is read under `factors` (see `Linear.text_pieces`)."""

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(a.nbytes + b.nbytes for a, b in (*self.factors.values(), *self.of_text.values()))


def stacked_size(adapters: Collection[Adapter]) -> int:
    """Return the most bytes that adapters take side by side: each linear has room for the highest rank of all."""
    wide: dict[Linear, float] = {}
    room = 0
    for adapter in adapters:
        for linear, (a, b) in chain(adapter.factors.items(), adapter.of_text.items()):
            wide[linear] = max(wide.get(linear, 0.0), (a.nbytes + b.nbytes) / adapter.rank)
            room = max(room, room_for(adapter.rank, a.device))
    sides = 2 if any(adapter.of_text for adapter in adapters) else 1
    return math.ceil(sides * len(adapters) * room * sum(wide.values()))


def room_for(rank: int, device: torch.device) -> int:
    """Return the rank that adapters of at most `rank` are kept with side by side."""
    # Kernels are compiled for strides that are multiples of 16, and anew for others.
    return -(-rank // 16) * 16 if device.type == "cuda" else rank


def ends_of(linear: Linear) -> tuple[int, ...]:
    """Return the row behind the last of each projection that is stacked in a linear."""
    return tuple(sorted({*(end for _, end in linear.pieces.values()), linear.weight.shape[0]}))


@torch.inference_mode()
def load_adapter(folder: Path, targets: Mapping[str, Target], device: torch.device, dtype: torch.dtype) -> Adapter:
    """Check and load an adapter; raises `InvalidAdapter`."""
    facts = check_adapter(folder, shapes_of(targets))
    of_linear: defaultdict[tuple[Linear, bool], list[str]] = defaultdict(list)
    for module in facts.modules:
        of_linear[targets[module].linear, targets[module].of_text].append(module)
    factors: dict[Linear, tuple[Tensor, Tensor]] = {}
    of_text: dict[Linear, tuple[Tensor, Tensor]] = {}
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            for (linear, is_text), modules in of_linear.items():
                (outputs, inputs), ends = linear.weight.shape, ends_of(linear)
                a = torch.zeros((len(ends), facts.rank, inputs), dtype=dtype)
                b = torch.zeros((outputs, facts.rank), dtype=dtype)
                for module in modules:
                    target, (name_a, name_b) = targets[module], tensor_names(module)
                    for name, rows in (
                        (name_a, a[ends.index(target.end)]),
                        (name_b, b[target.first : target.end]),
                    ):
                        if not rows.copy_(file.get_tensor(name)).isfinite().all():
                            message = f"{name[:200]} holds values that are not finite in {str(dtype)[6:]}"
                            raise InvalidAdapter(WEIGHTS, message)
                (of_text if is_text else factors)[linear] = a.flatten(0, 1).to(device), b.to(device)
    except SafetensorError as error:
        raise InvalidAdapter(WEIGHTS, "cannot be read") from error
    except OSError as error:
        raise UnreadableAdapter(WEIGHTS, error.strerror or "cannot be read") from error
    return Adapter(facts.rank, facts.factor, factors, of_text)
