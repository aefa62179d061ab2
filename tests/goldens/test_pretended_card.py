"""Every family on a device of its own: nothing of the host meets it, and the answers stay what they are.

Where there is a card, `DIFFLEET_DEVICE=cuda` runs all golden tests on it; this runs on machines that have none.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.adapters import digest_of
from shared.commands import Generate, Limits, LogitEdits, Sampling
from shared.decoding import Renoise, Threshold
from tests.goldens import test_diffusion_gemma as gemma
from tests.goldens.folder import DEVICE, Entry, GoldenFolder, find_folders, load_golden
from tests.goldens.passes import run_canvas, run_pass, to_passes
from tests.goldens.runs import Run
from tests.goldens.test_goldens import FAMILIES, LOGIT_TOLERANCE, PASSES, make_engine, run
from tests.pretended_card import CARD, HostMetDevice, pretended_card
from tests.worker import test_adapters as adapters
from tests.worker import test_embeddings as embeddings
from tests.worker import test_families as families
from tests.worker.adapter_folders import read_weights, write_adapter
from tests.worker.test_families import TOKENS
from tests.worker.texts import NoText
from worker.adapters.targets import find_targets, shapes_of
from worker.adapters.weights import load_adapter
from worker.canvas_runner import CanvasRunner
from worker.engine.engine import Engine
from worker.engine.scheduler import BatchLimits, CacheShape
from worker.models import LoadedModel, load_model

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="a real card runs all golden tests itself")


@dataclass(frozen=True, slots=True)
class PlacedFolder(GoldenFolder):
    """A folder whose model lies where it is told."""

    device: torch.device = CARD

    def model(self, dtype: torch.dtype = torch.float32) -> LoadedModel:
        return _placed(self.path, self.device)


@cache
def _placed(path: Path, device: torch.device) -> LoadedModel:
    return load_golden(path, torch.float32, device)


def _place(folder: GoldenFolder, device: torch.device = CARD) -> PlacedFolder:
    return PlacedFolder(folder.path, folder.family, folder.forward, folder.generate, folder.special, device)


def _host(folder: GoldenFolder) -> PlacedFolder:
    return _place(folder, torch.device("cpu"))


FOLDERS = [pytest.param(_place(folder), id=folder.name) for folder in find_folders() if folder.family in FAMILIES]
BY_FOLDER = pytest.mark.parametrize("folder", FOLDERS)
CANVASES = [pytest.param(_place(folder), id=folder.name) for folder in gemma.FOLDERS]


@pytest.fixture(autouse=True)
def card() -> Iterator[None]:
    with pretended_card():
        yield


@BY_FOLDER
def test_a_forward_on_a_card_gives_the_same_logits(folder: PlacedFolder) -> None:
    for entry in folder.forward:
        for each in PASSES.get(folder.family, to_passes)(folder, entry):
            found = run_pass(folder.model(), each)
            on_host = run_pass(_host(folder).model(), each)
            assert (found - on_host).abs().max() < LOGIT_TOLERANCE


@BY_FOLDER
def test_requests_on_a_card_give_the_references_tokens_and_forwards(folder: PlacedFolder) -> None:
    together: dict[tuple[object, ...], list[Run]] = defaultdict(list)
    for each in _one_of_each_kind(folder):
        facts = sorted((name, str(value)) for name, value in each.facts.items())
        together[each.request.block_length, *facts].append(each)
    for runs in together.values():
        engine = make_engine(folder, runs, runs[0].request.block_length or 16)
        found = run(engine, [[each.request for each in runs]])
        assert [each.observe(found[each.request.id]) for each in runs] == [each.answer for each in runs]


def _one_of_each_kind(folder: GoldenFolder) -> list[Run]:
    """Return a run for each strategy, cache, and way to draw that the folder has."""
    found: dict[tuple[object, ...], Run] = {}
    for entry in folder.generate:
        for each in FAMILIES[folder.family](folder, entry):
            asked = each.request
            kind = (type(asked.decoding), asked.cache, asked.cfg_scale > 0, asked.sampling, each.uniforms is None)
            found.setdefault((*kind, str(each.facts)), each)
    return [*found.values()]


@BY_FOLDER
def test_whatever_a_request_may_ask_for_is_done_on_the_card(folder: PlacedFolder) -> None:
    prompt = FAMILIES[folder.family](folder, folder.generate[0])[0].request.prompt
    common: dict[str, Any] = {"model": "golden", "block_length": 16}
    drawn = Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=7)
    edits = LogitEdits(repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2, logit_bias=((5, 2.0),))
    limits = Limits(max_tokens=16, stop_token_ids=(3,), min_tokens=4)
    last = Threshold(threshold=0.5, stops_last=True)
    requests = [
        Generate(id="drawn", prompt=prompt, sampling=drawn, limits=limits, **common),
        Generate(id="told", prompt=prompt, edits=edits, logprobs=3, limits=limits, **common),
        Generate(id="last", prompt=prompt, decoding=last, limits=limits, **common),
    ]
    runs = [Run(request, [], 0) for request in requests]

    found = run(make_engine(folder, runs, 16), [requests])

    assert found == run(make_engine(_host(folder), runs, 16), [requests])
    assert set(found) == {"drawn", "told", "last"}


@BY_FOLDER
def test_embeddings_on_a_card_are_those_of_the_host(folder: PlacedFolder) -> None:
    asked = [embeddings.request("a", range(5, 30)), embeddings.request("b", range(40, 43))]
    found, wanted = (embeddings.run(of.model(torch.float32), asked) for of in (folder, _host(folder)))
    for name in ("a", "b"):
        assert torch.allclose(embeddings.decode(found[name][-1]), embeddings.decode(wanted[name][-1]), atol=1e-5)


@pytest.mark.parametrize("folder", CANVASES)
def test_canvases_on_a_card_give_the_references_logits(folder: PlacedFolder) -> None:
    for entry in folder.forward:
        for believed in (None, "selfcond_logits"):
            assert _error_of(folder, entry, believed) < LOGIT_TOLERANCE


def _error_of(folder: PlacedFolder, entry: Entry, believed: str | None) -> Tensor:
    arrays, name = folder.arrays(), entry["name"]
    known = arrays[f"{name}.logits_{'selfcond' if believed else 'no_selfcond'}"][0]
    before = None if believed is None else arrays[f"{name}.{believed}"][0]
    found = run_canvas(folder.model(), arrays[f"{name}.input_ids"][0], arrays[f"{name}.canvas_ids"][0], before)
    return (found - known).abs().max()


@pytest.mark.parametrize("folder", CANVASES)
def test_requests_for_canvases_on_a_card_give_the_references_tokens(folder: PlacedFolder) -> None:
    shortest = sorted(folder.generate, key=lambda entry: entry["nfe"])[:2]
    for entry in shortest:
        request = gemma.to_request(folder, entry)
        found = run(gemma.make_engine(folder, page_size=16), [[request]])
        assert found[request.id] == gemma.expected(entry)


@pytest.mark.parametrize("folder", CANVASES)
def test_canvases_of_noise_of_their_own_are_the_same_on_a_card(folder: PlacedFolder) -> None:
    edits = LogitEdits(repetition_penalty=1.2, logit_bias=((5, 2.0),))
    limits = Limits(max_tokens=32, ignore_eos=True)
    prompt = tuple(folder.generate[0]["prompt"])
    asked = Generate(id="r", model="golden", prompt=prompt, limits=limits, edits=edits, logprobs=2)
    request = asked.model_copy(update={"sampling": Sampling(seed=3), "decoding": Renoise(max_denoising_steps=4)})

    def answer(model: LoadedModel) -> dict[str, tuple[list[int], int]]:
        runner = CanvasRunner(model, 64, 8, model.device)
        engine = Engine(model.spec, CacheShape(8, 64), BatchLimits(4, 256), runner, lambda *_: NoText())
        return run(engine, [[request]])

    found = answer(folder.model())

    assert found == answer(_host(folder).model()) and len(found["r"][0]) == 32


@pytest.mark.parametrize("name", ["bert", "modernbert", "modernbert-biased"])
def test_masked_language_models_answer_on_a_card_as_on_the_host(tmp_path: Path, name: str) -> None:
    families.write_masked(tmp_path, name)
    limits = Limits(max_tokens=12, ignore_eos=True)
    requests = [Generate(id=str(n), model="m", prompt=tuple(TOKENS[:n]), limits=limits) for n in (3, 10, 17)]

    found, wanted = (
        families.run(load_model(tmp_path, device=device), requests) for device in (CARD, torch.device("cpu"))
    )

    assert found == wanted and len(found) == 3


def test_rows_under_adapters_answer_on_a_card_as_on_the_host(tmp_path: Path) -> None:
    (folder,) = (folder for folder in find_folders() if folder.name == "sdar")
    whole = read_weights(folder.path)

    def answer(device: torch.device) -> dict[str, list[int]]:
        model = load_golden(folder.path, torch.float32, device)
        targets = find_targets(model)
        if not (tmp_path / "a").exists():
            write_adapter(tmp_path / "a", whole, shapes_of(targets), rank=3, seed=1)
        adapter = load_adapter(tmp_path / "a", targets, device, torch.float32)
        shelf = adapters.Shelf({digest_of(tmp_path / "a"): adapter})
        asked = [adapters.ask("with", [adapters.use(tmp_path, "a")]), adapters.ask("without")]
        return adapters.run(model, shelf, asked)[0]

    found = answer(CARD)

    assert found == answer(torch.device("cpu")) and found["with"] != found["without"]


def test_what_lies_on_the_host_is_refused_by_the_card() -> None:
    there, here = torch.ones(3, device=CARD), torch.ones(3)
    with pytest.raises(HostMetDevice):
        torch.add(there, here)
    with pytest.raises(HostMetDevice):
        here[there.long()]
    with pytest.raises(HostMetDevice):
        torch.zeros(3, device=CARD).index_copy_(0, torch.arange(3), there)


def test_numbers_and_indices_and_copies_come_from_the_host() -> None:
    there = torch.arange(4, device=CARD) * torch.tensor(2)
    there[1:] = 7
    there[[3]] = 5
    assert there[torch.tensor([0, 3])].tolist() == [0, 5]
    there.copy_(torch.ones(4))
    assert there.device == CARD and there.cpu().device.type == "cpu"
    assert there.sum().item() == 4 and torch.equal(there.cpu(), torch.ones(4, dtype=torch.int64))
