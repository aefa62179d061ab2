"""Which model is meant by who names none: the only one with a worker, whatever was served there before."""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, closing

import pytest

from shared.client import FleetClient, NoDefaultModel
from shared.heart import Heart
from shared.model_choice import default_model
from shared.queue import WorkerQueue
from shared.roster import WorkerInfo, WorkerState
from tests.shared.protocol_for_tests import card_of

NAMES = ("a", "b", "c")
HOUR_MS = 3_600_000


@pytest.mark.parametrize(
    ("known", "alive", "chosen"),
    [
        (["a"], [], "a"),
        (["a"], ["a"], "a"),
        (["a", "b"], ["b"], "b"),
        (["a", "b", "c"], ["a"], "a"),
        ([], [], "no worker has announced a model yet"),
        (["a", "b"], [], "model is required: without a worker: a, b"),
        (["a", "b"], ["b", "a"], "model is required: the models are a, b"),
        (["a", "b", "c"], ["c", "b"], "model is required: the models are b, c; without a worker: a"),
    ],
)
def test_the_only_model_that_is_served_is_meant_or_else_the_only_one(
    known: list[str], alive: list[str], chosen: str
) -> None:
    if chosen in NAMES:
        assert default_model(known, alive) == chosen
        return
    with pytest.raises(NoDefaultModel) as refused:
        default_model(known, alive)
    assert str(refused.value) == chosen
    assert (set(refused.value.alive), set(refused.value.departed)) == (set(alive), set(known) - set(alive))


@pytest.fixture
async def announced(redis_url: str) -> AsyncIterator[None]:
    """All models have been announced, and their workers have left."""
    async with AsyncExitStack() as stack:
        for name in NAMES:
            queue = WorkerQueue.connect(redis_url, name, f"former-{name}")
            stack.push_async_callback(queue.close)
            await queue.publish_card(card_of(name))
        yield


@pytest.fixture
def beat(redis_url: str) -> Iterator[Callable[[str, WorkerState], None]]:
    with ExitStack() as stack:

        def once(model: str, state: WorkerState = "ready") -> None:
            heart = stack.enter_context(closing(Heart.connect(redis_url, f"w-{model}", model, lease_ms=HOUR_MS)))
            heart.beat({}, WorkerInfo(f"w-{model}", model, state))

        yield once


@pytest.mark.parametrize("served", [(), ("b",), ("a", "c")])
async def test_the_client_means_the_model_whose_worker_beats(
    redis_url: str, announced: None, beat: Callable[[str, WorkerState], None], served: Sequence[str]
) -> None:
    del announced
    for name in served:
        beat(name, "ready")
    async with FleetClient.connect(redis_url) as fleet:
        if len(served) != 1:
            with pytest.raises(NoDefaultModel) as refused:
                await anext(fleet.generate(None, [1, 2, 3]))
            assert refused.value.alive == tuple(served)
            return
        assert await fleet.default_model() == "b"
        events = fleet.generate(None, [1, 2, 3])
        assert (await anext(events)).id.startswith("r_b.0_")
        await events.aclose()
        assert await fleet.depth("b") == 1
