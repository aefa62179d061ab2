"""A low temperature makes answers less random, and nothing surer: it must not let more be accepted in a step."""

import asyncio
from typing import get_args

import pytest

from shared.commands import Limits, Sampling
from shared.decoding import Confidence, Decoding, EntropyBounded, Threshold
from worker.demo.chatml import ANSWER_START, render_turns
from worker.loop import EngineLoop
from worker.settings import WorkerSettings

QUESTIONS = (
    "Tell me a story about a rabbit named Clover.",
    "Tell me a story about a fox named Rusty.",
    "What does the word harbour mean?",
    "Write a sentence about the sea.",
    "What is the capital of Japan?",
    "What is 312 + 94?",
)


def forwards(decoding: Decoding, temperatures: tuple[float, ...], top_k: int) -> list[int]:
    """Return the forwards that all questions take together, by temperature."""
    settings = WorkerSettings(model="demo-nano", device="cpu", dtype="float32", threads=1, kv_cache_mb=16)

    async def ask() -> list[int]:
        found: list[int] = []
        async with EngineLoop.load(settings) as loop:
            prompts = [render_turns((("user", question),)) + ANSWER_START for question in QUESTIONS]
            for temperature in temperatures:
                sampling = Sampling(temperature=temperature, top_k=top_k, seed=3)
                limits = Limits(max_tokens=96, ignore_eos=True)
                answers = await asyncio.gather(
                    *(loop.generate(text, sampling=sampling, limits=limits, decoding=decoding) for text in prompts)
                )
                found.append(sum(answer.usage.nfe for answer in answers))
        return found

    return asyncio.run(ask())


@pytest.mark.parametrize("decoding", [Threshold(), EntropyBounded()], ids=lambda decoding: decoding.strategy)
def test_the_best_tokens_take_as_many_forwards_at_any_temperature(decoding: Decoding) -> None:
    plain, *cold = forwards(decoding, (1.0, 0.2, 0.1, 1e-30), top_k=1)

    assert cold == [plain] * 3


def test_only_the_tempered_distribution_grows_sure_in_the_cold() -> None:
    counts: dict[Confidence, list[int]] = {
        kind: forwards(Threshold(confidence=kind), (1.0, 0.1), top_k=1) for kind in get_args(Confidence)
    }

    assert counts["model"][0] == counts["model"][1]
    assert counts["tempered"][1] < 0.8 * counts["tempered"][0]
