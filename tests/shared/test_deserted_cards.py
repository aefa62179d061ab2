"""The card in force is one that a live worker has: who came and left, or never came back, leaves no other behind."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, closing
from dataclasses import replace
from typing import Any

import pytest

from shared.card import ModelCard
from shared.client import FleetClient
from shared.heart import Heart
from shared.keys import Keys
from shared.queue import Published, WorkerQueue
from shared.roster import WorkerInfo, WorkerState, is_deserted, strangers
from tests.shared.protocol_for_tests import MODEL, card_of

HOUR_MS = 3_600_000
OURS = replace(card_of(), digest="")
OTHER = replace(card_of(), digest="", max_model_len=32)
THIRD = replace(card_of(), digest="", max_model_len=16)

Beat = Callable[..., None]
NewQueue = Callable[..., WorkerQueue]


@pytest.fixture
async def new_queue(redis_url: str) -> AsyncIterator[NewQueue]:
    async with AsyncExitStack() as stack:

        def build(worker_id: str, lease_ms: int = 1) -> WorkerQueue:
            queue = WorkerQueue.connect(redis_url, MODEL, worker_id, lease_ms)
            stack.push_async_callback(queue.close)
            return queue

        yield build


@pytest.fixture
def beat(redis_url: str) -> Iterator[Beat]:
    with ExitStack() as stack:

        def once(worker_id: str, card: ModelCard | None, state: WorkerState = "ready") -> None:
            heart = stack.enter_context(closing(Heart.connect(redis_url, worker_id, MODEL, lease_ms=HOUR_MS)))
            heart.beat({}, WorkerInfo(worker_id, MODEL, state, card="" if card is None else card.digest))

        yield once


async def reclaimed(queue: WorkerQueue, card: ModelCard) -> Published:
    """Look until the card is written."""
    async with asyncio.timeout(30):
        while (former := await queue.reclaim_card(card)) is None:
            await asyncio.sleep(0.005)
    return former


async def in_force(redis_url: str) -> str:
    async with FleetClient.connect(redis_url) as fleet:
        return (await fleet.card(MODEL)).digest


async def test_a_worker_that_came_and_left_leaves_no_card_behind(
    redis_url: str, fleet_redis: Any, new_queue: NewQueue, beat: Beat
) -> None:
    queue = new_queue("w1")
    await queue.publish_card(OURS)
    beat("w1", OURS)
    beat("guest", OTHER)
    await new_queue("guest").publish_card(OTHER)
    for _ in range(3):
        assert await queue.reclaim_card(OURS) is None  # both live
    fleet_redis.delete(Keys(f"{MODEL}.0").worker("guest"))
    former = await reclaimed(queue, OURS)
    assert (former.differs, former.others) == (("max_model_len",), 0)
    assert await in_force(redis_url) == OURS.digest
    assert await queue.reclaim_card(OURS) is None


@pytest.mark.parametrize(
    ("card", "state", "keeps"),
    [(OTHER, "ready", True), (None, "ready", True), (OTHER, "draining", False), (None, "loading", False)],
)
async def test_a_card_is_deserted_unless_a_worker_that_takes_requests_has_it_or_does_not_tell(
    card: ModelCard | None, state: WorkerState, keeps: bool, redis_url: str, new_queue: NewQueue, beat: Beat
) -> None:
    await new_queue("guest").publish_card(OTHER)
    beat("guest", card, state)
    beat("w1", OURS)
    queue = new_queue("w1")
    if not keeps:
        await reclaimed(queue, OURS)
    else:
        assert [await queue.reclaim_card(OURS) for _ in range(3)] == [None] * 3
    assert await in_force(redis_url) == (OTHER if keeps else OURS).digest


async def test_of_several_who_would_have_their_card_in_force_one_wins_for_good(
    redis_url: str, new_queue: NewQueue, beat: Beat
) -> None:
    await new_queue("gone").publish_card(THIRD)
    ones, others = [new_queue("a1"), new_queue("a2")], [new_queue("b1"), new_queue("b2")]
    for name, card in (("a1", OURS), ("a2", OURS), ("b1", OTHER), ("b2", OTHER)):
        beat(name, card)
    looks = [(queue, OURS) for queue in ones] + [(queue, OTHER) for queue in others]
    written: list[Published] = []
    async with asyncio.timeout(30):
        while not written:
            told = await asyncio.gather(*(queue.reclaim_card(card) for queue, card in looks))
            written = [former for former in told if former is not None]
    winner = await in_force(redis_url)
    assert len(written) == 1 and winner in (OURS.digest, OTHER.digest)
    for _ in range(3):
        assert await asyncio.gather(*(queue.reclaim_card(card) for queue, card in looks)) == [None] * 4
    assert await in_force(redis_url) == winner


async def test_a_card_whose_worker_is_unheard_for_less_than_a_lease_stays(
    redis_url: str, new_queue: NewQueue, beat: Beat
) -> None:
    await new_queue("guest").publish_card(OTHER)
    beat("w1", OURS)
    queue = new_queue("w1", HOUR_MS)
    assert [await queue.reclaim_card(OURS) for _ in range(3)] == [None] * 3
    assert await in_force(redis_url) == OTHER.digest


async def test_a_card_that_was_published_again_at_that_moment_stays(
    redis_url: str, new_queue: NewQueue, beat: Beat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker of the card in force comes back between another's last look and its write."""
    await new_queue("guest").publish_card(OTHER)
    beat("w1", OURS)
    queue, back = new_queue("w1"), new_queue("back")
    compare, came = queue._compare, False

    async def meanwhile(*given: Any) -> Published:
        nonlocal came
        came = True
        await back.publish_card(OTHER)
        beat("back", OTHER)
        return await compare(*given)

    monkeypatch.setattr(queue, "_compare", meanwhile)
    async with asyncio.timeout(30):
        while not came:
            assert await queue.reclaim_card(OURS) is None
    assert await queue.reclaim_card(OURS) is None
    assert await in_force(redis_url) == OTHER.digest


def test_strangers_are_those_that_take_requests_and_have_another_card() -> None:
    workers = [
        WorkerInfo("a", MODEL, "ready", card="x"),
        WorkerInfo("b", MODEL, "ready", card="y"),
        WorkerInfo("c", MODEL, "draining", card="y"),
        WorkerInfo("d", MODEL, "ready"),
        WorkerInfo("e", MODEL, "loading"),
    ]
    assert [worker.id for worker in strangers("x", workers)] == ["b"]
    assert not is_deserted("x", workers) and is_deserted("x", workers[1:3])
