"""What a stored response was asked with. What it says is the event log of its request, which the fleet keeps."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import orjson

from api import names
from shared.connection import Link


@dataclass(frozen=True, slots=True)
class Record:
    id: str
    request_id: str
    """Of the fleet."""
    model: str
    created_at: int
    """Seconds since 1970."""
    prompt_tokens: int
    background: bool
    store: bool
    messages: Sequence[Mapping[str, Any]]
    """The conversation up to this response, without instructions, as templates take it."""
    items: Sequence[Mapping[str, Any]]
    """The input of this response alone, in OpenAI's shape."""
    echo: Mapping[str, Any]
    """Fields of the request that the response repeats."""
    canvas: bool = False
    """The stream shows frames of the canvas."""
    calls: bool = False
    """The text may hold calls of functions."""
    logprobs: bool = False
    """Its tokens are told with their log-probabilities."""


class ResponseStore:
    """Every method raises `FleetUnavailable` if Redis cannot be reached."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def save(self, tenant: str, record: Record, ttl_ms: int) -> None:
        key = names.response(tenant, record.id)
        await self._link.read("HSET", key, "record", orjson.dumps(asdict(record)))
        await self._link.read("PEXPIRE", key, ttl_ms)

    async def find(self, tenant: str, response_id: str) -> Record | None:
        raw: bytes | None = await self._link.read("HGET", names.response(tenant, response_id), "record")
        if raw is None:
            return None
        # A newer front may have written what this one does not know.
        known = {field.name for field in fields(Record)}
        return Record(**{name: value for name, value in orjson.loads(raw).items() if name in known})

    async def delete(self, tenant: str, record: Record) -> None:
        await self._link.read("DEL", names.response(tenant, record.id))
