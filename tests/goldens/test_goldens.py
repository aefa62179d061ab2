"""Equality with the official references, run by run. `DIFFLEET_GOLDENS` names a folder with other data."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

import pytest
import torch

from shared.commands import Generate
from shared.events import Delta, Failed, Finished
from tests.goldens import dream, fastdllm_v2, llada, llada2, nemotron, sdar, wedlm
from tests.goldens.conditioning import spread
from tests.goldens.folder import AHEAD, Entry, GoldenFolder, find_folders
from tests.goldens.passes import Pass, run_pass, to_passes
from tests.goldens.runs import Run, replay
from tests.worker.texts import NoText
from worker.ahead import AheadRunner, make_graphs
from worker.engine.engine import Engine
from worker.engine.plan import Plan
from worker.engine.ports import Arrival, Decision, Forward, Inbox, Resume
from worker.engine.scheduler import BatchLimits, CacheShape
from worker.leadable import goes_ahead
from worker.runner import Runner

# How a family's entries become requests.
FAMILIES: dict[str, Callable[[GoldenFolder, Entry], list[Run]]] = {
    "dream": dream.to_runs,
    "fastdllm_v2": fastdllm_v2.to_runs,
    "llada": llada.to_runs,
    "llada_moe": llada.to_runs,
    "llada2": llada2.to_runs,
    "llada21": llada2.to_runs,
    "nemotron_labs_diffusion": nemotron.to_runs,
    "sdar": sdar.to_runs,
    "wedlm": wedlm.to_runs,
}
# How its forwards become rows, where a family differs.
PASSES: dict[str, Callable[[GoldenFolder, Entry], list[Pass]]] = {"nemotron_labs_diffusion": nemotron.to_passes}
# Its canvases hold noise and no masks: test_diffusion_gemma has its own cases.
ELSEWHERE = {"diffusion_gemma"}
FOLDERS = [folder for folder in find_folders() if folder.family not in ELSEWHERE]
# What the data's README promises of another float32 implementation.
LOGIT_TOLERANCE = 1e-4


def _cases(kind: str) -> list[object]:
    """Return a case for each entry of every folder, and a skipped one for each unknown family."""
    cases: list[object] = []
    for folder in FOLDERS:
        if folder.family in FAMILIES:
            entries = folder.forward if kind == "forward" else folder.generate
            if kind == "trace":
                entries = [entry for entry in entries if "block_trace" in entry]
            cases += [pytest.param(folder, entry, id=f"{folder.name}-{entry['name']}") for entry in entries]
        else:
            reason = f"{folder.path}: family {folder.family!r} is not served; known: {', '.join(FAMILIES)}"
            cases.append(pytest.param(folder, {}, id=folder.name, marks=pytest.mark.skip(reason=reason)))
    return cases


def _batches() -> list[object]:
    """Return the runs of each folder that share a block length and the facts of the checkpoint."""
    cases: list[object] = []
    for folder in FOLDERS:
        groups: dict[str, list[Run]] = defaultdict(list)
        if folder.family in FAMILIES:
            for entry in folder.generate:
                for each in FAMILIES[folder.family](folder, entry):
                    varied = "".join(f"-{name}={value}" for name, value in each.facts.items())
                    groups[f"b{each.request.block_length or 'all'}{varied}"].append(each)
        cases += [pytest.param(folder, runs, id=f"{folder.name}-{name}") for name, runs in groups.items()]
    return cases


Watch = Callable[[Plan], None]
Record = Callable[[str, object], None]


def make_engine(
    folder: GoldenFolder,
    runs: Sequence[Run],
    page_size: int,
    token_budget: int = 2048,
    watch: Watch | None = None,
    num_pages: int | None = None,
) -> Engine:
    """Return an engine over the folder's model; `watch` sees every plan before it runs."""
    model = folder.model()
    # The reference loops end at the ids that their arguments name; a checkpoint's own eos means nothing to them.
    spec = replace(model.spec, **{"stop_token_ids": (), **runs[0].facts})
    num_pages = num_pages or 4096 // page_size
    plain = Runner(replace(model, spec=spec), num_pages, page_size, model.device, draw=replay(runs))
    runner = _ahead(plain, runs) if AHEAD and watch is None else plain

    def forward(plan: Plan) -> Decision:
        if watch is not None:
            watch(plan)
        return runner(plan)

    return Engine(
        spec, CacheShape(page_size, num_pages), BatchLimits(64, token_budget), forward, lambda request, resume: NoText()
    )


def _ahead(runner: Runner, runs: Sequence[Run]) -> Forward:
    """Return a runner that leads the runs' rows itself, where the family allows it."""
    spec = replace(runner.model.spec, block_length=runs[0].request.block_length or runner.model.spec.block_length)
    if not goes_ahead(spec):
        return runner
    runner.model = replace(runner.model, spec=spec)
    leader = AheadRunner(runner, make_graphs(runner, 64), [1, 16])
    leader.capture(lambda done, of: None)
    return leader


def run(engine: Engine, arrivals: Sequence[Sequence[Generate]]) -> dict[str, tuple[list[int], int]]:
    """Run to the end, arrivals[i] joining before step i; return tokens and nfe of each request."""
    tokens: dict[str, list[int]] = defaultdict(list)
    nfe: dict[str, int] = {}
    pending = list(arrivals)
    while pending or not engine.idle:
        joining = pending.pop(0) if pending else []
        for event in engine.step(Inbox(arrivals=[Arrival(request, epoch=1) for request in joining])).events:
            match event:
                case Delta():
                    tokens[event.id] += event.token_ids
                case Finished():
                    nfe[event.id] = event.usage.nfe
                case Failed():
                    pytest.fail(f"{event.id}: {event.message}")
                case _:
                    pass
    return {name: (tokens[name], count) for name, count in nfe.items()}


def record_answers(
    record_property: Record, found: Sequence[tuple[list[int], int]], answers: Sequence[tuple[list[int], int]], nfe: int
) -> None:
    """Tell the report what a setting's rows gave, and the reference's own count of forwards."""
    record_property("tokens", sum(len(tokens) for tokens, _ in found))
    record_property("forwards", sum(forwards for _, forwards in found))
    record_property("reference_forwards", nfe)
    record_property("tokens_equal", [tokens for tokens, _ in found] == [tokens for tokens, _ in answers])
    record_property("forwards_equal", [forwards for _, forwards in found] == [forwards for _, forwards in answers])


@pytest.mark.parametrize(("folder", "entry"), _cases("forward"))
def test_a_prefill_gives_the_references_logits(folder: GoldenFolder, entry: Entry, record_property: Record) -> None:
    errors: list[float] = []
    theirs: list[float] = []
    limits: list[float] = []
    for each in PASSES.get(folder.family, to_passes)(folder, entry):
        errors.append((run_pass(folder.model(), each) - each.logits).abs().max().item())
        theirs.append((each.logits - run_pass(folder.model(torch.float64), each)).abs().max().item())
        # Some of these models are so badly conditioned that the reference itself is further from the exact result. On
        # the host our sums are its own; those of a device go another way, and come as far from it by themselves.
        own = 0.0 if folder.model().device.type == "cpu" else spread(folder, each)
        limits.append(max(LOGIT_TOLERANCE, theirs[-1] + own))
    record_property("error", max(errors))
    record_property("reference_error", max(theirs))

    assert all(error < limit for error, limit in zip(errors, limits, strict=True))


@pytest.mark.parametrize(("folder", "entry"), _cases("generate"))
def test_a_request_alone_gives_the_references_tokens_and_forwards(
    folder: GoldenFolder, entry: Entry, record_property: Record
) -> None:
    found: list[tuple[list[int], int]] = []
    runs = FAMILIES[folder.family](folder, entry)
    for each in runs:
        engine = make_engine(folder, [each], each.request.block_length or 16)
        found.append(each.observe(run(engine, [[each.request]])[each.request.id]))

    answers = [each.answer for each in runs]
    record_answers(record_property, found, answers, entry["nfe"])
    assert found == answers


@pytest.mark.parametrize(("folder", "runs"), _batches())
@pytest.mark.parametrize("way", ["together", "one-a-step", "narrow"])
def test_a_batch_of_runs_gives_the_tokens_of_each_alone(folder: GoldenFolder, runs: list[Run], way: str) -> None:
    requests = [each.request for each in runs]
    arrivals = [[request] for request in requests] if way == "one-a-step" else [requests]
    # Narrow: four blocks a step, the least an engine takes; prompts come in chunks and rows take turns.
    budget = 4 * (requests[0].block_length or 16) if way == "narrow" else 2048

    result = run(make_engine(folder, runs, page_size=16, token_budget=budget), arrivals)

    assert {each.request.id: each.observe(result[each.request.id]) for each in runs} == {
        each.request.id: each.answer for each in runs
    }


@pytest.mark.parametrize(("folder", "entry"), _cases("trace"))
def test_each_forward_sees_the_canvas_that_the_reference_saw(folder: GoldenFolder, entry: Entry) -> None:
    (each,) = FAMILIES[folder.family](folder, entry)
    length, seen = entry["args"]["block_length"], list[list[int]]()

    def watch(plan: Plan) -> None:
        (row,) = plan.rows
        assert row.canvas is not None
        seen.append([row.canvas.start // length, *row.token_ids[-length:]])

    run(make_engine(folder, [each], length, watch=watch), [[each.request]])

    assert seen == entry["block_trace"]


@pytest.mark.parametrize(("folder", "runs"), _batches())
def test_a_text_that_is_written_already_gives_the_same_tokens(folder: GoldenFolder, runs: list[Run]) -> None:
    engine = make_engine(folder, runs, page_size=runs[0].request.block_length or 16)
    run(engine, [[each.request for each in runs]])

    again = [each.request.model_copy(update={"id": f"{each.request.id}-again"}) for each in runs]
    result = run(engine, [[request] for request in again])

    assert {each.request.id: each.observe(result[f"{each.request.id}-again"]) for each in runs} == {
        each.request.id: each.answer for each in runs
    }


@pytest.mark.parametrize(("folder", "entry"), _cases("generate"))
@pytest.mark.parametrize("most", [1, 2, 5])
def test_no_request_takes_more_forwards_than_it_may_or_answers_with_a_mask(
    folder: GoldenFolder, entry: Entry, most: int
) -> None:
    for each in FAMILIES[folder.family](folder, entry):
        limits = each.request.limits.model_copy(update={"max_nfe": most})
        request = each.request.model_copy(update={"limits": limits})
        tokens, nfe = run(make_engine(folder, [each], request.block_length or 16), [[request]])[request.id]

        assert nfe <= most
        assert folder.special["mask"] not in tokens
        assert tokens or each.nfe <= most or request.limits.stop_token_ids


@pytest.mark.parametrize(("folder", "runs"), _batches())
def test_pages_for_little_more_than_the_longest_run_change_no_token(
    folder: GoldenFolder, runs: list[Run], record_property: Record
) -> None:
    page_size = runs[0].request.block_length or 16
    pages = [-(-(len(r.prompt) + r.limits.max_tokens) // page_size) + 1 for r in (each.request for each in runs)]
    copies = [1 + (each.request.cfg_scale > 0) for each in runs]
    most = max(count * copy for count, copy in zip(pages, copies, strict=True))
    # Waiting and preemption: a run that is prefilled again does not count it.
    engine = make_engine(folder, runs, page_size, num_pages=most + 2)
    twins = [each.request.model_copy(update={"id": f"{each.request.id}-twin", "cache_prompt": False}) for each in runs]

    result = run(engine, [[each.request for each in runs] + twins])

    record_property("preemptions", engine.load().preemptions)
    for end in ("", "-twin"):
        assert {each.request.id: each.observe(result[each.request.id + end]) for each in runs} == {
            each.request.id: each.answer for each in runs
        }


@pytest.mark.parametrize(("folder", "runs"), _batches())
@pytest.mark.parametrize("moment", [1, 9])
def test_runs_that_are_handed_over_go_on_to_the_same_tokens(folder: GoldenFolder, runs: list[Run], moment: int) -> None:
    page_size = runs[0].request.block_length or 16
    first, second = make_engine(folder, runs, page_size), make_engine(folder, runs, page_size)

    tokens = run_handed_over(first, second, [each.request for each in runs], moment)

    assert {each.request.id: each.observe((tokens[each.request.id], 0))[0] for each in runs} == {
        each.request.id: each.tokens for each in runs
    }


def run_handed_over(first: Engine, second: Engine, requests: Sequence[Generate], moment: int) -> dict[str, list[int]]:
    """Let `second` go on from what `first` has published when it hands back at step `moment`; return all tokens."""
    committed = {request.id: Resume() for request in requests}
    ended: set[str] = set()
    inbox = Inbox(arrivals=[Arrival(request, epoch=1) for request in requests])
    for step in count():
        for event in first.step(inbox).events:
            match event:
                case Delta():
                    known = committed[event.id].token_ids
                    committed[event.id] = Resume((*known, *event.token_ids), 0, event.seq, event.block + 1, event.nfe)
                case Finished():
                    ended.add(event.id)
                case _:
                    pass
        if first.idle:
            break
        inbox = Inbox(hand_back=step + 1 >= moment)

    heirs = [Arrival(request, 2, committed[request.id]) for request in requests if request.id not in ended]
    tokens = {name: list(resume.token_ids) for name, resume in committed.items()}
    inbox = Inbox(arrivals=heirs)
    while inbox.arrivals or not second.idle:
        for event in second.step(inbox).events:
            if isinstance(event, Delta):
                tokens[event.id] += event.token_ids
        inbox = Inbox()
    return tokens
