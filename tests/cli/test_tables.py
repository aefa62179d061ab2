"""Bundled models as files, and their evaluation as a table."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from shared.block_lengths import BlockLengths
from shared.cli.bundled import bundled_models
from shared.cli.evaluation import Evaluation, block_length_table, evaluation_table, provenance
from tests.cli.fleet_process import diffleet

SCORES = {
    "threshold": {"accuracy": 0.985, "tokens_per_forward": 4.25, "unclosed": 0},
    "sequential": {"accuracy": 0.99, "tokens_per_forward": 1.0, "unclosed": 0},
}
REPORT = {
    "model": "demo",
    "date": "2026-01-02",
    "device": "a machine",
    "training": {"device": "another", "seconds": 12.3, "steps": 5},
    "tasks": {"sort": {"group": "numbers", "items": 200, **SCORES}},
    "groups": {"numbers": {"items": 200, **SCORES}},
    "overall": {"items": 200, **SCORES},
    "mistakes": {},
}


def test_folders_with_a_config_are_models(tmp_path: Path) -> None:
    (tmp_path / "half").mkdir()
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "config.json").write_text('{"model_type": "sdar"}')
    (tmp_path / "whole" / "weights").write_bytes(bytes(1_500_000))
    (model,) = bundled_models(tmp_path).values()
    assert (model.name, model.config(), model.evaluation()) == ("whole", {"model_type": "sdar"}, None)
    assert 1.5 <= model.size_mb < 1.6
    (tmp_path / "whole" / "eval.json").write_text(json.dumps(REPORT))
    report = model.evaluation()
    assert report is not None and Evaluation.model_validate(report).overall.items == 200


def test_no_worker_package_means_no_models(tmp_path: Path) -> None:
    assert bundled_models(tmp_path / "missing") == {}


def test_an_evaluation_shows_both_ways_of_decoding_side_by_side() -> None:
    evaluation = Evaluation.model_validate(REPORT)
    console = Console(width=100, color_system=None)
    with console.capture() as captured:
        console.print(evaluation_table(evaluation))
    lines = captured.get().splitlines()
    (row,) = [line.split() for line in lines if line.startswith("sort")]
    assert row == ["sort", "200", "98.5", "%", "4.25", "99.0", "%", "1.00"]
    assert any(line.startswith("all numbers") for line in lines)
    assert any(line.startswith("everything") for line in lines)
    assert provenance(evaluation) == (
        "demo: measured 2026-01-02 on a machine, on items that training never saw; trained 12 s on another"
    )


def test_block_lengths_are_listed_with_those_that_may_be_chosen() -> None:
    rows = [(8, 0.972, 4.3), (16, 0.975, 5.651), (32, 0.969, 6.6)]
    names = ("block_length", "accuracy", "tokens_per_forward")
    listed = [dict(zip(names, row, strict=True)) for row in rows]
    console = Console(width=100, color_system=None)
    with console.capture() as captured:
        told = BlockLengths.model_validate({"items": 200, "decoding": {}, "lengths": listed})
        console.print(block_length_table(told, 16))
    assert [line.split() for line in captured.get().splitlines()[1:]] == [
        ["8", "97.2", "%", "4.30", "yes"],
        ["16", "97.5", "%", "5.65", "yes"],
        ["32", "96.9", "%", "6.60", "no"],
    ]


@pytest.mark.slow
def test_an_unknown_model_has_no_evaluation() -> None:
    ended = diffleet("eval", "nobody")
    assert ended.returncode == 2 and "'nobody' is not a bundled model" in ended.stderr
