"""How the workers of a fleet share what arrives at once, against the real server."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from hypothesis import given
from hypothesis import strategies as st

from shared.client import FleetClient
from shared.commands import Generate
from shared.heart import Heart
from shared.keys import new_request_id
from shared.queue import WorkerQueue
from shared.roster import WorkerInfo
from tests.worker.test_bridge import CARD, finished
from worker.bridge import Bridge, Pace
from worker.engine.ports import Outbox
from worker.mailbox import Mailbox
from worker.metrics import Metrics

SLOTS = 32
BURST = 24


@given(st.integers(1, 512), st.integers(0, 600))
def test_a_portion_fits_the_room_is_never_nothing_while_there_is_room_and_fills_a_worker_in_nine_turns(
    slots: int, held: int
) -> None:
    pace = Pace(slots, 0.02, 0.02, 0.04)
    portion = pace.portion(held, alone=False)
    assert 0 <= portion <= max(0, slots - held) and (portion > 0) == (held < slots)
    turns, held = 1, 1
    while held < slots:
        held += pace.portion(held, alone=False)
        turns += 1
    assert turns <= max(9, min(slots, 16))


@given(st.integers(1, 512), st.integers(0, 600))
def test_who_is_alone_takes_all_there_is_room_for(slots: int, held: int) -> None:
    assert Pace(slots, 0.02, 0.02, 0.04).portion(held, alone=True) == max(0, slots - held)


@contextmanager
def fleet_of(redis_url: str, names: Sequence[str], slots: int = SLOTS, poll_s: float = 0.02) -> Iterator[list[Bridge]]:
    """Run a bridge for each name; all of them are announced before the first one looks."""
    with ExitStack() as stack:
        for name in names:
            heart = Heart.connect(redis_url, name, CARD.name, 60_000)
            heart.beat({}, WorkerInfo(name, CARD.name, "ready", slots))
            heart.close()
        bridges: list[Bridge] = []
        for name in names:

            def connect(name: str = name) -> WorkerQueue:
                return WorkerQueue.connect(redis_url, CARD.name, name, 60_000, slots=slots)

            bridge = Bridge(connect, CARD, Mailbox(), Pace(slots, poll_s, 0.02, 0.04), name, Metrics(CARD.name))
            bridge.start(10)
            stack.callback(bridge.close, 10)
            bridges.append(bridge)
        # Each waits for news by now: a fleet without work.
        time.sleep(0.2)
        yield bridges


async def submit(redis_url: str, count: int) -> list[str]:
    async with FleetClient.connect(redis_url) as fleet:
        commands = [Generate(id=new_request_id(CARD.name), model=CARD.name, prompt=(3, 4)) for _ in range(count)]
        await asyncio.gather(*map(fleet.submit, commands))
    return [command.id for command in commands]


def wait_until_held(bridges: Sequence[Bridge], count: int) -> None:
    deadline = time.monotonic() + 20
    while sum(len(bridge.held()) for bridge in bridges) < count:
        assert time.monotonic() < deadline, "not all was taken"
        time.sleep(0.005)


async def test_a_burst_is_shared_by_the_workers_that_run_nothing(redis_url: str) -> None:
    with fleet_of(redis_url, ("w1", "w2", "w3")) as bridges:
        await submit(redis_url, BURST)
        wait_until_held(bridges, BURST)
        # A third each would be 8. One worker alone would have room for all.
        assert max(len(bridge.held()) for bridge in bridges) <= BURST // 2 + 4
        assert min(len(bridge.held()) for bridge in bridges) >= 1


async def test_who_has_ended_its_last_request_looks_for_the_next_one_without_waiting_for_its_poll(
    redis_url: str,
) -> None:
    with fleet_of(redis_url, ("w1", "w2"), poll_s=3600.0) as bridges:
        (first,) = await submit(redis_url, 1)
        wait_until_held(bridges, 1)
        busy = next(bridge for bridge in bridges if bridge.held())
        (other,) = (bridge for bridge in bridges if bridge is not busy)
        await submit(redis_url, 1)
        wait_until_held([other], 1)
        await submit(redis_url, 1)
        busy.deliver(Outbox([finished(first, 2)]), 0)
        deadline = time.monotonic() + 20
        while set(busy.held()) <= {first}:
            assert time.monotonic() < deadline, "the next request was not taken"
            time.sleep(0.005)
