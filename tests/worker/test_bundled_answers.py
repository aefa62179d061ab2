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


async def test_blocks_of_several_lengths_in_one_batch_give_what_each_gives_by_itself() -> None:
    model, tokenizer = load_model(bundled_folder("demo-nano"))
    texts = [render_turns((("user", question),)) + ANSWER_START for question in QUESTIONS[:5]]
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    decoder = ReferenceDecoder(model)
    expected = {
        length: decoder.generate(prompts, Settings(threshold=0.9, block=length, max_tokens=96))
        for length in (8, 16, 32)
    }
    settings = WorkerSettings(model="demo-nano", device="cpu", dtype="float32", threads=1, kv_cache_mb=16)
    async with EngineLoop.load(settings) as loop:
        limits = Limits(max_tokens=96)
        asked = [(length, index) for index in range(len(prompts)) for length in expected]
        jobs = [loop.generate(prompts[index], limits=limits, block_length=length) for length, index in asked]
        for (length, index), answer in zip(asked, await asyncio.gather(*jobs), strict=True):
            ids, forwards = expected[length][index]
            produced = [token for token in ids if token != STOP_ID]
            assert answer.usage.block_length == length
            # The reference decoder goes on to the end of the block that holds the limit.
            assert list(answer.token_ids) == produced[:96], (length, QUESTIONS[index])
            assert answer.usage.nfe <= forwards
