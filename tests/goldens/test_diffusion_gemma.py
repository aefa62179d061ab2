"""DiffusionGemma's canvases against the reference's recorded passes and draws; see test_goldens for all others."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from torch import Tensor

from shared.commands import Generate, Limits, Sampling
from shared.decoding import Renoise
from tests.goldens.conditioning import DRAWS, nudge
from tests.goldens.folder import Entry, GoldenFolder, find_folders
from tests.goldens.passes import run_canvas
from tests.goldens.test_goldens import LOGIT_TOLERANCE, Record, record_answers, run, run_handed_over
from tests.worker.texts import NoText
from worker.canvas_runner import CanvasRunner
from worker.engine.engine import Engine
from worker.engine.plan import Plan
from worker.engine.ports import Decision
from worker.engine.scheduler import BatchLimits, CacheShape

FOLDERS = [folder for folder in find_folders() if folder.family == "diffusion_gemma"]
FORWARD = [pytest.param(f, entry, id=f"{f.name}-{entry['name']}") for f in FOLDERS for entry in f.forward]
GENERATE = [pytest.param(f, entry, id=f"{f.name}-{entry['name']}") for f in FOLDERS for entry in f.generate]


class Replay:
    """The numbers that the reference drew, by canvas and step; a run is known by its request's seed."""

    def __init__(self, folder: GoldenFolder) -> None:
        self.runs = {seed_of(folder, entry): entry for entry in folder.generate}
        self.arrays = folder.arrays()

    def ids(self, seed: int, positions: Tensor, step: int, vocab_size: int) -> Tensor:
        entry, before = self._find(seed, positions)
        # A canvas draws once before its first step.
        return self.arrays[entry["randint_key"]][sum(before) + len(before) + step + 1].to(positions.device)

    def sample(
        self, logits: Tensor, barred: Tensor, temperature: Tensor, seed: int, positions: Tensor, step: int
    ) -> Tensor:
        entry, before = self._find(seed, positions)
        return self.arrays[entry["multinomial_key"]][sum(before) + step].to(positions.device)

    def _find(self, seed: int, positions: Tensor) -> tuple[Entry, list[int]]:
        """Return the run, and the steps of each canvas before this one."""
        entry = self.runs[seed]
        canvas = (int(positions[0]) - len(entry["prompt"])) // len(positions)
        return entry, entry["denoising_steps_per_canvas"][:canvas]


def seed_of(folder: GoldenFolder, entry: Entry) -> int:
    return folder.generate.index(entry)


def to_request(folder: GoldenFolder, entry: Entry) -> Generate:
    args = entry["args"]
    return Generate(
        id=entry["name"],
        model="golden",
        prompt=tuple(entry["prompt"]),
        sampling=Sampling(seed=seed_of(folder, entry)),
        limits=Limits(max_tokens=args["max_new_tokens"], stop_token_ids=(args["eos_token_id"],)),
        decoding=Renoise(
            bound=args["sampler_config"]["entropy_bound"],
            max_denoising_steps=args["max_denoising_steps"],
            t_min=args["t_min"],
            t_max=args["t_max"],
            stability_threshold=args["stability_threshold"],
            confidence_threshold=args["confidence_threshold"],
        ),
    )


def expected(entry: Entry) -> tuple[list[int], int]:
    """Return what the reference produced before its eos (padding follows it), and its passes over a canvas."""
    tokens, eos = entry["output"], entry["args"]["eos_token_id"]
    return tokens[: tokens.index(eos)] if eos in tokens else tokens, entry["nfe"]


def decided(folder: GoldenFolder, draws: int = DRAWS) -> list[Entry]:
    """Return the runs whose tokens are the same whatever the last bits of the weights are.

    Each step's prediction conditions the next one: where the last bit of a sum decides a token, and with it all behind
    it, only arithmetic in the reference's own order gives the reference's.
    """
    others = [nudge(folder, seed) for seed in range(draws)]
    return [entry for entry in folder.generate if all(_answers(other, entry) for other in others)]


def _answers(folder: GoldenFolder, entry: Entry) -> bool:
    request = to_request(folder, entry)
    return run(make_engine(folder, 16), [[request]])[request.id] == expected(entry)


@cache
def comparable(folder_path: Path) -> list[Entry]:
    """Return the runs that a folder's model has to repeat where it lies: those that no last bit decides.

    Processors differ in the order in which they add up. On the host, where a row's sums do not depend on its
    neighbours, a run that is repeated there alone has to be repeated in every other way too.
    """
    (folder,) = (folder for folder in FOLDERS if folder.path == folder_path)
    sure = decided(folder)
    on_host = folder.model().device.type == "cpu"
    return [entry for entry in folder.generate if entry in sure or (on_host and _answers(folder, entry))]


def make_engine(
    folder: GoldenFolder,
    page_size: int,
    token_budget: int = 2048,
    seen: list[Plan] | None = None,
    num_pages: int | None = None,
) -> Engine:
    model = folder.model()
    spec = replace(model.spec, stop_token_ids=())
    num_pages = num_pages or 4096 // page_size
    runner = CanvasRunner(model, num_pages, page_size, model.device, noise=Replay(folder))

    def forward(plan: Plan) -> Decision:
        if seen is not None:
            seen.append(plan)
        return runner(plan)

    cache = CacheShape(page_size, num_pages)
    return Engine(spec, cache, BatchLimits(64, token_budget), forward, lambda request, resume: NoText())


@pytest.mark.parametrize(("folder", "entry"), FORWARD)
@pytest.mark.parametrize("conditioned", [False, True], ids=["first-step", "conditioned"])
def test_a_canvas_behind_its_prompt_gives_the_references_logits(
    folder: GoldenFolder, entry: Entry, conditioned: bool, record_property: Record
) -> None:
    arrays, name = folder.arrays(), entry["name"]
    prompt, canvas = arrays[f"{name}.input_ids"][0], arrays[f"{name}.canvas_ids"][0]
    believed = arrays[f"{name}.selfcond_logits"][0] if conditioned else None

    logits = run_canvas(folder.model(), prompt, canvas, believed)

    known = arrays[f"{name}.logits_{'' if conditioned else 'no_'}selfcond"][0]
    error = (logits - known).abs().max()
    record_property("error", error.item())
    assert error < LOGIT_TOLERANCE


@pytest.mark.parametrize(("folder", "entry"), GENERATE)
def test_a_request_alone_gives_the_references_tokens_and_canvases(
    folder: GoldenFolder, entry: Entry, record_property: Record
) -> None:
    if entry not in comparable(folder.path):
        pytest.skip("the last bit decides tokens of this run, and this device or processor adds up in another order")
    seen = list[Plan]()
    request = to_request(folder, entry)

    result = run(make_engine(folder, 16, seen=seen), [[request]])[request.id]

    record_answers(record_property, [result], [expected(entry)], entry["nfe"])
    assert result == expected(entry)
    canvases = [plan.rows[0] for plan in seen if plan.rows[0].canvas is not None]
    inputs = folder.arrays()[entry["decoder_inputs_key"]].tolist()
    assert len(canvases) == len(inputs)
    for row, known in zip(canvases, inputs, strict=True):
        assert row.canvas is not None
        # The first forward's noise is drawn on the device.
        assert row.canvas.step == 0 or list(row.token_ids[-len(known) :]) == known


@pytest.mark.parametrize("folder", [pytest.param(folder, id=folder.name) for folder in FOLDERS])
@pytest.mark.parametrize("way", ["together", "one-a-step", "narrow"])
def test_a_batch_of_runs_gives_the_tokens_of_each_alone(folder: GoldenFolder, way: str) -> None:
    requests = [to_request(folder, entry) for entry in comparable(folder.path)]
    arrivals = [[request] for request in requests] if way == "one-a-step" else [requests]

    result = run(make_engine(folder, page_size=8, token_budget=64 if way == "narrow" else 2048), arrivals)

    assert result == {entry["name"]: expected(entry) for entry in comparable(folder.path)}


BY_FOLDER = pytest.mark.parametrize("folder", [pytest.param(folder, id=folder.name) for folder in FOLDERS])


@BY_FOLDER
def test_a_text_that_is_written_already_gives_the_same_tokens(folder: GoldenFolder) -> None:
    engine, requests = (
        make_engine(folder, page_size=8),
        [to_request(folder, entry) for entry in comparable(folder.path)],
    )
    run(engine, [requests])

    again = [request.model_copy(update={"id": f"{request.id}-again"}) for request in requests]
    result = run(engine, [[request] for request in again])

    assert result == {f"{entry['name']}-again": expected(entry) for entry in comparable(folder.path)}


@BY_FOLDER
def test_pages_for_little_more_than_the_longest_run_change_no_token(
    folder: GoldenFolder, record_property: Record
) -> None:
    requests = [to_request(folder, entry) for entry in comparable(folder.path)]
    # A canvas of 16 more than the longest: two pages.
    longest = max(len(request.prompt) + request.limits.max_tokens for request in requests)
    engine = make_engine(folder, page_size=8, num_pages=-(-longest // 8) + 2)

    result = run(engine, [requests])

    record_property("preemptions", engine.load().preemptions)
    assert result == {entry["name"]: expected(entry) for entry in comparable(folder.path)}


@BY_FOLDER
@pytest.mark.parametrize("moment", [1, 9])
def test_runs_that_are_handed_over_go_on_to_the_same_tokens(folder: GoldenFolder, moment: int) -> None:
    requests = [to_request(folder, entry) for entry in comparable(folder.path)]

    tokens = run_handed_over(make_engine(folder, 16), make_engine(folder, 16), requests, moment)

    assert tokens == {entry["name"]: expected(entry)[0] for entry in comparable(folder.path)}


@BY_FOLDER
def test_the_last_bit_decides_some_runs_and_leaves_the_others(folder: GoldenFolder) -> None:
    assert 0 < len(decided(folder, draws=8)) < len(folder.generate)
