"""Webhooks in Redis: messages that are due, those that were given up, and what became of each try.

The record of a message is committed by the script that ends its request, so that no crash comes between them. Whoever
delivers takes a message for a time: at least once, never at most once. A receiver tells repeats by the message's id.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shared.commands import Webhook
from shared.connection import Argument, Link, translate
from shared.keys import OTHER_HOOKS, Keys, closed_hooks, partition_of
from shared.lua import script

Told = Literal["told", "again", "later", "dead"]
"""What became of a try: delivered; to be tried again; not tried at all, and due later; given up."""
CLOSED_MS = 604_800_000
"""How long a receiver that has said that it is gone is left alone."""


class Recipient(BaseModel):
    """Where a message goes, and what it calls its subject. Kept as JSON beside the request."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    url: str
    tenant: str = ""
    kind: Literal["request", "response", "batch"] = "request"
    name: str | None = None
    choice: int = 0
    calls: bool = False
    model: str | None = None
    """As the request had it, where that is not the model's own name."""
    metadata: dict[str, str] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Taken:
    """A message that this process is to deliver."""

    id: str
    """Of the request or batch that has ended."""
    to: Recipient
    end: bytes
    """JSON: the terminal event of the request, or what there is to tell of a batch."""
    ended_ms: int
    """Server time (ms since 1970)."""
    attempt: int
    """From 1."""


@dataclass(frozen=True, slots=True)
class Undelivered:
    """A message that was given up, or is due."""

    id: str
    kind: str
    name: str
    url: str
    tenant: str
    attempts: int
    why: str
    """What came of the last try; empty before the first."""
    ended_ms: int
    at_ms: int
    """When it was given up, or is due."""


@dataclass(frozen=True, slots=True)
class HookCensus:
    due: int
    dead: int
    late_s: float
    """How long the message that is due the longest has waited."""
    ends: Mapping[str, int]
    """How many tries ended in which way."""


def encode_hook(webhook: Webhook, tenant: str, model: str | None = None) -> bytes:
    """Return what the submit script keeps of a webhook; `model` as `Recipient` has it."""
    named = {} if model is None else {"model": model}
    return orjson.dumps(webhook.model_dump(exclude_defaults=True) | named | {"tenant": tenant})


def hook_keys(subject_id: str) -> Keys:
    """Return where the message about a request or a batch lives. Raises ValueError for what is neither's id."""
    return OTHER_HOOKS if subject_id.startswith("batch_") else Keys(partition_of(subject_id))


class WebhookStore:
    """Every method raises `FleetUnavailable` if Redis cannot be reached."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def add(self, subject_id: str, to: Recipient, end: bytes) -> None:
        """Have a receiver told of something that no script of the fleet ends. Adding it again changes nothing."""
        keys = hook_keys(subject_id)
        args: list[Argument] = [_prefix(keys), subject_id, orjson.dumps(to.model_dump(exclude_defaults=True)), end]
        await self._link.run_again(script("hook_add"), [keys.hooks(), keys.hook(subject_id)], args)

    async def take(self, keys: Keys, most: int, lease_ms: int) -> list[Taken]:
        """Take messages of one partition that are due; each is due again after the lease."""
        found = await self._link.run(script("hook_take"), [keys.hooks()], [_prefix(keys), most, lease_ms])
        taken: list[Taken] = []
        for raw_id, to, end, ended_ms, attempt in found:
            subject_id = raw_id.decode(errors="replace")
            try:
                taken.append(Taken(subject_id, Recipient.model_validate_json(to), end, ended_ms, attempt))
            except ValidationError:
                # Nobody of ours has written it, and nobody can deliver it.
                await self._settle(keys, subject_id, attempt, "dead", 0, "malformed")
        return taken

    async def settle(self, message: Taken, outcome: Told, delay_ms: int = 0, why: str = "") -> bool:
        """Say what became of a try; False if somebody else has taken the message since."""
        return await self._settle(hook_keys(message.id), message.id, message.attempt, outcome, delay_ms, why)

    async def _settle(self, keys: Keys, subject_id: str, attempt: int, outcome: Told, delay_ms: int, why: str) -> bool:
        names = [keys.hooks(), keys.hook(subject_id), keys.dead_hooks(), keys.hook_counts()]
        args: list[Argument] = [_prefix(keys), subject_id, attempt, outcome, delay_ms, why]
        return bool(await self._link.run(script("hook_settle"), names, args))

    async def list_dead(self, keys: Iterable[Keys], limit: int) -> list[Undelivered]:
        """Return the newest messages that were given up, newest first."""
        found: list[Undelivered] = []
        for part in keys:
            rows = await self._link.read("ZRANGE", part.dead_hooks(), 0, limit - 1, "REV", "WITHSCORES")
            found += await self._read(part, rows)
        return sorted(found, key=lambda one: one.at_ms, reverse=True)[:limit]

    async def list_due(self, keys: Iterable[Keys], limit: int) -> list[Undelivered]:
        """Return the messages that wait for their next try, those that are due first."""
        found: list[Undelivered] = []
        for part in keys:
            rows = await self._link.read("ZRANGE", part.hooks(), 0, limit - 1, "WITHSCORES")
            found += await self._read(part, rows)
        return sorted(found, key=lambda one: one.at_ms)[:limit]

    async def replay(self, subject_id: str) -> bool:
        """Make a message that was given up due again, and its receiver one that is there; False if there is none.

        Raises ValueError for what is no id.
        """
        keys = hook_keys(subject_id)
        names = [keys.hooks(), keys.hook(subject_id), keys.dead_hooks()]
        to: bytes | None = await self._link.read("HGET", keys.hook(subject_id), "to")
        if not await self._link.run_again(script("hook_replay"), names, [subject_id]):
            return False
        if to is not None:
            recipient = Recipient.model_validate_json(to)
            await self._link.read("DEL", closed_hooks(_digest(recipient)))
        return True

    async def discard(self, subject_id: str) -> bool:
        """Forget a message that was given up; False if there is none. Raises ValueError for what is no id."""
        keys = hook_keys(subject_id)
        if not await self._link.read("ZREM", keys.dead_hooks(), subject_id):
            return False
        await self._link.read("DEL", keys.hook(subject_id))
        return True

    async def close(self, to: Recipient) -> None:
        """Leave a receiver alone that has said that it is gone."""
        await self._link.read("SET", closed_hooks(_digest(to)), 1, "PX", CLOSED_MS)

    async def closed(self, to: Recipient) -> bool:
        return bool(await self._link.read("EXISTS", closed_hooks(_digest(to))))

    async def census(self, keys: Iterable[Keys]) -> HookCensus:
        """Count the messages of some partitions, in one round trip."""
        places = list(keys)
        commands: list[tuple[Argument, ...]] = [("TIME",)]
        for part in places:
            commands += [("ZCARD", part.hooks()), ("ZCARD", part.dead_hooks())]
            commands += [("ZRANGE", part.hooks(), 0, 0, "WITHSCORES"), ("HGETALL", part.hook_counts())]
        replies = await self._link.pipeline(commands)
        for reply in replies:
            if isinstance(reply, Exception):
                raise translate(reply) from reply
        (seconds, micros), *rest = replies
        now_ms = int(seconds) * 1000 + int(micros) // 1000
        late_s, ends = 0.0, Counter[str]()
        for first, counts in zip(rest[2::4], rest[3::4], strict=True):
            for _, at_ms in _pairs(first):
                late_s = max(late_s, (now_ms - at_ms) / 1000)
            for name, count in cast(Mapping[bytes, bytes], counts).items():
                ends[name.decode(errors="replace")] += int(count)
        return HookCensus(sum(rest[::4]), sum(rest[1::4]), late_s, ends)

    async def _read(self, keys: Keys, rows: list[Any]) -> list[Undelivered]:
        found: list[Undelivered] = []
        for subject_id, at_ms in _pairs(rows):
            fields: list[bytes | None] = await self._link.read("HMGET", keys.hook(subject_id), "to", "n", "why", "t")
            to, attempts, why, ended_ms = fields
            if to is None:
                continue
            try:
                recipient = Recipient.model_validate_json(to)
            except ValidationError:
                continue
            found.append(
                Undelivered(
                    subject_id,
                    recipient.kind,
                    recipient.name or subject_id,
                    recipient.url,
                    recipient.tenant,
                    int(attempts or 0),
                    (why or b"").decode(errors="replace"),
                    int(ended_ms or 0),
                    at_ms,
                )
            )
        return found


def _pairs(rows: list[Any]) -> list[tuple[str, int]]:
    """Read members with their scores, which come in pairs or flat, as the client library likes."""
    if rows and isinstance(rows[0], bytes):
        rows = list(zip(rows[::2], rows[1::2], strict=True))
    return [(member.decode(errors="replace"), int(float(score))) for member, score in rows]


def _prefix(keys: Keys) -> str:
    return keys.hooks().removesuffix("hooks")


def _digest(to: Recipient) -> str:
    return hashlib.sha256(f"{to.tenant} {to.url}".encode()).hexdigest()[:32]
