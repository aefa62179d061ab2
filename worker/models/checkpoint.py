"""A model folder as facts: its config files, and the special ids that are spread over them."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from shared.decoding import Decoding, Threshold


class ModelError(Exception):
    """A folder cannot be served; the message names the file, key or tensor, and what would be right."""


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """What weights and sampling need to know of a tokenizer; text is somebody else's business."""

    size: int
    """One more than the highest id that stands for text."""
    mask_id: int | None
    pad_id: int | None
    eos_id: int | None


Loader = Callable[[Path, Mapping[str, tuple[Tensor, ...]], frozenset[str]], None]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    folder: Path
    config: Mapping[str, Any]
    """config.json"""
    generation: Mapping[str, Any]
    """generation_config.json; empty if there is none."""
    tokenizer: Tokenizer | None
    loader: Loader | None = None
    """Who takes the places of all tensors, and those that may be there without one; None: all are filled as they are
    stored."""

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a positive whole number of config.json. Raises `ModelError`."""
        value = self.config.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{self.folder / 'config.json'}: {key} must be a positive whole number, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number of config.json. Raises `ModelError`."""
        value = self.config.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise ModelError(f"{self.folder / 'config.json'}: {key} must be a positive number, not {value!r}")
        return float(value)

    def special(self, key: str) -> tuple[int, ...]:
        """Return the ids under `key` (one id or a list), generation_config.json before config.json."""
        for source in (self.generation, self.config):
            value = source.get(key)
            if value is None:
                continue
            ids = value if isinstance(value, list) else [value]
            if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
                raise ModelError(f"{self.folder}: {key} must be a token id or a list of them, not {value!r}")
            return tuple(dict.fromkeys(ids))
        return ()


def read_checkpoint(folder: Path, *, need_tokenizer: bool = False) -> Checkpoint:
    """Read the config files of a model folder. Raises `ModelError`, naming the file that is missing or broken."""
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such model folder")
    config = _read_json(folder / "config.json")
    if config is None:
        raise ModelError(f"{folder}: config.json is missing")
    tokenizer = _read_tokenizer(folder)
    if tokenizer is None and need_tokenizer:
        raise ModelError(f"{folder}: tokenizer.json is missing")
    return Checkpoint(folder, config, _read_json(folder / "generation_config.json") or {}, tokenizer)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: an object was expected")
    return content


def _read_tokenizer(folder: Path) -> Tokenizer | None:
    content = _read_json(folder / "tokenizer.json")
    if content is None:
        return None
    try:
        vocab = content["model"]["vocab"]
        # A unigram vocabulary is a list of [piece, score], the others map piece to id.
        ids: dict[str, int] = dict(vocab) if isinstance(vocab, dict) else {p[0]: i for i, p in enumerate(vocab)}
        ids.update({token["content"]: token["id"] for token in content.get("added_tokens", ())})
        size = max(ids.values()) + 1
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ModelError(f"{folder / 'tokenizer.json'}: not a tokenizer file (no model.vocab)") from error
    names = _read_json(folder / "tokenizer_config.json") or {}

    def named(key: str) -> int | None:
        token = names.get(key)
        return ids.get(token["content"] if isinstance(token, dict) else token) if token is not None else None

    return Tokenizer(size, named("mask_token"), named("pad_token"), named("eos_token"))


def find_mask_id(checkpoint: Checkpoint, family_default: int | None = None) -> int:
    """Return the mask id: from the config, else the tokenizer, else the family's usual one. Raises `ModelError`."""
    configured = checkpoint.special("mask_token_id")
    if configured:
        return configured[0]
    if checkpoint.tokenizer is not None and checkpoint.tokenizer.mask_id is not None:
        return checkpoint.tokenizer.mask_id
    if family_default is not None:
        return family_default
    raise ModelError(
        f"{checkpoint.folder}: no mask token: config.json has no mask_token_id and the tokenizer no mask_token"
    )


def find_filler_ids(checkpoint: Checkpoint, stop_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ids that only fill a canvas behind the end of an answer.

    Of several stop ids one closes a turn of the chat, the tokenizer's eos or else the first; the others and the padding
    id are filler. With a single one, filler is the padding id if there is another, else that stop id.
    """
    pad = checkpoint.special("pad_token_id")
    if not pad and checkpoint.tokenizer is not None and checkpoint.tokenizer.pad_id is not None:
        pad = (checkpoint.tokenizer.pad_id,)
    if not stop_token_ids:
        return pad
    eos = checkpoint.tokenizer.eos_id if checkpoint.tokenizer is not None else None
    closing = eos if eos in stop_token_ids else stop_token_ids[0]
    fillers = tuple(dict.fromkeys(token for token in (*stop_token_ids, *pad) if token != closing))
    return fillers or (closing,)


def find_decoding(checkpoint: Checkpoint, default: Decoding | None = None) -> Decoding:
    """Return the checkpoint's own decoding: `strategy` and its parameters in generation_config.json.

    A `threshold` without a strategy changes the default's. Raises `ModelError`.
    """
    default = default or Threshold()
    (kinds, _) = get_args(Decoding)
    known = {field for kind in get_args(kinds) for field in kind.model_fields}
    given = {key: value for key, value in checkpoint.generation.items() if key in known and value is not None}
    if "strategy" not in given:
        given = {key: value for key, value in given.items() if key in type(default).model_fields}
        given = {**default.model_dump(), **given}
    try:
        return TypeAdapter[Decoding](Decoding).validate_python(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "strategy"
        raise ModelError(f"{checkpoint.folder / 'generation_config.json'}: {field}: {first['msg']}") from error


def find_temperature(checkpoint: Checkpoint) -> float:
    """Return the checkpoint's own temperature; 0 if it asks for greedy decoding."""
    value = checkpoint.generation.get("temperature")
    if value is None or checkpoint.generation.get("do_sample") is False:
        return 0.0
    if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
        raise ModelError(f"{checkpoint.folder / 'generation_config.json'}: temperature must be >= 0, not {value!r}")
    return float(value)
