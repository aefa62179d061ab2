"""Fill a module from safetensors, a single file or shards with an index. Nothing else is read: no pickle, no code."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from worker.models.checkpoint import ModelError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


Slots = Mapping[str, tuple[Tensor, ...]]
"""Where each tensor of a checkpoint goes: views of parameters, so that fused ones are filled piece by piece. A tensor
that is stored once and used in several rows has several places."""


def stored_names(folder: Path) -> frozenset[str]:
    """Return the names of the checkpoint's tensors, where their places depend on how it was exported."""
    return frozenset(_locate(folder))


def load_weights(folder: Path, slots: Slots, ignored: frozenset[str] = frozenset()) -> None:
    """Copy every tensor of the checkpoint to its places.

    Tensors named in `ignored` may be absent or present. Raises `ModelError` naming tensors that are missing, unknown or
    of another shape.
    """
    places = _locate(folder)
    missing = sorted(slots.keys() - places.keys() - ignored)
    if missing:
        raise ModelError(f"{folder}: {len(missing)} tensors are missing: {_some(missing)}")
    extra = sorted(places.keys() - slots.keys() - ignored)
    if extra:
        raise ModelError(f"{folder}: {len(extra)} tensors have no place in this architecture: {_some(extra)}")
    for path in sorted(set(places.values())):
        names = [name for name, at in places.items() if at == path and name in slots]
        try:
            with safe_open(path, framework="pt") as file:
                for name in names:
                    _fill(path, name, slots[name], file.get_tensor(name))
        except SafetensorError as error:
            raise ModelError(f"{path}: {error}") from error


def _fill(path: Path, name: str, places: tuple[Tensor, ...], value: Tensor) -> None:
    if not value.is_floating_point():
        raise ModelError(f"{path}: {name} is {value.dtype}; a floating point type was expected")
    for place in places:
        if value.shape != place.shape:
            raise ModelError(f"{path}: {name} has shape {list(value.shape)}; config.json asks for {list(place.shape)}")
        place.copy_(value)


def _locate(folder: Path) -> dict[str, Path]:
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
