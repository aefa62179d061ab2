"""Files in Redis: bytes in pieces, so that every front and every job reads them; each with a lifetime.

Redis is memory: a file has a size limit, all files of a tenant have a quota, and everything expires.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import cast

import orjson

from api import names
from api.errors import ApiError
from shared.connection import Link
from shared.keys import ulid

_PIECE_BYTES = 512 * 1024
_UPLOAD_TTL_MS = 3_600_000
"""Of the pieces of a file that is still being written."""
_INDEX_SPARE_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class StoredFile:
    id: str
    bytes: int
    created_at: int
    """Seconds since 1970, as `expires_at`."""
    expires_at: int
    filename: str
    purpose: str

    @property
    def object(self) -> dict[str, object]:
        """Return the file in OpenAI's shape."""
        return {"object": "file", "status": "processed", "status_details": None, **asdict(self)}


class FileStore:
    """Every method raises `FleetUnavailable` if Redis cannot be reached."""

    def __init__(self, link: Link, quota_bytes: int) -> None:
        self._link = link
        self._quota_bytes = quota_bytes

    async def write(
        self, tenant: str, filename: str, purpose: str, content: AsyncIterator[bytes], ttl_s: int, file_id: str = ""
    ) -> StoredFile:
        """Store a file; the same `file_id` again replaces it. Raises `ApiError` (413) over the tenant's quota."""
        file_id = file_id or f"file-{ulid()}"
        left = self._quota_bytes - await self._used(tenant, besides=file_id)
        key = names.file_bytes(tenant, file_id)
        await self._link.read("DEL", key)
        size = number = 0
        async for piece in _pieces(content):
            size += len(piece)
            if size > left:
                await self._link.read("DEL", key)
                message = f"all files together may have {self._quota_bytes} bytes; delete some first"
                raise ApiError(413, "storage_quota_exceeded", message, "file")
            await self._link.read("HSET", key, number, piece)
            if number == 0:
                await self._link.read("PEXPIRE", key, _UPLOAD_TTL_MS)
            number += 1
        now = int(time.time())
        stored = StoredFile(file_id, size, now, now + ttl_s, filename, purpose)
        await self._publish(tenant, stored, ttl_s * 1000)
        return stored

    async def _publish(self, tenant: str, stored: StoredFile, ttl_ms: int) -> None:
        # The object last: a file that can be seen can be read.
        index, sizes = names.files(tenant), names.file_sizes(tenant)
        await self._link.read("HSET", sizes, stored.id, stored.bytes)
        await self._link.read("ZADD", index, stored.expires_at * 1000, stored.id)
        for key in (index, sizes):
            await self._outlive(key, ttl_ms + _INDEX_SPARE_MS)
        await self._link.read("PEXPIRE", names.file_bytes(tenant, stored.id), ttl_ms)
        key = names.file(tenant, stored.id)
        await self._link.read("HSET", key, "object", orjson.dumps(asdict(stored)))
        await self._link.read("PEXPIRE", key, ttl_ms)

    async def find(self, tenant: str, file_id: str) -> StoredFile | None:
        raw: bytes | None = await self._link.read("HGET", names.file(tenant, file_id), "object")
        return None if raw is None else StoredFile(**orjson.loads(raw))

    async def read(self, tenant: str, file_id: str) -> AsyncIterator[bytes]:
        """Yield the pieces in order; nothing if the file has expired meanwhile."""
        number = 0
        key = names.file_bytes(tenant, file_id)
        while (piece := await self._link.read("HGET", key, number)) is not None:
            yield piece
            number += 1

    async def list_all(self, tenant: str) -> Sequence[StoredFile]:
        """Return the files of a tenant, oldest first."""
        found = [await self.find(tenant, file_id) for file_id in await self._ids(tenant)]
        return sorted((file for file in found if file is not None), key=lambda file: file.id)

    async def delete(self, tenant: str, file_id: str) -> bool:
        """Return False if there was no such file."""
        removed = await self._link.read("DEL", names.file(tenant, file_id))
        await self._link.read("DEL", names.file_bytes(tenant, file_id))
        await self._link.read("ZREM", names.files(tenant), file_id)
        await self._link.read("HDEL", names.file_sizes(tenant), file_id)
        return removed > 0

    async def _ids(self, tenant: str) -> list[str]:
        now_ms = time.time_ns() // 1_000_000
        await self._link.read("ZREMRANGEBYSCORE", names.files(tenant), "-inf", now_ms)
        ids: list[bytes] = await self._link.read("ZRANGE", names.files(tenant), 0, -1)
        return [file_id.decode() for file_id in ids]

    async def _used(self, tenant: str, besides: str) -> int:
        sizes: Mapping[bytes, bytes] = await self._link.read("HGETALL", names.file_sizes(tenant))
        living = set(await self._ids(tenant))
        gone = [file_id for file_id in sizes if file_id.decode() not in living]
        if gone:
            await self._link.read("HDEL", names.file_sizes(tenant), *gone)
        living.discard(besides)
        return sum(int(size) for file_id, size in sizes.items() if file_id.decode() in living)

    async def _outlive(self, key: str, ttl_ms: int) -> None:
        """Prolong the life of an index, never shorten it."""
        if cast(int, await self._link.read("PTTL", key)) < ttl_ms:
            await self._link.read("PEXPIRE", key, ttl_ms)


async def _pieces(content: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the content in pieces of `_PIECE_BYTES`, the last one shorter."""
    held = bytearray()
    async for part in content:
        held += part
        while len(held) >= _PIECE_BYTES:
            yield bytes(held[:_PIECE_BYTES])
            del held[:_PIECE_BYTES]
            # A long upload must not keep the loop from others.
            await asyncio.sleep(0)
    if held:
        yield bytes(held)
