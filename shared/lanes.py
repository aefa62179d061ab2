"""Blocking reads of the lanes, for a worker that has nothing to do."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from redis.exceptions import ResponseError

from shared.commands import LANES
from shared.connection import FleetUnavailable, Link
from shared.keys import GROUP, Keys

_AGAIN_S = 0.05
_POLL_S = 0.25

log = logging.getLogger(__name__)

_Read = list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]]
"""What XREADGROUP returns: for each lane that has some, its entries."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What a lane holds, as it is: the scripts know what to do with entries that make no sense."""

    lane: str
    entry_id: str
    request_id: bytes
    version: bytes


class LaneReader:
    """Reads with connections of its own, which nothing else waits for. For one event loop, one read at a time.

    In a Cluster a command reads one partition only. There each partition has a connection that waits at its node, and
    the first to hear something calls the others off, by the server: what a cancelled read was given would be unseen.
    """

    def __init__(self, url: str, worker_id: str, parts: Sequence[Keys]) -> None:
        self._worker = worker_id
        first = Link.open(url, connections=1)
        self._apart = first.clustered and len(parts) > 1
        groups = [[part] for part in parts] if self._apart else [list(parts)]
        self._lanes = [[part.lane(lane) for part in group for lane in LANES] for group in groups]
        self._links = [first, *(Link.open(url, connections=1) for _ in groups[1:])]
        self._callers = Link.open(url, connections=1) if self._apart else None

    async def close(self) -> None:
        for link in [*self._links, *([self._callers] if self._callers is not None else [])]:
            await link.close()

    async def read(self, block_ms: int) -> list[Entry]:
        """Return the next entry, or one of each partition, or none in that time. Never cancel it.

        Raises `FleetUnavailable`, `GroupMissing`.
        """
        if self._callers is None:
            return await self._read(0, block_ms)
        ids: dict[int, int] = {}
        reads = {asyncio.create_task(self._read(i, block_ms, ids)): i for i in range(len(self._links))}
        _, waiting = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
        while waiting:
            for read in waiting:
                if reads[read] in ids:
                    await self._call_off(self._callers, self._lanes[reads[read]][0], ids[reads[read]])
            # Again: it may have begun to wait only after it was called off.
            _, waiting = await asyncio.wait(waiting, timeout=_AGAIN_S)
        found = [entry for read in reads if read.exception() is None for entry in read.result()]
        faults = [fault for read in reads if (fault := read.exception()) is not None]
        if faults and not found:
            raise faults[0]
        return found

    async def _read(self, number: int, block_ms: int, ids: dict[int, int] | None = None) -> list[Entry]:
        link, lanes = self._links[number], self._lanes[number]
        if ids is not None:
            _, client_id = await link.pipeline([("EXISTS", lanes[0]), ("CLIENT", "ID")])
            if isinstance(client_id, int):
                ids[number] = client_id
        # COUNT 1: blocked consumers are served in turn, and a burst must not go to the first one alone.
        command = ("XREADGROUP", "GROUP", GROUP, self._worker, "COUNT", 1, "BLOCK", block_ms, "STREAMS", *lanes)
        try:
            reply: _Read | None = await link.command(*command, *[">" for _ in lanes])
        except ResponseError as error:
            if not str(error).startswith("WRONGTYPE"):
                raise
            # Somebody else's key under a lane's name: `take` passes it over, so that is how to look for work.
            log.error("a key has the name of a lane, but is none: %s", ", ".join(lanes))
            await asyncio.sleep(min(_POLL_S, block_ms / 1000))
            return []
        return [
            Entry(lane.decode(), entry_id.decode(), fields.get(b"id", b""), fields.get(b"v", b"1"))
            for lane, read in (_Read() if reply is None else reply)
            for entry_id, fields in read
        ]

    async def _call_off(self, link: Link, lane: str, client_id: int) -> None:
        try:
            # A command without a key goes where the one before it went.
            await link.pipeline([("EXISTS", lane), ("CLIENT", "UNBLOCK", client_id)])
        except FleetUnavailable:
            return
