"""What a model's folder says of block lengths: which of them may stand for the model's own."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.block_lengths import FILE, MOST_LOSS, BlockLengths, InvalidBlockLengths, eligible, read_block_lengths

DECODING = {"strategy": "threshold", "threshold": 0.9}


def table(*rows: tuple[int, float, float]) -> dict[str, Any]:
    names = ("block_length", "accuracy", "tokens_per_forward")
    return {"items": 188, "decoding": DECODING, "lengths": [dict(zip(names, row, strict=True)) for row in rows]}


def test_lengths_that_are_as_often_right_within_the_bound_may_be_used() -> None:
    told = BlockLengths.model_validate(table((32, 0.969, 6.6), (8, 0.97, 4.3), (16, 0.974, 5.7), (4, 0.99, 2.9)))
    assert eligible(told, 16, DECODING) == {4: 2.9, 8: 4.3, 16: 5.7, 32: 6.6}
    worse = BlockLengths.model_validate(table((32, 0.968, 6.6), (8, 0.97, 4.3), (16, 0.974, 5.7)))
    assert eligible(worse, 16, DECODING) == {8: 4.3, 16: 5.7}


def test_nothing_is_compared_with_another_strategy_or_a_length_that_was_not_measured() -> None:
    told = BlockLengths.model_validate(table((8, 0.97, 4.3), (16, 0.974, 5.7)))
    assert eligible(told, 16, DECODING | {"threshold": 0.8}) == {}
    assert eligible(told, 12, DECODING) == {}


rows = st.tuples(st.integers(1, 4096), st.floats(0, 1), st.floats(0.01, 64))


@given(st.lists(rows, min_size=1, max_size=8, unique_by=lambda row: row[0]), st.data())
def test_the_models_own_is_always_among_them_and_no_worse_one_is(
    measured: list[tuple[int, float, float]], data: st.DataObject
) -> None:
    own = data.draw(st.sampled_from(measured))
    found = eligible(BlockLengths.model_validate(table(*measured)), own[0], DECODING)
    assert own[0] in found and list(found) == sorted(found)
    for length, accuracy, _ in measured:
        assert (length in found) == (accuracy >= own[1] - MOST_LOSS)


def test_a_folder_without_the_file_says_nothing(tmp_path: Path) -> None:
    assert read_block_lengths(tmp_path) is None


def test_what_is_written_is_read(tmp_path: Path) -> None:
    told = table((8, 0.97, 4.3), (16, 0.974, 5.7))
    (tmp_path / FILE).write_text(json.dumps(told | {"later": 1}))
    assert read_block_lengths(tmp_path) == BlockLengths.model_validate(told)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "JSON"),
        ("{}", "items"),
        (json.dumps(table()), "lengths"),
        (json.dumps(table((0, 0.9, 4.0))), "lengths.0.block_length"),
        (json.dumps(table((8, 1.1, 4.0))), "lengths.0.accuracy"),
        (json.dumps(table((8, 0.9, 0.0))), "lengths.0.tokens_per_forward"),
        (json.dumps(table((8, 0.9, 4.0), (8, 0.8, 4.0))), "twice"),
    ],
)
def test_a_file_that_is_not_one_is_refused_by_the_field(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(InvalidBlockLengths, match=complaint):
        read_block_lengths(tmp_path)
