"""Workers of the real protocol on a real server, whose decoding takes time on the test's clock only."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from redis import Redis
from redis.exceptions import ResponseError

from shared.client import FleetClient
from shared.commands import Lane
from shared.queue import Claim, WorkerQueue
from tests.helm.autoscaler import Autoscaler
from tests.shared.protocol_for_tests import (
    card_of,
    command_for,
    finish,
    lengths_of,
    pending_of,
    run_out_of_lease,
    state_of,
)

TICK_S = 5.0
LEASE_S = 15.0
# Longer than any test: leases end when the test's clock says so, by `run_out_of_lease`.
_NEVER_MS = 3_600_000


@dataclass
class Job:
    """What a request needs, and when things happened to it."""

    id: str
    takes_s: float
    submitted: float
    claimed: float | None = None
    done: float | None = None


@dataclass(eq=False)
class SimWorker:
    """A pod: ready at `ready_at`, holding up to `slots` requests."""

    queue: WorkerQueue
    ready_at: float
    slots: int
    held: dict[str, tuple[Claim, float]] = field(default_factory=dict[str, tuple[Claim, float]])
    leaving_at: float | None = None
    """End of its drain; set by SIGTERM."""


@dataclass(frozen=True)
class Sample:
    now: float
    replicas: int
    ready: int
    queued: int
    running: int
    oldest_s: float
    """Age of the oldest request that nobody has claimed yet."""


class Simulation:
    """A model's lanes, an autoscaler, and the pods that it asks for."""

    def __init__(
        self,
        url: str,
        redis: Redis,
        fleet: FleetClient,
        scaled: Any,
        model: str,
        *,
        slots: int = 8,
        start_s: float = 120.0,
        drain_s: float = 60.0,
        replicas: int = 0,
    ) -> None:
        self.autoscaler = Autoscaler(scaled, redis, replicas)
        self.now = 0.0
        self.jobs: dict[str, Job] = {}
        self.samples: list[Sample] = []
        self.workers: list[SimWorker] = []
        self.no_room_until = 0.0
        """Until then no node has a free device: new pods stay pending."""
        self._url, self._redis, self._fleet, self._model = url, redis, fleet, model
        self._slots, self._start_s, self._drain_s = slots, start_s, drain_s
        self._names = itertools.count()
        self._lost: list[SimWorker] = []
        self._expiring: list[tuple[float, str]] = []

    async def serve_once(self) -> None:
        """Leave the model's card behind, as a worker did that has gone since."""
        queue = WorkerQueue.connect(self._url, self._model, "before", lease_ms=_NEVER_MS)
        await queue.publish_card(card_of(self._model))
        await queue.close()

    async def submit(self, count: int, takes_s: float, lane: Lane = "std") -> list[str]:
        ids = []
        for _ in range(count):
            command = command_for(self._model, lane)
            await self._fleet.submit(command, queue_limit=10_000)
            self.jobs[command.id] = Job(command.id, takes_s, self.now)
            ids.append(command.id)
        return ids

    async def abort(self, ids: Sequence[str]) -> None:
        for request_id in ids:
            await self._fleet.abort(request_id)
            self.jobs[request_id].done = self.now

    async def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            await self._tick()
            self.now += TICK_S

    def crash(self, worker: SimWorker) -> None:
        """Lose a pod as by a dead node: what it held stays pending until its lease ends."""
        self._expiring += [(self.now + LEASE_S, request_id) for request_id in worker.held]
        self.workers.remove(worker)
        self._lost.append(worker)

    @property
    def unfinished(self) -> list[Job]:
        return [job for job in self.jobs.values() if job.done is None]

    def states(self) -> set[str]:
        return {state_of(self._redis, request_id)["st"] for request_id in self.jobs}

    async def close(self) -> None:
        for worker in [*self.workers, *self._lost]:
            await worker.queue.close()

    async def _tick(self) -> None:
        for at, request_id in list(self._expiring):
            if self.now >= at:
                run_out_of_lease(self._redis, request_id)
                self._expiring.remove((at, request_id))
        self.autoscaler.step(self.now)
        await self._follow()
        for worker in list(self.workers):
            await self._work(worker)
        self._record()

    async def _follow(self) -> None:
        """Do to the pods what a ReplicaSet does."""
        staying = [worker for worker in self.workers if worker.leaving_at is None]
        for _ in range(self.autoscaler.replicas - len(staying)):
            if self.now >= self.no_room_until:
                name = f"w{next(self._names)}"
                queue = WorkerQueue.connect(self._url, self._model, name, lease_ms=_NEVER_MS, reap_every_ms=0)
                self.workers.append(SimWorker(queue, self.now + self._start_s, self._slots))
        surplus = len(staying) - self.autoscaler.replicas
        for worker in sorted(staying, key=lambda one: (one.ready_at <= self.now, -one.ready_at))[: max(0, surplus)]:
            worker.leaving_at = self.now + self._drain_s

    async def _work(self, worker: SimWorker) -> None:
        for request_id, (claim, ends) in list(worker.held.items()):
            if self.now >= ends:
                await finish(worker.queue, claim)
                self.jobs[request_id].done = self.now
                del worker.held[request_id]
        if worker.leaving_at is not None:
            if self.now >= worker.leaving_at or not worker.held:
                for claim, ends in worker.held.values():
                    await worker.queue.hand_back(claim.id, claim.epoch)
                    # The next owner goes on from the last committed block.
                    self.jobs[claim.id].takes_s = ends - self.now
                self.workers.remove(worker)
                await worker.queue.close()
        elif self.now >= worker.ready_at and len(worker.held) < worker.slots:
            for claim in await worker.queue.take(worker.slots - len(worker.held)):
                job = self.jobs[claim.id]
                job.claimed = self.now
                worker.held[claim.id] = (claim, self.now + job.takes_s)

    def _pending(self) -> int:
        try:
            return pending_of(self._redis, self._model)
        except ResponseError:
            return 0  # no worker has ever made the group

    def _record(self) -> None:
        total, pending = lengths_of(self._redis, self._model), self._pending()
        waiting = [self.now - job.submitted for job in self.unfinished if job.claimed is None]
        ready = [worker for worker in self.workers if worker.leaving_at is None and self.now >= worker.ready_at]
        replicas = self.autoscaler.replicas
        self.samples.append(Sample(self.now, replicas, len(ready), total - pending, pending, max(waiting, default=0.0)))


def turns(samples: Sequence[Sample]) -> int:
    """Return how often the number of replicas changed its direction."""
    steps = [after.replicas - before.replicas for before, after in itertools.pairwise(samples)]
    signs = [step > 0 for step in steps if step]
    return sum(1 for before, after in itertools.pairwise(signs) if before != after)
