"""Fill a module from safetensors, a single file or shards with an index. Nothing else is read: no pickle, no code.

Weights that are stored in 8 bits beside scales are multiplied by them on the way.
"""

import json
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kernels.fp8 import BLOCK, dequantize
from worker.models.checkpoint import Checkpoint, ModelError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SCALES = ("_scale_inv", "_scale")


Slots = Mapping[str, tuple[Tensor, ...]]
"""Where each tensor of a checkpoint goes: views of parameters, so that fused ones are filled piece by piece. A tensor
that is stored once and used in several rows has several places."""


def stored_names(folder: Path) -> frozenset[str]:
    """Return the names of the checkpoint's tensors, where their places depend on how it was exported."""
    return frozenset(locate(folder))


def fill(checkpoint: Checkpoint, slots: Slots, ignored: frozenset[str] = frozenset()) -> None:
    """Copy every tensor of the checkpoint to its places, or hand the places to who takes a share of them.

    Raises what `load_weights` raises.
    """
    (checkpoint.loader or load_weights)(checkpoint.folder, slots, ignored)


def load_weights(folder: Path, slots: Slots, ignored: frozenset[str] = frozenset()) -> None:
    """Copy every tensor of the checkpoint to its places.

    Tensors named in `ignored` may be absent or present. Raises `ModelError` naming tensors that are missing, unknown or
    of another shape.
    """
    places = locate(folder)
    scales = scale_names(places)
    with TensorFiles(places) as files:
        for path, names in match_names(folder, slots, ignored).items():
            for name in names:
                value = files.read(name)
                if name in scales:
                    value = dequantize(value, files.read_scale(scales[name], value), torch.float32)
                _fill(path, name, slots[name], value)


def match_names(folder: Path, slots: Slots, ignored: frozenset[str] = frozenset()) -> dict[Path, list[str]]:
    """Return for each file of the checkpoint those of its tensors that have places.

    Raises `ModelError` naming tensors that are missing or unknown.
    """
    places = locate(folder)
    scales = scale_names(places)
    missing = sorted(slots.keys() - places.keys() - ignored)
    if missing:
        raise ModelError(f"{folder}: {len(missing)} tensors are missing: {_some(missing)}")
    extra = sorted(places.keys() - slots.keys() - ignored - {scales[name] for name in slots.keys() & scales.keys()})
    if extra:
        raise ModelError(f"{folder}: {len(extra)} tensors have no place in this architecture: {_some(extra)}")
    return {
        path: [name for name, at in places.items() if at == path and name in slots]
        for path in sorted(set(places.values()))
    }


def check_type(path: Path, name: str, dtype: torch.dtype) -> None:
    """Raise `ModelError` for weights that are no floating point numbers, or small ones without scales."""
    if not dtype.is_floating_point:
        raise ModelError(f"{path}: {name} is {dtype}; a floating point type was expected")
    if dtype.itemsize == 1:
        raise ModelError(f"{path}: {name} is {dtype}, but no {name}_scale or {name}_scale_inv is there")


def _fill(path: Path, name: str, places: tuple[Tensor, ...], value: Tensor) -> None:
    check_type(path, name, value.dtype)
    for place in places:
        if value.shape != place.shape:
            raise ModelError(f"{path}: {name} has shape {list(value.shape)}; config.json asks for {list(place.shape)}")
        place.copy_(value)


def scale_names(names: Collection[str]) -> dict[str, str]:
    """Return the name of the scales of each tensor that has some."""
    return {name: name + end for name in names for end in _SCALES if name + end in names}


class TensorFiles:
    """The tensors of a checkpoint by their names; a file is opened once and stays so until this is left."""

    def __init__(self, places: Mapping[str, Path]) -> None:
        """`places` tell the file of each tensor, see `locate`."""
        self._places = places
        self._opened = ExitStack()
        self._files: dict[Path, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()
        self._opened.close()

    def read(self, name: str) -> Tensor:
        """Return a tensor on the CPU as it is stored. Raises `ModelError`."""
        path = self._places[name]
        try:
            if path not in self._files:
                self._files[path] = self._opened.enter_context(safe_open(path, framework="pt"))
            return self._files[path].get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"{path}: {error}") from error

    def read_scale(self, name: str, weight: Tensor) -> Tensor:
        """Return the scales of a weight in float32: [] for all of it, [outputs], or one for each block of 128 x 128.

        Raises `ModelError`, also for any other shape.
        """
        scale = self.read(name).float()
        if weight.dim() == 2:
            outputs, inputs = weight.shape
            if scale.numel() == 1:
                return scale.view(())
            if scale.numel() == outputs and scale.shape[0] == outputs:
                return scale.view(outputs)
            if scale.shape == (-(-outputs // BLOCK), -(-inputs // BLOCK)):
                return scale
        raise ModelError(
            f"{self._places[name]}: {name} has shape {list(scale.shape)}, which is neither one scale, nor one for each "
            f"output, nor one for each block of 128 x 128 of a weight {list(weight.shape)}"
        )


def locate(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor."""
    index = folder / _INDEX
    if index.is_file():
        try:
            names = json.loads(index.read_bytes())["weight_map"]
            files = sorted(set(names.values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index}: not an index of shards (no weight_map)") from error
        if any(Path(name).name != name for name in files):
            raise ModelError(f"{index}: shards must lie beside the index")
    elif (folder / _SINGLE).is_file():
        files = [_SINGLE]
    else:
        raise ModelError(f"{folder}: no weights: neither {_SINGLE} nor {_INDEX} is there (safetensors only)")
    places: dict[str, Path] = {}
    for name in files:
        path = folder / name
        try:
            with safe_open(path, framework="pt") as file:
                places.update(dict.fromkeys(file.keys(), path))
        except FileNotFoundError as error:
            raise ModelError(f"{path}: the index names this shard, but it is missing") from error
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: not a safetensors file ({error})") from error
    return places


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
