"""The table of block lengths is what the evaluation's own decoder finds, and grows by further lengths."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from shared.block_lengths import BlockLengths, Measured, read_block_lengths
from worker.bundled import bundled_folder
from worker.demo.block_lengths import main, measure, write
from worker.demo.evaluate import collect, evaluate
from worker.demo.export import load_model
from worker.demo.reference_decoder import ReferenceDecoder, Settings
from worker.demo.tasks import TASKS
from worker.settings import WorkerSettings

MODEL = "demo-nano"


def test_each_length_is_measured_as_the_evaluation_would() -> None:
    items = collect([TASKS[name] for name in ("add", "capital")], 3)
    settings = WorkerSettings(model=MODEL, device="cpu", dtype="float32", threads=1, kv_cache_mb=16)
    heard: list[Measured] = []
    table = measure(settings, items, (8, 16), heard.append)
    assert tuple(heard) == table.lengths and table.items == sum(map(len, items.values()))

    model, _ = load_model(bundled_folder(MODEL))
    tokenizer = Tokenizer.from_file(str(bundled_folder(MODEL) / "tokenizer.json"))
    modes = {str(length): Settings(block=length) for length in (8, 16)}
    told = evaluate(ReferenceDecoder(model).generate, tokenizer, items, modes)["overall"]
    for row in table.lengths:
        score = told[str(row.block_length)]
        assert (row.accuracy, row.tokens_per_forward) == (score["accuracy"], score["tokens_per_forward"])


@pytest.mark.parametrize("wrong", ["a,b", "8,", "0", ""])
def test_what_is_no_list_of_lengths_is_refused_by_its_option(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--model", MODEL, "--lengths", wrong])
    assert ended.value.code == 2 and "--lengths" in capsys.readouterr().err


def row(length: int, accuracy: float) -> Measured:
    return Measured(block_length=length, accuracy=accuracy, tokens_per_forward=4.0)


def test_a_further_length_joins_those_of_the_same_items_and_replaces_those_of_others(tmp_path: Path) -> None:
    def table(items: int, *rows: Measured) -> BlockLengths:
        return BlockLengths(items=items, decoding={"strategy": "threshold"}, lengths=rows)

    write(table(9, row(16, 0.9), row(8, 0.8)), tmp_path)
    write(table(9, row(32, 0.7), row(8, 0.6)), tmp_path)
    assert read_block_lengths(tmp_path) == table(9, row(8, 0.6), row(16, 0.9), row(32, 0.7))
    write(table(10, row(8, 0.5)), tmp_path)
    assert read_block_lengths(tmp_path) == table(10, row(8, 0.5))
