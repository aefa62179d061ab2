"""What operators ask of workers: keys that each worker looks at every few seconds."""

from dataclasses import dataclass

from shared.connection import Link
from shared.keys import Keys, partition, ulid

ORDER_MS = 600_000
"""How long an order waits for a worker; one that has not looked by then is gone."""


@dataclass(frozen=True, slots=True)
class Orders:
    """What is asked of one worker now."""

    drain: bool = False
    flush: str = ""
    """Another value than the last time: forget what earlier texts have left in the prefix cache."""


class OrderBook:
    """Orders of one server's workers. Raises `FleetUnavailable`."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def read(self, model: str, worker_id: str) -> Orders:
        keys = Keys(partition(model))
        drain, flush = await self._link.read("MGET", keys.drain_order(worker_id), keys.flush_order())
        return Orders(drain is not None, (flush or b"").decode(errors="replace"))

    async def drain(self, model: str, worker_id: str) -> None:
        """Ask a worker to finish or hand back what it runs, and to end."""
        await self._link.read("SET", Keys(partition(model)).drain_order(worker_id), 1, "PX", ORDER_MS)

    async def flush(self, model: str) -> None:
        """Ask all workers of a model to empty their prefix caches."""
        await self._link.read("SET", Keys(partition(model)).flush_order(), ulid(), "PX", ORDER_MS)
