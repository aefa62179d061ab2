"""Equality with the references where several processes share the model."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from tests.goldens.folder import DEVICE, DTYPE, GoldenFolder, find_folders
from tests.goldens.runs import Run
from tests.goldens.test_goldens import FAMILIES, make_engine, run
from tests.worker.parallel.ranks import copy_with_config, shared_model
from worker.device import Placement
from worker.models import LoadedModel

RANKS = 2
FOLDERS = {folder.family: folder for folder in find_folders() if folder.family in FAMILIES}
SHARED = ["dream", "fastdllm_v2", "llada", "llada2", "llada_moe", "nemotron_labs_diffusion", "sdar", "wedlm"]
LED = {"llada", "llada2", "sdar"}
NARROW = pytest.mark.skipif(
    DEVICE == "cuda" and torch.cuda.device_count() < RANKS,
    reason=f"a step of ranks that share a CUDA device cannot be captured; there are not {RANKS}",
)


@dataclass(frozen=True)
class SharedFolder(GoldenFolder):
    shared: list[LoadedModel] = field(default_factory=list[LoadedModel])

    def model(self, dtype: torch.dtype = DTYPE) -> LoadedModel:
        return self.shared[0]


@pytest.fixture(scope="module", params=SHARED)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedFolder]:
    """The family's folder, its model shared by two processes for as long as its tests run."""
    whole = FOLDERS[request.param]
    config = json.loads((whole.path / "config.json").read_bytes())
    mask = {} if config.get("mask_token_id") is not None else {"mask_token_id": whole.special.get("mask")}
    copy: Path = copy_with_config(whole.path, tmp_path_factory.mktemp("shared") / "model", **mask)
    with ExitStack() as stack:
        model = stack.enter_context(shared_model(copy, RANKS, Placement(torch.device(DEVICE), torch.float32, 1)))
        yield SharedFolder(whole.path, whole.family, whole.forward, whole.generate, whole.special, [model])


@pytest.mark.parametrize("way", ["alone", "together"])
def test_ranks_that_share_a_model_give_the_references_tokens_and_forwards(folder: SharedFolder, way: str) -> None:
    for each in batches(folder, way):
        assert_answered(folder, each)


@NARROW
def test_ranks_lead_their_rows_to_the_same_tokens(folder: SharedFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    if folder.family not in LED:
        pytest.skip("the device cannot lead this family's rows")
    monkeypatch.setattr("tests.goldens.test_goldens.AHEAD", True)
    for each in batches(folder, "together"):
        assert_answered(folder, each)


def batches(folder: SharedFolder, way: str) -> list[list[Run]]:
    """Return half of the folder's runs one by one, or the other half by what a batch must have in common."""
    runs = [each for entry in folder.generate for each in FAMILIES[folder.family](folder, entry)]
    if way == "alone":
        return [[each] for each in runs[::2]]
    together: dict[tuple[object, ...], list[Run]] = {}
    for each in runs[1::2]:
        facts = sorted((name, str(value)) for name, value in each.facts.items())
        together.setdefault((each.request.block_length, *facts), []).append(each)
    return [*together.values()]


def assert_answered(folder: SharedFolder, runs: list[Run]) -> None:
    found = run(make_engine(folder, runs, runs[0].request.block_length or 16), [[each.request for each in runs]])
    assert [each.observe(found[each.request.id]) for each in runs] == [each.answer for each in runs]
