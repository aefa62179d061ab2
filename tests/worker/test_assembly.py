"""From settings to an engine: how the cache is sized, and what the model is announced as."""

import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from shared.block_lengths import FILE
from shared.commands import Generate, Limits
from shared.events import Failed, Finished
from shared.text import Tokenizer
from tests.fleet import models
from tests.fleet.models import write_tiny_model
from worker.assembly import Assembly, assemble, cache_shape
from worker.device import Placement
from worker.engine.load_aware import Steady
from worker.engine.ports import Arrival, Inbox, Resume
from worker.models import ModelError, load_model
from worker.models.spec import ModelSpec
from worker.settings import WorkerSettings

CPU = Placement(torch.device("cpu"), torch.float32, 1)
TOKEN_BYTES = 2 * models.LAYERS * models.KV_HEADS * models.HEAD_DIM * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("assembly"))


@pytest.fixture(scope="module")
def spec(folder: Path) -> ModelSpec:
    return load_model(folder).spec


def test_a_page_holds_whole_blocks_near_32_tokens(spec: ModelSpec) -> None:
    sizes = {
        length: cache_shape(WorkerSettings(), replace(spec, block_length=length), CPU).page_size
        for length in (1, 4, 12, 32, 64)
    }
    assert sizes == {1: 32, 4: 32, 12: 24, 32: 32, 64: 64}


def test_the_cache_takes_the_memory_it_is_given_and_no_more_than_it_can_use(spec: ModelSpec) -> None:
    assert cache_shape(WorkerSettings(kv_cache_mb=1), spec, CPU).num_pages == 2**20 // (TOKEN_BYTES * 32)
    half = Placement(CPU.device, torch.bfloat16, 1)
    assert cache_shape(WorkerSettings(kv_cache_mb=1), spec, half).num_pages == 2 * 2**20 // (TOKEN_BYTES * 32)
    useful = cache_shape(WorkerSettings(max_rows=2), spec, CPU)
    assert useful.num_pages * useful.page_size == 2 * models.MAX_MODEL_LEN
    assert cache_shape(WorkerSettings(num_pages=5, page_size=8), spec, CPU).num_pages == 5


def test_a_cache_without_room_for_a_page_is_refused(spec: ModelSpec) -> None:
    with pytest.raises(ModelError, match="kv_cache_mb"):
        cache_shape(WorkerSettings(kv_cache_mb=1, page_size=4096), spec, CPU)


@pytest.mark.parametrize(("max_rows", "told"), [(24, ""), (25, "steps hold 24 of up to 25 rows of 4 positions")])
def test_rows_that_will_have_to_take_turns_are_told_of_at_start(
    folder: Path, caplog: pytest.LogCaptureFixture, max_rows: int, told: str
) -> None:
    with caplog.at_level("INFO", logger="worker.assembly"):
        assemble(WorkerSettings(model=str(folder), threads=1, max_rows=max_rows, token_budget=128))
    assert told in caplog.text
    assert bool(caplog.text) == bool(told)


def test_the_card_promises_no_longer_requests_than_the_cache_holds(folder: Path) -> None:
    whole = assemble(WorkerSettings(model=str(folder), threads=1)).card
    small = assemble(WorkerSettings(model=str(folder), threads=1, num_pages=3)).card
    assert (whole.max_model_len, small.max_model_len) == (models.MAX_MODEL_LEN, 96)
    assert whole.capabilities == ("generate", "chat", "constraints", "infill", "guidance")
    assert (whole.block_length, whole.vocab_size) == (models.BLOCK_LENGTH, models.VOCAB)


def test_the_card_carries_the_tokenizer(folder: Path) -> None:
    card = assemble(WorkerSettings(model=str(folder), threads=1)).card
    text = "once upon a time"
    assert Tokenizer.from_files(card.files).encode(text) == Tokenizer.from_folder(folder).encode(text)


@pytest.mark.parametrize(("budget", "largest"), [(64, 16), (80, 20), (2048, 96)])
def test_the_largest_block_that_a_card_announces_is_the_largest_that_the_engine_runs(
    folder: Path, budget: int, largest: int
) -> None:
    assembly = assemble(WorkerSettings(model=str(folder), threads=1, token_budget=budget, num_pages=3))
    assert assembly.card.largest_block == largest
    for length, runs in ((largest, True), (largest + 1, False)):
        limits = Limits(max_tokens=1)
        command = Generate(id=str(length), model="m", prompt=(1,), limits=limits, block_length=length)
        outbox = assembly.engine.step(Inbox(arrivals=[Arrival(command, 1, Resume())]))
        assert any(isinstance(event, Failed) for event in outbox.events) is not runs


def test_of_steps_that_are_captured_in_no_time_only_the_last_is_told(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="worker.runners"):
        assemble(WorkerSettings(model=str(folder), device="cpu", threads=1, max_rows=32, step_ahead="on"))
    told = [re.findall("captured ([0-9]+) of ([0-9]+) steps", message)[0] for message in caplog.messages]
    done, of = map(int, told[-1])
    assert done == of > len(told)


def test_a_budget_in_which_the_models_own_blocks_have_no_room_is_refused_with_the_least_one(folder: Path) -> None:
    least = 4 * models.BLOCK_LENGTH
    with pytest.raises(ModelError, match=f"token_budget: {least - 1} .* {least} is the least"):
        assemble(WorkerSettings(model=str(folder), threads=1, token_budget=least - 1))
    engine = assemble(WorkerSettings(model=str(folder), threads=1, token_budget=least)).engine
    outbox = engine.step(Inbox(arrivals=[Arrival(Generate(id="1", model="m", prompt=(1,)), 1, Resume())]))
    assert not any(isinstance(event, Failed) for event in outbox.events)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_folder_that_lacks_a_file_is_refused_by_its_name(tmp_path: Path, missing: str) -> None:
    folder = write_tiny_model(tmp_path / "model")
    (folder / missing).unlink()
    with pytest.raises(ModelError, match=missing.removeprefix("model.")):
        assemble(WorkerSettings(model=str(folder), threads=1))


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nothing"):
        assemble(WorkerSettings(model=str(tmp_path / "nothing")))


def test_a_worker_whose_device_leads_rows_chooses_from_the_lengths_that_it_has_steps_for(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    decoding = load_model(folder).spec.decoding.model_dump(mode="json")
    rows = [
        {"block_length": length, "accuracy": 0.9, "tokens_per_forward": tokens}
        for length, tokens in ((4, 1.0), (8, 8.0), (12, 9.0))
    ]
    (tmp_path / FILE).write_text(json.dumps({"items": 1, "decoding": decoding, "lengths": rows}))

    def made(asked: Literal["model", "auto"]) -> Assembly:
        settings = WorkerSettings(
            model=str(tmp_path), device="cpu", threads=1, max_rows=2, step_ahead="on", block_length=asked
        )
        return assemble(settings)

    with caplog.at_level(logging.INFO):
        chosen, plain = made("auto"), made("model")
    # 12 does not divide a page of 32.
    assert (chosen.card.block_lengths, plain.card.block_lengths) == ((4, 8), ())
    assert isinstance(chosen.engine.choose_length, Steady) and plain.engine.choose_length is None
    # Twice the positions at most, for eight times the tokens.
    assert "requests that run together: 8 always" in caplog.text
    used = list[int]()
    for assembly in (chosen, plain):
        request = Generate(id="g", model="tiny", prompt=(40, 41, 42), limits=Limits(max_tokens=20))
        inbox = Inbox(arrivals=[Arrival(request, epoch=1)])
        while inbox.arrivals or not assembly.engine.idle:
            for event in assembly.engine.step(inbox).events:
                if isinstance(event, Finished):
                    used.append(event.usage.block_length)
            inbox = Inbox()
    assert used == [8, 4]
