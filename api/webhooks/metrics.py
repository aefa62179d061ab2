"""How webhooks fare, read from Redis when somebody scrapes: the jobs, which deliver them, serve nothing.

Every api process tells the same, so a query takes the largest over them, never the sum.
"""

import asyncio

from prometheus_client import CollectorRegistry, Gauge

from api.ports import Fleet
from shared.connection import FleetUnavailable
from shared.hook_places import hook_partitions
from shared.webhooks import WebhookStore


class WebhookMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"diffleet_{name}", text, labels, registry=registry)

        self._due = gauge("webhooks_due", "Webhooks that wait for a try.")
        self._late = gauge("webhooks_late_seconds", "How long the webhook that is due the longest has waited; 0: none.")
        self._dead = gauge("webhooks_dead", "Webhooks that were given up, and neither replayed nor discarded.")
        self._tries = gauge("webhook_tries", "Tries to deliver a webhook so far, by what came of them.", ("outcome",))

    async def read(self, store: WebhookStore, fleet: Fleet, timeout_s: float) -> None:
        """Ask Redis; without an answer in time the last numbers stay."""
        try:
            async with asyncio.timeout(timeout_s):
                census = await store.census(await hook_partitions(fleet))
        except (FleetUnavailable, TimeoutError):
            return
        self._due.set(census.due)
        self._late.set(max(0.0, census.late_s))
        self._dead.set(census.dead)
        for outcome in ("told", "again", "dead"):
            self._tries.labels(outcome).set(census.ends.get(outcome, 0))
