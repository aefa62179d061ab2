"""The worker's heartbeat: renews the leases of the requests that it runs, and says which it has lost.

Synchronous, for a thread of its own: a beat may not wait for a forward, a compilation or a model load. Whoever beats
has to stop beating when the decode loop does: a live heart with a dead brain must lose its leases.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Self, cast

from redis import Redis, exceptions

from shared.commands import LANES
from shared.connection import Argument, evalsha, open_sync_client, translate
from shared.keys import GROUP, Keys, partition
from shared.lua import script
from shared.queue import LEASE_MS
from shared.roster import WorkerInfo, pack_worker


class HeldState(Enum):
    OK = "ok"
    FENCED = "fenced"
    """Somebody else's now, or ended: drop it without an event."""
    ABORTED = "aborted"
    EXPIRED = "expired"
    """Its deadline has passed: end it."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a beat says about one request."""

    state: HeldState
    reason: str = ""
    """Why it is to be aborted."""


class Heart:
    """One worker's beats. For one thread."""

    def __init__(
        self, client: Redis, worker_id: str, model: str, lease_ms: int = LEASE_MS, partitions: int = 1
    ) -> None:
        self._client = client
        self._worker = worker_id
        self._parts = [partition(model, number) for number in range(partitions)]
        self._lease_ms = lease_ms

    @classmethod
    def connect(cls, url: str, worker_id: str, model: str, lease_ms: int = LEASE_MS, partitions: int = 1) -> Self:
        """Build a heart with its own connection. A reply is awaited for half a lease at most."""
        client = open_sync_client(url, timeout_s=min(8.0, lease_ms / 2000))
        return cls(client, worker_id, model, lease_ms, partitions)

    @property
    def interval_s(self) -> float:
        """Time between two beats: a quarter of the lease."""
        return self._lease_ms / 4000

    def beat(self, held: Mapping[str, int], info: WorkerInfo) -> dict[str, Held]:
        """Renew the leases of `held` (request id: epoch) and announce the worker; one answer for each request.

        Raises `FleetUnavailable`. Beating again is always right.
        """
        answers: dict[str, Held] = {}
        for part in self._parts:
            keys = Keys(part)
            mine = [(request_id, epoch) for request_id, epoch in held.items() if Keys.of(request_id).part == part]
            names = [keys.worker(self._worker), keys.workers(), keys.officers(), *[keys.lane(lane) for lane in LANES]]
            names += [name for request_id, _ in mine for name in (keys.request(request_id), keys.abort(request_id))]
            fields = [value for pair in pack_worker(info).items() for value in pair]
            args: list[Argument] = [
                GROUP,
                self._worker,
                self._lease_ms,
                len(fields),
                *fields,
                *[epoch for _, epoch in mine],
            ]
            replies = self._run(names, args)
            for (request_id, _), reply in zip(mine, replies, strict=True):
                state, _, reason = reply.decode(errors="replace").partition(":")
                answers[request_id] = Held(HeldState(state), reason)
        return answers

    def close(self) -> None:
        self._client.close()

    def _run(self, names: list[str], args: list[Argument]) -> list[bytes]:
        beat = script("beat")
        execute = cast(Callable[..., list[bytes]], self._client.execute_command)  # pyright: ignore[reportUnknownMemberType]
        try:
            try:
                return execute(*evalsha(beat, names, args))
            except exceptions.NoScriptError:
                return execute("EVAL", beat.source, len(names), *names, *args)
        except (exceptions.RedisError, OSError) as error:
            raise translate(error) from error
