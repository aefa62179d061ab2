"""What is told of a model's lanes, on a real server."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from shared.client import FleetClient
from shared.queue import WorkerQueue
from shared.queue_state import LaneState
from tests.shared.protocol_for_tests import MODEL, card_of, command_for, finish


@pytest.fixture
async def fleet(redis_url: str) -> AsyncIterator[FleetClient]:
    async with FleetClient.connect(redis_url) as fleet:
        yield fleet


@pytest.fixture
async def queue(redis_url: str) -> AsyncIterator[WorkerQueue]:
    queue = WorkerQueue.connect(redis_url, MODEL, "w1", lease_ms=3_600_000, reap_every_ms=0)
    yield queue
    await queue.close()


async def std(fleet: FleetClient) -> LaneState:
    return next(one for one in (await fleet.queue(MODEL)).lanes if one.lane == "std")


async def test_an_empty_queue_without_a_group_is_empty(fleet: FleetClient, queue: WorkerQueue) -> None:
    await queue.publish_card(card_of())
    state = await fleet.queue(MODEL)
    assert [one.lane for one in state.lanes] == ["rt", "std", "bulk"]
    assert all((one.length, one.claimed, one.waiting_s) == (0, 0, 0.0) for one in state.lanes)
    assert state.dead_letters == 0


async def test_a_request_waits_until_it_is_claimed_and_is_gone_when_it_has_ended(
    fleet: FleetClient, queue: WorkerQueue
) -> None:
    await queue.publish_card(card_of())
    for _ in range(2):
        await fleet.submit(command_for())
        await asyncio.sleep(0.02)
    waiting = await std(fleet)
    assert (waiting.length, waiting.claimed) == (2, 0)
    assert 0.03 < waiting.waiting_s < 60

    (first,) = await queue.take(1)
    half = await std(fleet)
    assert (half.length, half.claimed) == (2, 1)
    # The younger one is the oldest that waits now.
    assert 0.0 < half.waiting_s

    (second,) = await queue.take(1)
    running = await std(fleet)
    assert (running.length, running.claimed, running.waiting_s) == (2, 2, 0.0)

    for claim in (first, second):
        await finish(queue, claim)
    assert await std(fleet) == LaneState("std")


async def test_what_ends_out_of_order_does_not_hide_who_waits(fleet: FleetClient, queue: WorkerQueue) -> None:
    await queue.publish_card(card_of())
    for _ in range(3):
        await fleet.submit(command_for())
    _, second = await queue.take(2)
    await finish(queue, second)
    await asyncio.sleep(0.01)
    state = await std(fleet)
    assert (state.length, state.claimed) == (2, 1)
    assert state.waiting_s > 0
