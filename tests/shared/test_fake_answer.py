"""What a fake worker makes up: bounded as asked for, and the same wherever it is made."""

import base64
import math
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.commands import Generate, Limits, Sampling
from shared.fake.answer import EMBEDDING_SIZE, Answer, answer, embedding
from shared.fake.process import card_of
from shared.holes import HOLE
from shared.text import Tokenizer

CARD = card_of("fake", Path(__file__).parents[2] / "worker" / "demo" / "models" / "demo")
TOKENIZER = Tokenizer.from_files(CARD.files)


def command(prompt: tuple[int, ...] = (5, 6), seed: int = 0, **more: Any) -> Generate:
    return Generate(id="r", model="fake", prompt=prompt, sampling=Sampling(seed=seed), **more)


def tokens(made: Answer) -> list[int]:
    return [token for block in made.blocks for token in block.token_ids]


LIMITS = st.builds(
    Limits,
    max_tokens=st.integers(1, 200),
    min_tokens=st.integers(0, 150),
    ignore_eos=st.booleans(),
    stop=st.sampled_from([(), ("block",), ("a", "e")]),
)


@given(LIMITS, st.integers(0, 2**32), st.integers(1, 40))
def test_limits_are_kept_and_the_end_is_named(limits: Limits, seed: int, block_length: int) -> None:
    made = answer(command(seed=seed, limits=limits, block_length=block_length), CARD, TOKENIZER)
    count = len(tokens(made))
    assert 1 <= count <= limits.max_tokens
    assert all(len(block.token_ids) == block_length for block in made.blocks[:-1])
    match made.detail:
        case "max_tokens":
            assert made.reason == "length" and count == limits.max_tokens
        case "stop_token":
            assert made.reason == "stop" and not limits.ignore_eos
            assert limits.min_tokens <= count < limits.max_tokens
        case "stop_string":
            text = TOKENIZER.decode(tokens(made))
            assert made.reason == "stop" and any(stop in text for stop in limits.stop)
        case other:
            pytest.fail(other)


@given(st.integers(0, 2**32), st.integers(1, 60))
def test_every_position_of_a_block_is_decided_once_and_by_the_last_step(seed: int, max_tokens: int) -> None:
    made = answer(command(seed=seed, limits=Limits(max_tokens=max_tokens)), CARD, TOKENIZER)
    for block in made.blocks:
        assert sorted(at for step in block.steps for at in step) == list(range(len(block.token_ids)))
        shown = [sum(token is not None for token in block.canvas(step)[0]) for step in range(len(block.steps) + 1)]
        assert shown == sorted(set(shown)) and (shown[0], shown[-1]) == (0, len(block.token_ids))
        assert all(-1 < made.logprob <= 0 for made in block.logprobs(1))


def test_a_command_has_one_answer_and_another_seed_or_prompt_another() -> None:
    first, again = (answer(command(), CARD, TOKENIZER) for _ in range(2))
    assert first == again
    assert first != answer(command(seed=1), CARD, TOKENIZER)
    assert first != answer(command(prompt=(7,)), CARD, TOKENIZER)


def test_holes_are_filled_and_what_is_given_stays() -> None:
    made = answer(command(template=(5, HOLE, HOLE, 9)), CARD, TOKENIZER)
    (block,) = made.blocks
    assert (made.detail, block.token_ids[0], block.token_ids[3]) == ("filled", 5, 9)
    assert HOLE not in block.token_ids


def test_the_context_and_the_forwards_bound_an_answer() -> None:
    long = command(prompt=(5,) * (CARD.max_model_len - 3), limits=Limits(max_tokens=50))
    assert (len(tokens(answer(long, CARD, TOKENIZER))), answer(long, CARD, TOKENIZER).detail) == (3, "max_model_len")
    capped = answer(command(limits=Limits(max_tokens=100, ignore_eos=True, max_nfe=5)), CARD, TOKENIZER)
    assert (capped.detail, len(capped.blocks)) == ("max_nfe", 2)


def test_an_embedding_has_length_1_and_is_that_of_its_text() -> None:
    values = struct.unpack(f"<{EMBEDDING_SIZE}f", base64.b64decode(embedding(command())))
    assert math.hypot(*values) == pytest.approx(1.0, abs=1e-6)
    assert embedding(command(seed=3)) == embedding(command()) != embedding(command(prompt=(8,)))
