"""Load for a fleet under faults: customers who follow their requests to the end, whatever comes between.

Each knows what it must get: the same request in peace. What it saw, event by event, is kept for the oracle.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.client import FleetClient, QueueFull, UnknownRequest
from shared.commands import LANES, Generate, Preview
from shared.connection import FleetUnavailable
from shared.events import Delta, Failed, Finished, is_terminal
from tests.fleet.requests_for_tests import sequential, text_of, tokens_of


@dataclass(frozen=True, slots=True)
class Dish:
    """A request of the menu, and what it produces undisturbed."""

    seed: int
    length: int
    text: str
    tokens: tuple[int, ...]


@dataclass
class Visit:
    """One request, as its customer lived through it."""

    id: str
    dish: Dish
    deltas: list[Delta] = field(default_factory=list[Delta])
    times: list[float] = field(default_factory=list[float])
    """When each delta came."""
    ends: list[Finished | Failed] = field(default_factory=list[Finished | Failed])
    asked_to_abort: bool = False
    accepted: bool = False

    @property
    def resumes_s(self) -> list[float]:
        """Seconds between the last block of one owner and the first of the next."""
        return [
            self.times[i] - self.times[i - 1]
            for i in range(1, len(self.deltas))
            if self.deltas[i].epoch != self.deltas[i - 1].epoch
        ]


async def cook(fleet: FleetClient, model: str, lengths: Sequence[int]) -> list[Dish]:
    """Run each request of the menu once, in peace."""
    dishes: list[Dish] = []
    for seed, length in enumerate(lengths):
        events = [event async for event in fleet.run(sequential(model, length, seed=seed))]
        assert isinstance(events[-1], Finished), events[-1]
        dishes.append(Dish(seed, length, text_of(events), tuple(tokens_of(events))))
    return dishes


class Customer:
    """Orders one request after another until told to stop; then finishes the last."""

    def __init__(self, clients: Sequence[FleetClient], model: str, menu: Sequence[Dish], seed: int) -> None:
        self._clients = clients
        self._model = model
        self._menu = menu
        self._random = random.Random(seed)
        self.visits: list[Visit] = []
        self.leaving = False

    async def stay(self) -> None:
        while not self.leaving:
            dish = self._random.choice(self._menu)
            preview = Preview(interval_ms=0) if self._random.random() < 0.3 else None
            lane = self._random.choice(LANES)
            command = sequential(self._model, dish.length, seed=dish.seed, lane=lane, preview=preview)
            visit = Visit(command.id, dish)
            self.visits.append(visit)
            await self._order(command, visit)
            await self._follow(visit)

    async def _order(self, command: Generate, visit: Visit) -> None:
        while not visit.accepted:
            try:
                await self._random.choice(self._clients).submit(command)
                visit.accepted = True
            except FleetUnavailable:
                await asyncio.sleep(0.1)  # It may have been accepted: the same id is asked for again.
            except QueueFull:
                await asyncio.sleep(0.5)

    async def _follow(self, visit: Visit) -> None:
        """Follow through any client, from where the last stream broke off or was left."""
        slow = self._random.random() < 0.15
        aborts_after = self._random.randrange(4) if self._random.random() < 0.1 else None
        last = 0
        while not visit.ends:
            leaves_after = self._random.randrange(1, 12) if self._random.random() < 0.3 else None
            client = self._random.choice(self._clients)
            events = client.stream(visit.id, after=last)
            try:
                async with contextlib.aclosing(events):
                    async for event in events:
                        if isinstance(event, Delta):
                            visit.deltas.append(event)
                            visit.times.append(time.monotonic())
                            last = event.seq
                            if slow:
                                await asyncio.sleep(0.05)
                            if aborts_after is not None and len(visit.deltas) > aborts_after:
                                aborts_after = None
                                visit.asked_to_abort = True
                                await client.abort(visit.id)
                            if leaves_after is not None and len(visit.deltas) % 12 == leaves_after:
                                break
                        elif is_terminal(event):
                            assert isinstance(event, Finished | Failed)
                            visit.ends.append(event)
            except (FleetUnavailable, UnknownRequest) as error:
                if isinstance(error, UnknownRequest):
                    visit.ends.append(Failed(visit.id, 0, 0, "lost", "unknown to the fleet that accepted it"))
                await asyncio.sleep(0.1)
