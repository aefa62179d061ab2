"""PEFT adapter folders, read and checked without torch: `adapter_config.json` and `adapter_model.safetensors`.

The front checks an adapter before it says yes to it, each worker again before it loads it; both by these rules.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
TARGETS_FILE = "lora_targets.json"
"""File of a model's card: for each linear layer that may have an adapter [outputs, inputs], by the module's name."""
MOST_RANK = 512
_MOST_ALPHA = 1_000_000
_LONGEST_CONFIG = 4 * 2**20
_LONGEST_HEADER = 64 * 2**20
_PREFIX = "base_model.model."
_ENDS = {".lora_A.weight": 0, ".lora_B.weight": 1}
# Bytes of an element. In each, a value is NaN or infinite where all bits of its exponent are set.
_DTYPES = {"F32": 4, "F16": 2, "BF16": 2}
_SCANNED = 2**18
"""Bytes of a tensor that are looked at together; a multiple of every element's."""
# What an adapter could ask for beyond a low-rank product, and the values with which it does not.
_FIXED: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None,),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "layer_replication": (None,),
}
# Ways to begin a training that leave the base model's weights as they are; the others take from these what the
# adapter begins with, unless it is converted when it is saved.
_BEGINNINGS = ("gaussian", "eva", "orthogonal")

# Of each value of a byte 1 or 0: whether its 5, or 7, bits below the sign are set; whether its highest bit is.
_FULL_5 = bytes(byte & 0x7C == 0x7C for byte in range(256))
_FULL_7 = bytes(byte & 0x7F == 0x7F for byte in range(256))
_TOP_BIT = bytes(byte >> 7 for byte in range(256))

Shape = tuple[int, int]
Targets = Mapping[str, Shape]
"""(outputs, inputs) of each linear layer that may have an adapter."""


class InvalidAdapter(Exception):
    """An adapter cannot be served; `field` is the field, or the file, that is at fault."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class UnreadableAdapter(InvalidAdapter):
    """A file or folder is not there, or cannot be read: it may be elsewhere, or later."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies in its file."""

    shape: tuple[int, ...]
    dtype: str
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    rank: int
    factor: float
    """What its products are multiplied by: alpha / rank, or alpha / sqrt(rank) for a rank-stabilised one."""
    modules: tuple[str, ...]
    """Names of the linear layers that it adapts."""
    parameters: int


def find_folder(store: Path, path: str) -> Path:
    """Return the folder of an adapter in the model store; raises `InvalidAdapter` for one that lies elsewhere.

    Links are followed before the comparison, those of its files too.
    """
    root = store.resolve()
    try:
        folder = (root / path).resolve()
    except (OSError, ValueError) as error:
        raise InvalidAdapter("path", "is not a path") from error
    if not folder.is_relative_to(root) or folder == root:
        raise InvalidAdapter("path", "must name a folder inside the model store")
    if not folder.is_dir():
        raise UnreadableAdapter("path", f"there is no folder {path[:200]!r} in the model store")
    for name in (CONFIG, WEIGHTS):
        try:
            file = (folder / name).resolve()
        except (OSError, RuntimeError) as error:
            raise InvalidAdapter(name, "is a link that leads nowhere") from error
        if not file.is_relative_to(root):
            raise InvalidAdapter(name, "is a link that leads out of the model store")
        if file.exists() and not file.is_file():
            # What is no file may never end, or never begin.
            raise InvalidAdapter(name, "is not a file")
    return folder


def check_adapter(folder: Path, targets: Targets) -> AdapterFacts:
    """Read an adapter's configuration and the shapes of its tensors; raises `InvalidAdapter` naming the field."""
    config = _read_config(folder)
    for key, allowed in _FIXED.items():
        if key in config and config[key] not in allowed:
            raise InvalidAdapter(key, f"{_shown(config[key])} is not supported, only {allowed[0]!r}")
    if "peft_type" not in config:
        raise InvalidAdapter("peft_type", "is missing; only 'LORA' is supported")
    begun = config.get("init_lora_weights")
    if begun is not None and not isinstance(begun, bool) and begun not in _BEGINNINGS:
        message = (
            f"{_shown(begun)} changes the base model's weights too: save the adapter with "
            "path_initial_model_for_weight_conversion, which makes it one of the model as it was"
        )
        raise InvalidAdapter("init_lora_weights", message)
    if not isinstance(config.get("use_rslora"), bool | None):
        raise InvalidAdapter("use_rslora", f"must be true or false, not {_shown(config['use_rslora'])}")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= MOST_RANK:
        raise InvalidAdapter("r", f"must be a whole number from 1 to {MOST_RANK}, not {_shown(rank)}")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not abs(alpha) <= _MOST_ALPHA:
        raise InvalidAdapter("lora_alpha", f"must be a number up to {_MOST_ALPHA}, not {_shown(alpha)}")
    shapes = _pair(read_shapes(_weights_of(folder)))
    for module, (a, b) in shapes.items():
        wanted = targets.get(module)
        if wanted is None and ".experts." in f".{module}":
            message = f"{module[:200]} is an expert of a mixture: adapters of experts are not served"
            raise InvalidAdapter("target_modules", message)
        if wanted is None:
            known = ", ".join(sorted({name.rpartition(".")[2] for name in targets})) or "none"
            message = f"{module[:200]} is no linear layer of this model that takes adapters; those are {known}"
            raise InvalidAdapter("target_modules", message)
        if a[0] != rank or b[1] != rank:
            raise InvalidAdapter("r", f"is {rank}, but the tensors of {module} have rank {a[0]} and {b[1]}")
        if (b[0], a[1]) != wanted:
            message = f"{module} maps {a[1]} to {b[0]}; the model's maps {wanted[1]} to {wanted[0]}"
            raise InvalidAdapter(WEIGHTS, message)
    _check_target_modules(config.get("target_modules"), shapes)
    divisor = math.sqrt(rank) if config.get("use_rslora") is True else rank
    parameters = sum(rank * (a[1] + b[0]) for a, b in shapes.values())
    return AdapterFacts(rank, alpha / divisor, tuple(sorted(shapes)), parameters)


def check_values(folder: Path) -> None:
    """Read an adapter's weights; raises `InvalidAdapter` naming the first tensor with a value that is not finite.

    Takes the memory of one piece, whatever the size of the file.
    """
    path = _weights_of(folder)
    places = _read_places(path)
    try:
        with path.open("rb") as file:
            for name, place in sorted(places.items(), key=lambda item: item[1].first):
                file.seek(place.first)
                for start in range(place.first, place.end, _SCANNED):
                    piece = file.read(min(_SCANNED, place.end - start))
                    if not _is_finite(piece, place.dtype):
                        message = f"{name[:200]} holds values that are not finite (NaN or infinity)"
                        raise InvalidAdapter(path.name, message)
    except OSError as error:
        raise UnreadableAdapter(path.name, error.strerror or "cannot be read") from error


def digest_of(folder: Path) -> str:
    """Return the sha256 (hex) over an adapter's files; raises `InvalidAdapter`."""
    total = hashlib.sha256()
    for name in (CONFIG, WEIGHTS):
        try:
            with (folder / name).open("rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise UnreadableAdapter(name, error.strerror or "cannot be read") from error
    return total.hexdigest()


def tensor_names(module: str) -> tuple[str, str]:
    """Return the names of a module's two tensors in an adapter's file."""
    return f"{_PREFIX}{module}.lora_A.weight", f"{_PREFIX}{module}.lora_B.weight"


def pack_targets(targets: Targets) -> bytes:
    return json.dumps(targets, separators=(",", ":")).encode()


def unpack_targets(content: bytes) -> dict[str, Shape]:
    """Parse a card's `TARGETS_FILE`; raises ValueError."""
    found: object = json.loads(content)
    if not isinstance(found, dict):
        raise ValueError("an object was expected")
    return {str(name): _pair_of(shape) for name, shape in cast(dict[object, object], found).items()}


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a safetensors file, from its header alone; raises `InvalidAdapter`."""
    return {name: place.shape for name, place in _read_places(path).items()}


def _read_places(path: Path) -> dict[str, _Place]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
                raise InvalidAdapter(path.name, "is not a safetensors file")
            header: object = json.loads(file.read(length))
        if not isinstance(header, dict):
            raise ValueError("an object was expected")
        entries = cast(dict[str, dict[str, Any]], header)
        places: dict[str, _Place] = {}
        ranges: list[tuple[int, int, str]] = []
        for name, entry in entries.items():
            if name == "__metadata__":
                continue
            shape, dtype = _counts(entry["shape"]), str(entry["dtype"])
            if dtype not in _DTYPES:
                raise InvalidAdapter(path.name, f"{name[:200]} is {dtype[:20]}; {', '.join(_DTYPES)} are supported")
            first, end = _counts(entry["data_offsets"])
            if end - first != math.prod(shape) * _DTYPES[dtype]:
                raise InvalidAdapter(path.name, f"{name[:200]} does not lie in the file")
            ranges.append((first, end, name))
            places[name] = _Place(shape, dtype, 8 + length + first, 8 + length + end)
        # As the format asks: one behind the other, from the header's end to the file's.
        at = 0
        for first, end, name in sorted(ranges):
            if first != at or end > size - 8 - length:
                raise InvalidAdapter(path.name, f"{name[:200]} does not lie in the file")
            at = end
        if at != size - 8 - length:
            raise InvalidAdapter(path.name, "is longer than its tensors")
        return places
    except OSError as error:
        raise UnreadableAdapter(path.name, error.strerror or "cannot be read") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidAdapter(path.name, "is not a safetensors file") from error


def _is_finite(values: bytes, dtype: str) -> bool:
    """Whether no exponent of a row of little-endian floats has all of its bits set."""
    high = values[_DTYPES[dtype] - 1 :: _DTYPES[dtype]]
    if dtype == "F16":
        return 1 not in high.translate(_FULL_5)
    # The exponent's last bit lies in the byte below.
    if 1 not in (full := high.translate(_FULL_7)):
        return True
    below = values[_DTYPES[dtype] - 2 :: _DTYPES[dtype]].translate(_TOP_BIT)
    return not int.from_bytes(full, "little") & int.from_bytes(below, "little")


def _counts(values: object) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise ValueError("a list was expected")
    listed = cast(list[object], values)
    if not all(type(value) is int and 0 <= value < 2**63 for value in listed):
        raise ValueError("whole numbers were expected")
    return tuple(cast(list[int], listed))


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        with (folder / CONFIG).open("rb") as file:
            read = file.read(_LONGEST_CONFIG + 1)
        if len(read) > _LONGEST_CONFIG:
            raise InvalidAdapter(CONFIG, f"is longer than {_LONGEST_CONFIG} bytes")
        content: object = json.loads(read)
    except FileNotFoundError as error:
        raise UnreadableAdapter(CONFIG, "is missing") from error
    except OSError as error:
        raise UnreadableAdapter(CONFIG, error.strerror or "cannot be read") from error
    except (ValueError, RecursionError) as error:
        raise InvalidAdapter(CONFIG, "is not valid JSON") from error
    if not isinstance(content, dict):
        raise InvalidAdapter(CONFIG, "an object was expected")
    return cast(dict[str, Any], content)


def _weights_of(folder: Path) -> Path:
    path = folder / WEIGHTS
    if path.is_file():
        return path
    pickles = [name for name in ("adapter_model.bin", "adapter_model.pt") if (folder / name).exists()]
    if pickles:
        raise InvalidAdapter(pickles[0], f"is a pickle, which may run code: only {WEIGHTS} is read")
    raise UnreadableAdapter(WEIGHTS, "is missing")


def _pair(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[Shape, Shape]]:
    """Return the shapes of both tensors of each module."""
    found: dict[str, dict[int, Shape]] = {}
    for name, shape in shapes.items():
        end = next((end for end in _ENDS if name.endswith(end)), None)
        if end is None or not name.startswith(_PREFIX):
            raise InvalidAdapter(WEIGHTS, f"{name[:200]} is not a tensor of a LoRA adapter")
        if len(shape) != 2:
            raise InvalidAdapter(WEIGHTS, f"{name[:200]} has shape {list(shape)[:8]}; a matrix was expected")
        found.setdefault(name.removeprefix(_PREFIX).removesuffix(end), {})[_ENDS[end]] = _pair_of(shape)
    for module, parts in found.items():
        if len(parts) < 2:
            raise InvalidAdapter(WEIGHTS, f"{module[:200]} lacks {'lora_B' if 0 in parts else 'lora_A'}")
    if not found:
        raise InvalidAdapter(WEIGHTS, "holds no tensors")
    return {module: (parts[0], parts[1]) for module, parts in found.items()}


def _check_target_modules(named: object, shapes: Mapping[str, object]) -> None:
    if isinstance(named, str):
        return  # a pattern; what it meant is in the file
    if not isinstance(named, list) or not all(isinstance(name, str) for name in cast(list[object], named)):
        raise InvalidAdapter("target_modules", "must be a list of names, or a pattern")
    names = cast(list[str], named)
    for name in names:
        if not any(module == name or module.endswith(f".{name}") for module in shapes):
            raise InvalidAdapter("target_modules", f"names {name[:200]!r}, for which {WEIGHTS} has no tensors")
    for module in shapes:
        if not any(module == name or module.endswith(f".{name}") for name in names):
            raise InvalidAdapter("target_modules", f"does not name {module[:200]}, for which {WEIGHTS} has tensors")


def _pair_of(shape: object) -> Shape:
    first, second = cast("tuple[int, int]", shape)
    return int(first), int(second)


def _shown(value: object) -> str:
    return repr(value)[:80]
