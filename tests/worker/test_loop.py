"""The engine in process, on a tiny model: what tests and embedders use instead of a fleet."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.commands import Limits, Preview, Sampling
from shared.decoding import Sequential
from shared.events import Delta, Finished, Snapshot
from tests.fleet.models import write_tiny_model
from worker.engine.ports import Inbox, Load, Outbox
from worker.loop import EngineLoop, GenerationFailed, LoopStopped
from worker.settings import WorkerSettings

SAMPLED = Sampling(temperature=1.0, seed=5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("loop"))


@pytest.fixture
async def loop(model: Path) -> AsyncIterator[EngineLoop]:
    async with EngineLoop.load(WorkerSettings(model=str(model), threads=1, max_rows=4)) as loop:
        yield loop


def length(tokens: int) -> Limits:
    return Limits(max_tokens=tokens, ignore_eos=True)


async def test_text_and_its_ids_give_the_same_result(loop: EngineLoop) -> None:
    ids = loop._tokenizer.encode("once upon a time")
    by_text = await loop.generate("once upon a time", limits=length(12), sampling=SAMPLED)
    by_ids = await loop.generate(ids, limits=length(12), sampling=SAMPLED)

    assert by_text == by_ids
    assert (by_text.reason, by_text.detail, len(by_text.token_ids)) == ("length", "max_tokens", 12)
    assert by_text.usage.prompt_tokens == len(ids)


async def test_a_stream_adds_up_to_the_result(loop: EngineLoop) -> None:
    whole = await loop.generate("here", limits=length(20), sampling=SAMPLED)
    events = [
        event
        async for event in loop.generate_stream(
            "here", limits=length(20), sampling=SAMPLED, preview=Preview(interval_ms=0), decoding=Sequential()
        )
    ]
    sequential = await loop.generate("here", limits=length(20), sampling=SAMPLED, decoding=Sequential())

    deltas = [event for event in events if isinstance(event, Delta)]
    assert "".join(delta.text for delta in deltas) == sequential.text
    assert any(isinstance(event, Snapshot) for event in events)
    assert isinstance(events[-1], Finished) and events[-1].usage.nfe == 20 >= whole.usage.nfe


async def test_many_generations_share_the_batch_and_keep_their_results(loop: EngineLoop) -> None:
    alone = [
        await loop.generate("there", limits=length(16), sampling=Sampling(temperature=1.0, seed=s)) for s in (1, 2)
    ]
    together = await asyncio.gather(
        *(
            loop.generate("there", limits=length(16), sampling=Sampling(temperature=1.0, seed=1 + s % 2))
            for s in range(8)
        )
    )
    assert together == [alone[number % 2] for number in range(8)]


async def test_a_cancelled_generation_leaves_the_engine(loop: EngineLoop) -> None:
    task = asyncio.create_task(loop.generate("once", limits=length(1900), decoding=Sequential(), sampling=SAMPLED))
    while loop._engine.load().running == 0:
        await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    while loop._engine.load().running:
        await asyncio.sleep(0.005)
    assert loop._engine.load().free_pages == loop._engine.load().total_pages


async def test_a_stream_that_is_left_early_is_aborted(loop: EngineLoop) -> None:
    stream = loop.generate_stream("once", limits=length(1900), decoding=Sequential(), sampling=SAMPLED)
    assert isinstance(await anext(stream), Delta)
    await stream.aclose()
    while loop._engine.load().running:
        await asyncio.sleep(0.005)


async def test_a_refused_request_raises_with_its_event(loop: EngineLoop) -> None:
    with pytest.raises(GenerationFailed, match="token ids") as caught:
        await loop.generate([5, 100_000])
    assert (caught.value.event.code, caught.value.event.param) == ("invalid_request", "prompt")


async def test_it_renders_the_models_chat_template(loop: EngineLoop) -> None:
    prompt = loop.render_chat_prompt([{"role": "user", "content": "hi"}])
    assert prompt == "<|user|>hi<|end|><|assistant|>"


async def test_stopping_ends_what_runs_and_refuses_what_comes(loop: EngineLoop) -> None:
    task = asyncio.create_task(loop.generate("once", limits=length(1900), decoding=Sequential(), sampling=SAMPLED))
    while loop._engine.load().running == 0:
        await asyncio.sleep(0.005)
    await loop.stop()
    with pytest.raises(LoopStopped):
        await task
    with pytest.raises(LoopStopped):
        await loop.generate("once")


class BrokenEngine:
    idle = True

    def step(self, inbox: Inbox) -> Outbox:
        raise FloatingPointError("a step went wrong")

    def load(self) -> Load:
        return Load(0, 0, 0, 0, 0)


async def test_an_error_in_a_step_reaches_every_caller(model: Path, loop: EngineLoop) -> None:
    broken = EngineLoop(BrokenEngine(), loop._tokenizer)
    await broken.start()
    with pytest.raises(LoopStopped) as caught:
        await broken.generate("once")
    assert isinstance(caught.value.__cause__, FloatingPointError)
    await broken.stop()
