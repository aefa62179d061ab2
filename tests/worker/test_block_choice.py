"""Whether a worker chooses block lengths by its load: what the folder, the model and the settings say."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shared.block_lengths import FILE, read_block_lengths
from tests.worker.paper_model import paper_spec
from tests.worker.test_load_aware import Priced, aware
from worker.block_choice import choose_length, lengths_to_choose_from, told
from worker.bundled import bundled_folder
from worker.engine.load_aware import LoadAware, StepPrices
from worker.engine.scheduler import BatchLimits, CacheShape
from worker.models import ModelError, load_model
from worker.settings import WorkerSettings

SPEC = paper_spec(4)
CACHE = CacheShape(16, 64)
LIMITS = BatchLimits(8, 256)
TOKENS = {2: 1.9, 4: 3.0, 8: 6.0, 16: 7.0}


def write(folder: Path, tokens: dict[int, float] = TOKENS, **more: Any) -> Path:
    rows = [{"block_length": length, "accuracy": 0.9, "tokens_per_forward": told} for length, told in tokens.items()]
    table = {"items": 9, "decoding": SPEC.decoding.model_dump(mode="json"), "lengths": rows} | more
    (folder / FILE).write_text(json.dumps(table))
    return folder


def choice(
    folder: Path, cache: CacheShape = CACHE, limits: BatchLimits = LIMITS, spec: Any = SPEC, **settings: Any
) -> LoadAware | None:
    options: dict[str, Any] = {"model": str(folder), "block_length": "auto", "max_rows": limits.max_rows} | settings
    worker = WorkerSettings(**options)
    lengths = lengths_to_choose_from(worker, spec, cache.page_size, limits)
    return choose_length(lengths, worker, spec, cache, limits, Priced(lambda tokens: 1.0))


def test_a_worker_chooses_from_what_its_models_folder_tells_if_it_is_asked_to(tmp_path: Path) -> None:
    write(tmp_path)
    chosen = choice(tmp_path)
    assert chosen is not None and dict(chosen.tokens_per_forward) == TOKENS and chosen.own == 4
    assert choice(tmp_path, block_length="model") is None


def test_a_length_that_does_not_fit_pages_or_budget_is_left_out(tmp_path: Path) -> None:
    write(tmp_path)
    small = choice(tmp_path, CacheShape(8, 64))
    assert small is not None and list(small.tokens_per_forward) == [2, 4, 8]
    narrow = choice(tmp_path, limits=BatchLimits(8, 32))
    assert narrow is not None and list(narrow.tokens_per_forward) == [2, 4, 8]


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ({}, "does not say how good"),
        ({"more": {"decoding": {"strategy": "sequential"}}}, "as often right"),
        ({"tokens": {4: 3.0}}, "as often right"),
        ({"tokens": TOKENS, "spec": replace(SPEC, fixed_block_length=True)}, "one block length"),
    ],
)
def test_where_there_is_no_choice_the_log_tells_why(
    tmp_path: Path, case: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    if case:
        write(tmp_path, case.get("tokens", TOKENS), **case.get("more", {}))
    with caplog.at_level(logging.WARNING, "worker.block_choice"):
        found = choice(tmp_path, limits=case.get("limits", LIMITS), spec=case.get("spec", SPEC))
    assert found is None and reason in caplog.text


def test_a_file_that_is_none_stops_the_worker_with_its_fault(tmp_path: Path) -> None:
    write(tmp_path, lengths=[])
    with pytest.raises(ModelError, match="lengths"):
        choice(tmp_path)


def test_the_choices_are_told_by_load() -> None:
    prices = StepPrices.of([(1, 0.01), (100, 0.01), (1000, 0.1)])
    assert told(aware(16, {8: 4.3, 16: 5.7, 32: 6.6}, prices, 2048), 32) == "32 up to 2, 16 up to 7, 8 beyond"
    assert told(aware(16, {16: 5.7}, prices, 2048), 32) == "16 always"


def test_the_bundled_models_file_is_about_the_model_as_it_decodes_by_default() -> None:
    table, spec = read_block_lengths(bundled_folder("demo")), load_model(bundled_folder("demo")).spec
    assert table is not None and table.decoding == spec.decoding.model_dump(mode="json")
    assert {row.block_length for row in table.lengths} == {8, 16, 32}
