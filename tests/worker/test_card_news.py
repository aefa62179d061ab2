"""What a worker says of a card that it found under its model's name."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.adapters import TARGETS_FILE
from shared.queue import Published
from worker.card_news import card_news, reclaimed_news


@pytest.mark.parametrize(
    ("published", "level", "said"),
    [
        (
            Published((TARGETS_FILE,), 1, kept=True, adapters=True),
            logging.WARNING,
            "Start it with the same --model-store",
        ),
        (Published((TARGETS_FILE,), 2), logging.WARNING, "Start all with the same --model-store"),
        (Published(("max_model_len",), 2), logging.WARNING, "2 other workers may serve the former"),
        (Published(("max_model_len",), 0, adapters=True), logging.INFO, "Nobody serves the former"),
        (Published((TARGETS_FILE,), 0, adapters=True), logging.INFO, "what adapters need"),
    ],
)
def test_it_says_what_is_the_matter_and_what_to_do(published: Published, level: int, said: str) -> None:
    news = card_news("demo", published)
    assert news is not None and news[0] == level and said in news[1] and "model demo" in news[1]


@given(
    st.lists(st.sampled_from([TARGETS_FILE, "max_model_len", "tokenizer.json"]), unique=True).map(tuple),
    st.integers(0, 3),
    st.booleans(),
)
def test_only_a_card_that_others_may_serve_otherwise_is_worth_a_warning(
    differs: tuple[str, ...], others: int, adapters: bool
) -> None:
    news = card_news("demo", Published(differs, others, adapters=adapters))
    level = None if news is None else news[0]
    assert level == (None if not differs else logging.WARNING if others else logging.INFO)


def test_a_card_that_is_in_force_again_is_told_with_what_was_other() -> None:
    level, said = reclaimed_news("demo", Published((TARGETS_FILE, "max_model_len"), 1))
    assert level == logging.WARNING
    assert "model demo" in said and said.endswith("It differed in: what adapters need, max_model_len")
