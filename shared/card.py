"""The model card: what a front must know of a model to validate, count and template, without the model itself.

A worker writes it to Redis at start (see `shared.keys.card`); it outlives the worker, so that a pool scaled to zero
still accepts work. On the wire it is one hash: `v`, `digest`, `meta` (JSON), `file:<name>` (gzip) for each file, and
`created`, which the script that writes it adds.
"""

import gzip
import hashlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

CARD_VERSION = 1
CARD_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""The files that a card carries, where the model folder has them."""

_FILE = "file:"


class InvalidCard(Exception):
    """The hash is not a model card of this version; the message says what is wrong."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    name: str
    family: str
    max_model_len: int
    """Prompt and produced tokens together."""
    block_length: int
    fixed_block_length: bool
    """True if a request may not choose another block length."""
    decoding: dict[str, Any]
    """The model's default strategy, as the dict of a `shared.decoding` class."""
    temperature: float
    """Used where a request names none."""
    capabilities: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    mask_token_id: int
    vocab_size: int
    """Token ids of a prompt are below it."""
    files: dict[str, bytes]
    """Content of the `CARD_FILES` that the model has."""
    digest: str = ""
    """sha256 (hex) over everything else; computed unless given."""
    partitions: int = 1
    """Into how many lots the model's queue is split: a new request goes to any of them."""
    largest_block: int | None = None
    """The longest block that a worker has room for in one step, guidance doubling its cost; None: any."""
    embedding_size: int = 0
    """Numbers in an embedding; 0: the model has none."""
    block_lengths: tuple[int, ...] = ()
    """Those of which a worker takes one, by its load, where a request names none; empty: always `block_length`."""
    created: int = field(default=0, compare=False)
    """When it was first written to Redis, in seconds since 1970; 0: it has not been. No part of the digest."""

    def __post_init__(self) -> None:
        if not self.digest:
            object.__setattr__(self, "digest", _digest(_meta(self), self.files))


def pack(card: ModelCard) -> dict[str, bytes]:
    """Return the fields of the Redis hash."""
    fields = {"v": str(CARD_VERSION).encode(), "digest": card.digest.encode(), "meta": _meta(card)}
    return fields | {_FILE + name: gzip.compress(content, 6, mtime=0) for name, content in card.files.items()}


def unpack(fields: Mapping[str, bytes] | Mapping[bytes, bytes]) -> ModelCard:
    """Parse the fields of the Redis hash (names as text or bytes); raises `InvalidCard`."""
    named = {key.decode() if isinstance(key, bytes) else key: value for key, value in fields.items()}
    try:
        version, digest = named["v"].decode(), named["digest"].decode()
        if version != str(CARD_VERSION):
            raise InvalidCard(f"a model card of version {version[:20]!r}; this program reads {CARD_VERSION}")
        meta = _Meta.model_validate_json(named["meta"])
        files = {
            key.removeprefix(_FILE): gzip.decompress(value) for key, value in named.items() if key.startswith(_FILE)
        }
        created = int(named.get("created", b"0"))
    except KeyError as error:
        raise InvalidCard(f"the model card lacks {error}") from error
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise InvalidCard(f"model card: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise InvalidCard(f"the model card is damaged: {error}") from error
    return ModelCard(**meta.model_dump(), files=files, digest=digest, created=created)


def differences(one: ModelCard, other: ModelCard) -> tuple[str, ...]:
    """Return the names of the fields and of the files in which two cards differ."""
    fields = [name for name in _Meta.model_fields if getattr(one, name) != getattr(other, name)]
    files = sorted({*one.files, *other.files})
    return (*fields, *(name for name in files if one.files.get(name) != other.files.get(name)))


class _Meta(BaseModel):
    """The JSON part of a card, checked where it enters a process. Fields of newer writers are ignored."""

    model_config = ConfigDict(extra="ignore")

    name: str
    family: str
    max_model_len: Annotated[int, Field(ge=1)]
    block_length: Annotated[int, Field(ge=1)]
    fixed_block_length: bool
    decoding: dict[str, Any]
    temperature: float
    capabilities: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    mask_token_id: int
    vocab_size: Annotated[int, Field(ge=1)]
    partitions: Annotated[int, Field(ge=1, le=1000)] = 1
    largest_block: Annotated[int, Field(ge=1)] | None = None
    embedding_size: Annotated[int, Field(ge=0)] = 0
    block_lengths: tuple[Annotated[int, Field(ge=1)], ...] = ()


def _meta(card: ModelCard) -> bytes:
    return orjson.dumps({name: getattr(card, name) for name in _Meta.model_fields}, option=orjson.OPT_SORT_KEYS)


def _digest(meta: bytes, files: Mapping[str, bytes]) -> str:
    total = hashlib.sha256(meta)
    for name in sorted(files):
        total.update(b"\0%s\0%d\0" % (name.encode(), len(files[name])))
        total.update(files[name])
    return total.hexdigest()
