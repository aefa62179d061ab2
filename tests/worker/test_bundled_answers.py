"""The engine on a bundled model against the decoder of its evaluation: same tokens, same forwards."""

import asyncio

from shared.commands import Limits, Sampling
from worker.bundled import bundled_folder
from worker.demo.chatml import ANSWER_START, STOP_ID, render_turns
from worker.demo.export import load_model
from worker.demo.reference_decoder import ReferenceDecoder, Settings
from worker.loop import EngineLoop
from worker.settings import WorkerSettings

QUESTIONS = [
    "What is 12 + 30?",
    "Sort 9, 3, 7, 1.",
    "Spell the word frog.",
    "What is the capital of Japan?",
    "Extract name and age as JSON: Anna is 31 years old.",
    "Tell me a story about a rabbit named Clover.",
    "Who are you?",
    "Is 7 even or odd?",
]


async def test_the_engine_answers_as_the_reference_decoder_does() -> None:
    model, tokenizer = load_model(bundled_folder("demo-nano"))
    texts = [render_turns((("user", question),)) + ANSWER_START for question in QUESTIONS]
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    expected = ReferenceDecoder(model).generate(prompts, Settings(threshold=0.9, max_tokens=160))
    # Prompts of several lengths: most end inside a block, which their answers share.
    assert len({len(prompt) % 16 for prompt in prompts}) > 3

    settings = WorkerSettings(model="demo-nano", device="cpu", dtype="float32", threads=1, kv_cache_mb=16)
    limits = Limits(max_tokens=160)
    async with EngineLoop.load(settings) as loop:
        answers = [loop.generate(prompt, sampling=Sampling(temperature=0.0), limits=limits) for prompt in prompts]
        for question, answer, (ids, forwards) in zip(QUESTIONS, await asyncio.gather(*answers), expected, strict=True):
            assert list(answer.token_ids) == [token for token in ids if token != STOP_ID], question
            assert answer.usage.nfe == forwards, question
