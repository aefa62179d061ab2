"""Checkpoints whose weights are stored in 8 bits: e4m3 beside scales.

Read are the layouts of DeepSeek-V3 and Qwen3-FP8 (`quant_method: fp8`: `weight_scale_inv` for each block of 128 x 128)
and of compressed-tensors (`weight_scale` for each output, each block, or the whole weight). All else is refused.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kernels.fp8 import BLOCK, FP8
from kernels.moe import Experts
from worker.models.checkpoint import Checkpoint, ModelError
from worker.models.layers import Decoder, GatedMLP, Linear, MoeMLP
from worker.models.weights import TensorFiles, locate, scale_names

_KEY = "quantization_config"
_KNOWN = "supported are fp8 and compressed-tensors with weights of e4m3 and scales for outputs or blocks of 128 x 128"


def check_format(checkpoint: Checkpoint) -> None:
    """Raise `ModelError` for weights that are stored in a way that cannot be read, naming the key of config.json."""
    config = checkpoint.config.get(_KEY)
    if config is None:
        return
    if not isinstance(config, dict):
        raise _refuse(checkpoint, "", f"an object was expected, not {config!r}")
    match config.get("quant_method"):
        case "fp8":
            _check(checkpoint, config, "weight_block_size", (None, [BLOCK, BLOCK]))
            _check(checkpoint, config, "fmt", (None, "e4m3", "float8_e4m3fn"))
            _check(checkpoint, config, "activation_scheme", (None, "dynamic"))
        case "compressed-tensors":
            _check(checkpoint, config, "format", (None, "float-quantized", "naive-quantized"))
            _check(checkpoint, config, "kv_cache_scheme", (None,))
            groups = config.get("config_groups")
            if not isinstance(groups, dict) or not groups:
                raise _refuse(checkpoint, ".config_groups", "no groups are there")
            for name, group in groups.items():
                _check_group(checkpoint, group, f".config_groups.{name}")
        case method:
            raise _refuse(checkpoint, ".quant_method", f"{method!r} is not supported; {_KNOWN}")


def _check_group(checkpoint: Checkpoint, group: object, path: str) -> None:
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(group, dict) or not isinstance(weights, dict):
        raise _refuse(checkpoint, f"{path}.weights", "an object was expected")
    for key, allowed in (
        ("num_bits", (8,)),
        ("type", ("float",)),
        ("symmetric", (None, True)),
        ("dynamic", (None, False)),
        ("strategy", ("channel", "tensor", "block")),
        ("block_structure", (None, [BLOCK, BLOCK])),
    ):
        _check(checkpoint, weights, key, allowed, f"{path}.weights")
    inputs = group.get("input_activations")
    if isinstance(inputs, dict):
        # Tokens are quantized by what is in them; scales measured beforehand are another rule.
        _check(checkpoint, inputs, "dynamic", (True,), f"{path}.input_activations")
    _check(checkpoint, group, "output_activations", (None,), path)


def _check(
    checkpoint: Checkpoint, config: Mapping[str, Any], key: str, allowed: tuple[object, ...], path: str = ""
) -> None:
    if config.get(key) not in allowed:
        told = " or ".join(repr(value) for value in allowed if value is not None) or "none"
        raise _refuse(checkpoint, f"{path}.{key}", f"{config.get(key)!r} is not supported, only {told}; {_KNOWN}")


def _refuse(checkpoint: Checkpoint, path: str, why: str) -> ModelError:
    return ModelError(f"{checkpoint.folder / 'config.json'}: {_KEY}{path}: {why}")


def keep(module: nn.Module, folder: Path, able: Callable[[Linear | MoeMLP], bool]) -> int:
    """Put the stored 8 bits back in the place of what they were loaded as; return how many linears and mixtures run on
    them.

    A linear, or a mixture's experts, stay as they are where `able` says so, where the checkpoint has them in more bits
    or as one tensor, or where a block would reach over two of their projections.
    """
    if not isinstance(module, Decoder) or _KEY not in json.loads((folder / "config.json").read_bytes()):
        return 0
    places = locate(folder)
    count = 0
    with TensorFiles(places) as files:
        stored = _Stored(files, scale_names(places))
        for each in module.modules():
            if isinstance(each, MoeMLP) and able(each):
                count += _keep_experts(each, stored, able)
            elif isinstance(each, Linear) and each.scale is None and each.pieces and able(each):
                count += _keep_linear(each, stored)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return count


@dataclass(frozen=True, slots=True)
class _Stored:
    """What a checkpoint has in 8 bits."""

    files: TensorFiles
    scales: Mapping[str, str]
    """The name of the scales of each tensor that has some."""

    def stack(self, names: Iterable[str]) -> tuple[Tensor, Tensor] | None:
        """Return the weights of projections under one another, and their scales; None if they have none, or if these
        cannot be stacked."""
        weights = [f"{name}.weight" for name in names]
        if not all(name in self.scales for name in weights):
            return None
        values = [self.files.read(name) for name in weights]
        scales = (self.files.read_scale(self.scales[name], value) for name, value in zip(weights, values, strict=True))
        return _stack(values, [*scales])


def _keep_linear(linear: Linear, stored: _Stored) -> bool:
    stacked = stored.stack(linear.pieces)
    if stacked is None:
        return False
    weight, scale = (part.to(linear.weight.device) for part in stacked)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.scale = nn.Parameter(scale, requires_grad=False)
    return True


def _keep_experts(mlp: MoeMLP, stored: _Stored, able: Callable[[Linear], bool]) -> bool:
    """Put a layer's experts in the place of its wide ones, with a shared one behind them if that one is stored alike
    and its linears, which adapters use, can run on it."""
    shared = mlp.shared if mlp.stack().shared else None
    if shared is not None:
        names = *shared.gate_up.pieces, *shared.down.pieces
        found = (
            _read_experts((*mlp.pieces, names), stored, mlp.down.device) if all(map(able, _linears(shared))) else None
        )
        if found is not None:
            mlp.hold(replace(found, shared=True))
            return True
    found = _read_experts(mlp.pieces, stored, mlp.down.device)
    if found is None:
        return False
    mlp.hold(found)
    if shared is not None:
        for linear in _linears(shared):
            # It would keep the memory of all others.
            linear.weight = nn.Parameter(linear.weight.clone(), requires_grad=False)
    return True


def _linears(mlp: GatedMLP) -> tuple[Linear, Linear]:
    return mlp.gate_up, mlp.down


def _read_experts(pieces: Sequence[Sequence[str]], stored: _Stored, device: torch.device) -> Experts | None:
    """Return experts one behind the other; None if they are not all stored in the same way."""
    rooms: tuple[Tensor, ...] | None = None
    for number, (*wide, narrow) in enumerate(pieces):
        gate_up, down = stored.stack(wide), stored.stack((narrow,))
        if gate_up is None or down is None:
            return None
        parts = *gate_up, *down
        if rooms is None:
            rooms = tuple(torch.empty((len(pieces), *part.shape), dtype=part.dtype, device=device) for part in parts)
        if any(room.shape[1:] != part.shape for room, part in zip(rooms, parts, strict=True)):
            return None
        for room, part in zip(rooms, parts, strict=True):
            room[number].copy_(part)
    if rooms is None:
        return None
    gate_up, gate_up_scale, down, down_scale = rooms
    return Experts(gate_up, down, gate_up_scale, down_scale)


def _stack(weights: list[Tensor], scales: list[Tensor]) -> tuple[Tensor, Tensor] | None:
    """Return projections under one another; None if their scales cannot be."""
    if any(weight.dtype != FP8 for weight in weights):
        return None
    blocks = {scale.dim() == 2 for scale in scales}
    if len(blocks) > 1 or (True in blocks and any(weight.shape[0] % BLOCK for weight in weights[:-1])):
        return None
    each = [
        scale.expand(weight.shape[0]) if scale.dim() == 0 else scale
        for weight, scale in zip(weights, scales, strict=True)
    ]
    # Bytes are stacked: not every device knows how to join numbers of 8 bits.
    return torch.cat([weight.view(torch.uint8) for weight in weights]).view(FP8), torch.cat(each).contiguous()
