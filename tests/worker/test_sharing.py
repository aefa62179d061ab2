"""How the workers of a fleet share what arrives at once, against the real server."""

import asyncio
import time
from contextlib import ExitStack

from hypothesis import given
from hypothesis import strategies as st

from shared.client import FleetClient
from shared.commands import Generate
from shared.keys import new_request_id
from shared.queue import WorkerQueue
from tests.worker.test_bridge import CARD
from worker.bridge import Bridge, Pace
from worker.mailbox import Mailbox
from worker.metrics import Metrics

SLOTS = 32
BURST = 24


@given(st.integers(1, 512), st.integers(0, 600))
def test_a_portion_fits_the_room_is_never_nothing_while_there_is_room_and_fills_a_worker_in_nine_turns(
    slots: int, held: int
) -> None:
    pace = Pace(slots, 0.02, 0.02, 0.04)
    portion = pace.portion(held)
    assert 0 <= portion <= max(0, slots - held) and (portion > 0) == (held < slots)
    turns, held = 1, 1
    while held < slots:
        held += pace.portion(held)
        turns += 1
    assert turns <= max(9, min(slots, 16))


async def test_a_burst_is_shared_by_the_workers_that_run_nothing(redis_url: str) -> None:
    with ExitStack() as stack:
        bridges: list[Bridge] = []
        for name in ("w1", "w2", "w3"):

            def connect(name: str = name) -> WorkerQueue:
                return WorkerQueue.connect(redis_url, CARD.name, name, 60_000, slots=SLOTS)

            bridge = Bridge(connect, CARD, Mailbox(), Pace(SLOTS, 0.02, 0.02, 0.04), name, Metrics(CARD.name))
            bridge.start(10)
            stack.callback(bridge.close, 10)
            bridges.append(bridge)
        # Each waits for news by now: a fleet without work.
        time.sleep(0.2)
        async with FleetClient.connect(redis_url) as fleet:
            commands = [Generate(id=new_request_id(CARD.name), model=CARD.name, prompt=(3, 4)) for _ in range(BURST)]
            await asyncio.gather(*map(fleet.submit, commands))
        deadline = time.monotonic() + 20
        while sum(len(bridge.held()) for bridge in bridges) < BURST:
            assert time.monotonic() < deadline, "the burst was not taken"
            time.sleep(0.01)
        # A third each would be 8. One worker alone would have room for all.
        assert max(len(bridge.held()) for bridge in bridges) <= BURST // 2 + 4
        assert min(len(bridge.held()) for bridge in bridges) >= 1
