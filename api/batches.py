"""Batches as objects in Redis: what the routes create, show and cancel, and `api.jobs` carries out."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import orjson

from api import names
from shared.connection import Argument, Link
from shared.keys import ulid
from shared.lua import script
from shared.webhooks import Recipient, WebhookStore

BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
ENDED: frozenset[BatchStatus] = frozenset({"failed", "completed", "expired", "cancelled"})
_STAMPS = (
    "in_progress_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)
_INDEX_SPARE_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class Batch:
    id: str
    status: BatchStatus
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    """Seconds since 1970, as all stamps."""
    expires_at: int
    """What has not run by then expires."""
    ttl_s: int
    output_ttl_s: int
    metadata: Mapping[str, str] | None = None
    model: str | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: Sequence[Mapping[str, object]] = ()
    total: int = 0
    completed: int = 0
    failed: int = 0
    usage: Mapping[str, int] | None = None
    webhook: Mapping[str, Any] | None = None
    """`url` and `metadata` of who is told when it has ended."""
    stamps: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def object(self) -> dict[str, object]:
        """Return the batch in OpenAI's shape."""
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": {"object": "list", "data": list(self.errors)} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{name: self.stamps.get(name) for name in _STAMPS},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "usage": None if self.usage is None else _usage(self.usage),
            "metadata": self.metadata,
        }


def _told(batch: Batch) -> dict[str, object]:
    """Return what a webhook tells of a batch."""
    shown = batch.object
    names_ = ("status", "endpoint", "model", "request_counts", "output_file_id", "error_file_id", "usage")
    return {name: shown[name] for name in names_}


def _usage(usage: Mapping[str, int]) -> dict[str, object]:
    return {
        "input_tokens": usage["input_tokens"],
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": usage["output_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["input_tokens"] + usage["output_tokens"],
    }


class BatchStore:
    """Every method raises `FleetUnavailable` if Redis cannot be reached."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._webhooks = WebhookStore(link)

    async def create(
        self,
        tenant: str,
        endpoint: str,
        input_file_id: str,
        completion_window: str,
        window_s: int,
        ttl_s: int,
        output_ttl_s: int,
        metadata: Mapping[str, str] | None,
        webhook: Mapping[str, Any] | None = None,
    ) -> Batch:
        """Store a batch and put it where jobs look for work."""
        now = int(time.time())
        batch = Batch(
            f"batch_{ulid()}",
            "validating",
            endpoint,
            input_file_id,
            completion_window,
            now,
            now + window_s,
            ttl_s,
            output_ttl_s,
            metadata,
            webhook=webhook,
        )
        key, life_ms = names.batch(tenant, batch.id), (window_s + ttl_s) * 1000
        facts = {
            name: getattr(batch, name)
            for name in (
                "id",
                "endpoint",
                "input_file_id",
                "completion_window",
                "created_at",
                "expires_at",
                "ttl_s",
                "output_ttl_s",
                "metadata",
                "webhook",
            )
        }
        await self._link.read("HSET", key, "status", batch.status, "facts", orjson.dumps(facts))
        await self._link.read("PEXPIRE", key, life_ms)
        index = names.batches(tenant)
        await self._link.read("ZADD", index, now * 1000 + life_ms, batch.id)
        await self._outlive(index, life_ms + _INDEX_SPARE_MS)
        await self._link.read("ZADD", names.OPEN_BATCHES, batch.expires_at * 1000, f"{tenant}/{batch.id}")
        await self._outlive(names.OPEN_BATCHES, life_ms + _INDEX_SPARE_MS)
        return batch

    async def find(self, tenant: str, batch_id: str) -> Batch | None:
        fields: Mapping[bytes, bytes] = await self._link.read("HGETALL", names.batch(tenant, batch_id))
        if not fields:
            return None
        values: dict[str, Any] = {key.decode(): value for key, value in fields.items()}
        stamps = {name: int(values[name]) for name in _STAMPS if name in values}
        return Batch(
            status=cast(BatchStatus, values["status"].decode()),
            stamps=stamps,
            model=_text(values.get("model")),
            output_file_id=_text(values.get("output_file_id")),
            error_file_id=_text(values.get("error_file_id")),
            errors=orjson.loads(values.get("errors", b"[]")),
            total=int(values.get("total", 0)),
            completed=int(values.get("completed", 0)),
            failed=int(values.get("failed", 0)),
            usage=orjson.loads(values.get("usage", b"null")),
            **orjson.loads(values["facts"]),
        )

    async def list_all(self, tenant: str) -> Sequence[Batch]:
        """Return the batches of a tenant, oldest first."""
        index = names.batches(tenant)
        await self._link.read("ZREMRANGEBYSCORE", index, "-inf", time.time_ns() // 1_000_000)
        ids: list[bytes] = await self._link.read("ZRANGE", index, 0, -1)
        found = [await self.find(tenant, batch_id.decode()) for batch_id in ids]
        return sorted((batch for batch in found if batch is not None), key=lambda batch: batch.id)

    async def advance(
        self, tenant: str, batch_id: str, allowed: Sequence[BatchStatus], status: BatchStatus, **fields: Argument
    ) -> BatchStatus | None:
        """Move a batch from one of the allowed states to `status`, and stamp the time; return where it is now.

        `fields` are set only if it moved. None: there is no such batch.
        """
        extra: list[Argument] = [part for pair in fields.items() for part in pair]
        if status != "validating":
            extra += [f"{status}_at", int(time.time())]
        args: list[Argument] = [len(allowed), *allowed, status, *extra]
        reply = await self._link.run_again(script("advance"), [names.batch(tenant, batch_id)], args)
        if not reply:
            return None
        if status in ENDED and reply[0]:
            await self.forget_open(tenant, batch_id)
        return cast(BatchStatus, reply[1].decode())

    async def count(self, tenant: str, batch_id: str, completed: int, failed: int) -> None:
        await self._link.read("HSET", names.batch(tenant, batch_id), "completed", completed, "failed", failed)

    async def open(self) -> Sequence[tuple[str, str]]:
        """Return tenant and id of every batch that has not ended."""
        members: list[bytes] = await self._link.read("ZRANGE", names.OPEN_BATCHES, 0, -1)
        return [(tenant, batch_id) for tenant, _, batch_id in (member.decode().rpartition("/") for member in members)]

    async def forget_open(self, tenant: str, batch_id: str) -> None:
        """Take a batch off the list of work. Who is to be told of its end is put down before: a crash between the two
        leaves it on the list, and whoever finds it there ends here again."""
        batch = await self.find(tenant, batch_id)
        if batch is not None and batch.status in ENDED and batch.webhook is not None:
            to = Recipient(tenant=tenant, kind="batch", name=batch.id, **batch.webhook)
            await self._webhooks.add(batch.id, to, orjson.dumps(_told(batch)))
        await self._link.read("ZREM", names.OPEN_BATCHES, f"{tenant}/{batch_id}")

    async def save_line(self, tenant: str, batch: Batch, number: int, outcome: Mapping[str, object]) -> None:
        key = names.batch_lines(tenant, batch.id)
        await self._link.read("HSET", key, number, orjson.dumps(outcome))
        life_ms = (batch.expires_at - int(time.time()) + batch.ttl_s) * 1000
        await self._link.read("PEXPIRE", key, max(60_000, life_ms))

    async def lines(self, tenant: str, batch_id: str) -> dict[int, dict[str, Any]]:
        """Return the outcomes of the lines that have ended, by their numbers."""
        found: Mapping[bytes, bytes] = await self._link.read("HGETALL", names.batch_lines(tenant, batch_id))
        return {int(number): orjson.loads(outcome) for number, outcome in found.items()}

    async def forget_lines(self, tenant: str, batch_id: str) -> None:
        await self._link.read("DEL", names.batch_lines(tenant, batch_id))

    async def hold(self, tenant: str, batch_id: str, holder: str, lease_ms: int) -> bool:
        """Take or prolong the right to run a batch."""
        key = names.batch_lease(tenant, batch_id)
        return bool(await self._link.run_again(script("renew"), [key], [holder, lease_ms]))

    async def held(self, tenant: str, batch_id: str) -> bool:
        return bool(await self._link.read("EXISTS", names.batch_lease(tenant, batch_id)))

    async def release(self, tenant: str, batch_id: str, holder: str) -> None:
        await self._link.run_again(script("release"), [names.batch_lease(tenant, batch_id)], [holder])

    async def _outlive(self, key: str, ttl_ms: int) -> None:
        if cast(int, await self._link.read("PTTL", key)) < ttl_ms:
            await self._link.read("PEXPIRE", key, ttl_ms)


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()
