"""What the queue looks like, read from Redis when somebody scrapes: it has no worker to ask while a pool is at zero.

Every api process tells the same, so a query takes the largest over them, never the sum.
"""

import asyncio

from prometheus_client import CollectorRegistry, Gauge

from api.ports import Fleet
from api.roster import live_workers
from shared.card import InvalidCard
from shared.client import FleetUnavailable, UnknownModel
from shared.queue_state import QueueState


class QueueMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        def lanes(name: str, text: str) -> Gauge:
            return Gauge(f"diffleet_{name}", text, ("model", "lane"), registry=registry)

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"diffleet_{name}", text, labels, registry=registry)

        self._length = lanes("queue_requests", "Requests queued and running.")
        self._claimed = lanes("queue_claimed", "Requests of the queue that a worker has claimed.")
        self._age = lanes("queue_age_seconds", "Age of the oldest request that no worker has claimed yet; 0: none.")
        self._dead = gauge("dead_letters", "Requests set aside because they kill their workers.", ("model",))
        self._workers = gauge("workers_alive", "Workers that have beaten within their lease.", ("model",))
        self._reachable = gauge("redis_reachable", "1 if Redis answered this scrape, else 0.")
        self._reconnects = gauge("subscription_reconnects", "How often the subscription to Redis was made anew.")
        self._replays = gauge("log_replays", "How often an event log was read, to begin with or to close a gap.")

    async def read(self, fleet: Fleet, timeout_s: float) -> None:
        """Ask Redis for all models; without an answer in time the series are gone, for old numbers would mislead."""
        self._reconnects.set(fleet.reconnects)
        self._replays.set(fleet.replays)
        try:
            async with asyncio.timeout(timeout_s):
                found = [
                    (name, await _queue(fleet, name), len(await live_workers(fleet, name)))
                    for name in await fleet.models()
                ]
        except (FleetUnavailable, TimeoutError):
            found = None
        self._reachable.set(found is not None)
        # Together and without a pause: two scrapes at a time must not see half of each other's.
        for one in (self._length, self._claimed, self._age, self._dead, self._workers):
            one.clear()
        for name, queue, workers in found or ():
            self._workers.labels(name).set(workers)
            if queue is not None:
                self._show(name, queue)

    def _show(self, name: str, queue: QueueState) -> None:
        self._dead.labels(name).set(queue.dead_letters)
        for lane in queue.lanes:
            self._length.labels(name, lane.lane).set(lane.length)
            self._claimed.labels(name, lane.lane).set(lane.claimed)
            self._age.labels(name, lane.lane).set(lane.waiting_s)


async def _queue(fleet: Fleet, name: str) -> QueueState | None:
    try:
        return await fleet.queue(name)
    except (UnknownModel, InvalidCard):
        return None  # gone since, or written by something else
