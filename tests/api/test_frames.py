from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from api.frames import Frames
from shared.events import Delta, Snapshot
from tests.shared.tokenizers_for_tests import byte_level

Row = list[int | None]


def snapshot(block: int, offset: int, step: int, tokens: Row) -> Snapshot:
    confidence = [0.0 if token is None else 0.5 for token in tokens]
    return Snapshot("r", 1, 1, block, offset, step, step, tokens, confidence)


def replay(canvas: dict[int, Any], frame: dict[str, Any]) -> None:
    for position, token, *_ in frame["edits"]:
        canvas[position] = token


@given(st.lists(st.lists(st.one_of(st.none(), st.integers(60, 90)), min_size=4, max_size=4), min_size=1, max_size=40))
def test_edits_replay_to_every_snapshot(rows: list[Row]) -> None:
    frames = Frames(byte_level(), "tokens")
    canvas: dict[int, Any] = {}
    for step, tokens in enumerate(rows):
        frame: Any = frames.of_snapshot(snapshot(0, 0, step, tokens))
        replay(canvas, frame)
        assert [canvas[position] for position in range(4)] == tokens
        assert frame["masked"] == tokens.count(None)
        assert frame["full"] == (step % 16 == 0)


def test_a_token_that_changes_is_revised_and_one_that_stays_is_not_told_again() -> None:
    frames = Frames(byte_level(), "tokens")
    frames.of_snapshot(snapshot(0, 0, 0, [70, None, 72, None]))
    frame: Any = frames.of_snapshot(snapshot(0, 0, 1, [71, 75, 72, None]))
    assert [(edit[0], edit[1], edit[3]) for edit in frame["edits"]] == [(0, 71, "revised"), (1, 75, "tentative")]


def test_a_new_block_begins_with_a_full_frame() -> None:
    frames = Frames(byte_level(), "full")
    frames.of_snapshot(snapshot(0, 0, 0, [70, None]))
    committed: Any = frames.of_commit(Delta("r", 2, 1, 0, 0, [70, 71], "ij", 2))
    assert [(edit[0], edit[1], edit[3]) for edit in committed["edits"]] == [(0, 70, "committed"), (1, 71, "committed")]
    frame: Any = frames.of_snapshot(snapshot(1, 2, 0, [None, 72]))
    assert frame["full"] and [edit[0] for edit in frame["edits"]] == [2, 3]


def test_text_frames_have_no_edits() -> None:
    frame: Any = Frames(byte_level(), "text").of_snapshot(snapshot(0, 0, 0, [None, None]))
    assert frame["text"] == "░░" and "edits" not in frame
