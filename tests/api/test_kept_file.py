"""A file that is changed while it is in use: what it says is followed, and what is no use keeps what was."""

import logging
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api.kept_file import LOOK_S, KeptFile


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def load(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        raise ValueError("no number") from None


def replaced(path: Path, content: str) -> None:
    """Put another file in its place, as tools do that never leave half a file."""
    draft = path.with_suffix(".new")
    draft.write_text(content)
    draft.replace(path)


@given(steps=st.lists(st.tuples(st.sampled_from(["write", "replace", "remove", "wait"]), st.sampled_from("12xy"))))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_it_says_what_last_could_be_read(tmp_path: Path, steps: list[tuple[str, str]]) -> None:
    path, clock = tmp_path / "file", Clock()
    path.write_text("0")
    kept, wanted, now = KeptFile(path, load, clock), 0, 0
    for number, (step, content) in enumerate(steps):
        match step:
            case "write":
                path.write_text(content)
            case "replace":
                replaced(path, content)
            case "remove":
                path.unlink(missing_ok=True)
            case _:
                pass
        if path.exists():
            # The clock of a file system may be coarser than this test is quick.
            now += 10**9
            os.utime(path, ns=(now, now))
            wanted = int(path.read_text()) if path.read_text().isdigit() else wanted
        clock.now += LOOK_S
        assert kept() == wanted, (number, step)


def test_it_is_looked_at_no_more_than_once_a_while(tmp_path: Path) -> None:
    path, clock, reads = tmp_path / "file", Clock(), list[Path]()
    path.write_text("1")

    def count(path: Path) -> int:
        reads.append(path)
        return load(path)

    kept = KeptFile(path, count, clock)
    replaced(path, "22")
    assert kept() == 1
    clock.now += LOOK_S
    assert (kept(), kept()) == (22, 22)
    clock.now += LOOK_S
    assert kept() == 22 and len(reads) == 2, "what has not changed is not read"


def test_a_fault_is_told_once_for_each_change_and_at_the_start_ends_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock = tmp_path / "file", Clock()
    with pytest.raises(ValueError, match="no number"):
        KeptFile(path, load, clock)
    path.write_text("1")
    kept = KeptFile(path, load, clock)
    replaced(path, "secret")
    with caplog.at_level(logging.INFO, "diffleet.api"):
        for _ in range(3):
            clock.now += LOOK_S
            assert kept() == 1
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "what it said before still holds: no number" in caplog.text and "secret" not in caplog.text
