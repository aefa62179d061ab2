"""Where a round's time went, from the lines of its engine and its queue."""

import json
from dataclasses import asdict, replace
from pathlib import Path

from tests.bench.gpu.timeline import Line, Step, Taken, Written, read, tell

STEP = Step(0.0, 0.0, 0, 2, 0, 0, 8, 0, 0, "")
ROUND: list[Line] = [
    Taken(10.010, 10.020, [10.015, 10.018]),
    replace(STEP, began=10.030, ended=10.040, arrived=2, prompt_tokens=64),
    replace(STEP, began=10.041, ended=10.061),
    replace(STEP, began=10.061, ended=10.081, postponed=1),
    replace(STEP, began=10.091, ended=10.101, ends=2),
    Written(10.102, 10.105),
]


def test_a_round_is_told_in_milliseconds_from_its_beginning() -> None:
    told = tell(ROUND, began=10.0)
    assert (told["first_queued"], told["last_queued"], told["taken"]) == (15.0, 18.0, [(10.0, 20.0, 2)])
    assert (told["first_came"], told["last_prompt"], told["all_run"]) == (30.0, 40.0, 41.0)
    assert (told["first_end"], told["last_end"], told["last_end_written"]) == (101.0, 101.0, 105.0)
    assert (told["steps"], told["full_steps"], told["full_step"], told["postponed"]) == (4, 3, 20.0, 1)
    assert (told["between"], told["longest_between"]) == (11.0, 10.0)


def test_an_engine_alone_has_no_queue_to_tell_of() -> None:
    told = tell([line for line in ROUND if isinstance(line, Step)], began=10.0)
    assert "first_queued" not in told and "last_end_written" not in told
    assert tell([], began=10.0) == {}


def test_what_was_written_before_a_round_is_no_part_of_it(tmp_path: Path) -> None:
    file = tmp_path / "steps"
    lines: list[Line] = [Taken(1.0, 2.0, [1.0]), STEP, *ROUND]
    file.write_text("".join(json.dumps({"line": type(line).__name__, **asdict(line)}) + "\n" for line in lines))
    assert read(file, began=10.0) == ROUND
