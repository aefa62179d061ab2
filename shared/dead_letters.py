"""Requests that were given up because they kill their workers: what is known of them."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

from pydantic import ValidationError

from shared.commands import Generate, InvalidCommand, UnsupportedCommand, decode_command
from shared.connection import Link
from shared.keys import Keys, partition, ulid
from shared.lua import script
from shared.webhooks import Recipient

_PAGE = 256


@dataclass(frozen=True, slots=True)
class DeadLetter:
    id: str
    """Of the request, which can be read and replayed for a week after its death."""
    died_ms: int
    """Server time (ms since 1970)."""
    attempts: int
    why: str
    """"alone": its last worker was lost while it ran nothing else."""
    lost_workers: tuple[str, ...]
    """Ids of the workers that were lost with it, in order."""


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of a request that may have been a dead letter."""

    state: str
    """As in `shared.client.Result`."""
    replayed_as: str | None
    """The id under which it was submitted again."""


class DeadLetters:
    """The dead letters of one server."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def list(self, model: str, partitions: int, limit: int) -> list[DeadLetter]:
        """Return the newest ones of a model, newest first."""
        found: list[DeadLetter] = []
        for number in range(partitions):
            async for _, letter in self._newest(Keys(partition(model, number)), limit):
                found.append(letter)
        return sorted(found, key=lambda letter: letter.died_ms, reverse=True)[:limit]

    async def command(self, request_id: str) -> Generate | None:
        """Return the command of a dead request; None if there is none (any more), or nobody here can read it."""
        payload: bytes | None
        state, payload = await self._link.read("HMGET", Keys.of(request_id).request(request_id), "st", "in")
        if state != b"dead" or payload is None:
            return None
        try:
            return decode_command(payload)
        except (InvalidCommand, UnsupportedCommand):
            return None

    async def tenant(self, request_id: str) -> str:
        """Return who has asked for a dead request, as far as it is known: who is counted, or told by a webhook."""
        keys = Keys.of(request_id)
        counted: bytes | None = await self._link.read("HGET", keys.request(request_id), "ten")
        told: bytes | None = await self._link.read("HGET", keys.hook(request_id), "to")
        if counted is not None or told is None:
            return (counted or b"").decode(errors="replace")
        try:
            return Recipient.model_validate_json(told).tenant
        except ValidationError:
            return ""

    async def name_replay(self, request_id: str) -> str | None:
        """Return the id under which to submit a dead request again, the same for all who ask; None if there is none."""
        keys, fresh = Keys.of(request_id), f"{request_id.rpartition('_')[0]}_{ulid()}"
        named: bytes | None = await self._link.run_again(script("name_replay"), [keys.request(request_id)], [fresh])
        return None if named is None else named.decode()

    async def fate(self, request_id: str) -> Fate | None:
        """Tell what became of a request; None if it is not known, or no longer."""
        state, replayed_as = await self._link.read("HMGET", Keys.of(request_id).request(request_id), "st", "as")
        if state is None:
            return None
        return Fate(state.decode(), None if replayed_as is None else replayed_as.decode())

    async def discard(self, request_id: str) -> bool:
        """Remove a dead letter from the list; return whether it was there."""
        keys = Keys.of(request_id)
        async for entry_id, letter in self._newest(keys, limit=None):
            if letter.id == request_id:
                return bool(await self._link.read("XDEL", keys.dead_letters(), entry_id))
        return False

    async def _newest(self, keys: Keys, limit: int | None) -> AsyncIterator[tuple[str, DeadLetter]]:
        end, seen = "+", 0
        while limit is None or seen < limit:
            count = _PAGE if limit is None else min(_PAGE, limit - seen)
            page: list[tuple[bytes, dict[bytes, bytes]]] = await self._link.read(
                "XREVRANGE", keys.dead_letters(), end, "-", "COUNT", count
            )
            for entry_id, fields in page:
                yield entry_id.decode(), _letter(entry_id.decode(), fields)
            if len(page) < count:
                return
            seen += len(page)
            end = f"({page[-1][0].decode()}"


def _letter(entry_id: str, fields: dict[bytes, bytes]) -> DeadLetter:
    return DeadLetter(
        id=fields[b"id"].decode(),
        died_ms=int(entry_id.partition("-")[0]),
        attempts=int(fields[b"att"]),
        why=fields[b"why"].decode(),
        lost_workers=tuple(fields.get(b"lost", b"").decode(errors="replace").split()),
    )
