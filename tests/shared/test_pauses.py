"""How long a worker that runs something waits before it looks for more."""

from collections.abc import AsyncIterator

import pytest

from shared.client import FleetClient
from shared.heart import Heart
from shared.queue import WorkerQueue
from shared.roster import WorkerInfo
from tests.shared.protocol_for_tests import MODEL, card_of, command_for

POLL_S = 0.02


def beat(redis_url: str, workers: int) -> None:
    for number in range(workers):
        heart = Heart.connect(redis_url, f"w{number}", MODEL)
        heart.beat({}, WorkerInfo(f"w{number}", MODEL, "ready"))
        heart.close()


@pytest.fixture
async def queue(redis_url: str) -> AsyncIterator[WorkerQueue]:
    queue = WorkerQueue.connect(redis_url, MODEL, "w0")
    await queue.publish_card(card_of())
    yield queue
    await queue.close()


@pytest.mark.parametrize(("workers", "lookers"), [(1, 1), (3, 3), (8, 8), (20, 8)])
async def test_a_fleet_does_not_look_the_more_often_the_larger_it_is(
    queue: WorkerQueue, redis_url: str, workers: int, lookers: int
) -> None:
    beat(redis_url, workers)
    assert await queue.take(1, held=1) == []
    pauses = [queue.pause_s(POLL_S, found=False) for _ in range(200)]
    assert 0.75 * lookers * POLL_S <= min(pauses) and max(pauses) <= 1.25 * lookers * POLL_S
    assert len(set(pauses)) > 100, "all would look at once"


async def test_who_has_found_something_looks_again_a_poll_later(queue: WorkerQueue, redis_url: str) -> None:
    beat(redis_url, 20)
    async with FleetClient.connect(redis_url) as fleet:
        await fleet.submit(command_for())
    assert len(await queue.take(1, held=1)) == 1
    assert queue.pause_s(POLL_S, found=True) == POLL_S


async def test_who_is_alone_looks_again_sooner_for_the_rest_of_what_it_has_found(
    queue: WorkerQueue, redis_url: str
) -> None:
    beat(redis_url, 1)
    async with FleetClient.connect(redis_url) as fleet:
        await fleet.submit(command_for())
    assert len(await queue.take(1, held=1)) == 1
    assert 0 < queue.pause_s(POLL_S, found=True) < POLL_S / 2
    assert queue.pause_s(POLL_S, found=False) >= 0.75 * POLL_S


async def test_a_worker_that_has_not_looked_yet_takes_itself_for_the_only_one(queue: WorkerQueue) -> None:
    assert queue.pause_s(POLL_S, found=False) <= 1.25 * POLL_S
