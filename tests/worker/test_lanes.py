"""Rows with blocks of several lengths that the device leads get what the plain runner decides for them."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.canvas import Field
from shared.commands import Generate, Limits, LoraUse, Sampling
from shared.decoding import LowConfidenceStatic
from tests.fleet.models import BLOCK_LENGTH, VOCAB, write_tiny_model
from tests.worker.adapter_folders import read_weights, write_adapter
from tests.worker.exhausted import Shaky, Tight
from tests.worker.test_adapters import Shelf
from tests.worker.test_ahead import DEVICE, a_request, make_engine, never_waiting, run, waves_of
from worker.adapters.bank import AdapterBank
from worker.adapters.targets import find_targets, shapes_of
from worker.adapters.weights import load_adapter
from worker.ahead import AheadRunner
from worker.bundled import bundled_folder
from worker.device import guarded
from worker.engine.plan import Plan
from worker.engine.ports import Decision
from worker.graphs import Answer, StepGraphs
from worker.lanes import Lanes, make_lanes
from worker.models import LoadedModel, load_model
from worker.runner import Runner
from worker.runners import make_runner

PAGE, PAGES = 32, 64
MAX_LEN = 160
BUDGET = 160
LENGTHS = (4, 8, 16, 32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    loaded = load_model(write_tiny_model(tmp_path_factory.mktemp("model")), device=DEVICE)
    return replace(loaded, spec=replace(loaded.spec, max_model_len=MAX_LEN))


@pytest.fixture(scope="module")
def bundled() -> LoadedModel:
    loaded = load_model(bundled_folder("demo"), device=DEVICE, dtype=torch.float32)
    return replace(loaded, spec=replace(loaded.spec, max_model_len=MAX_LEN))


def plain(model: LoadedModel, pages: int = PAGES, **more: Any) -> Runner:
    return Runner(model, pages, PAGE, DEVICE, **more)


def led(
    model: LoadedModel, rows: int, pages: int = PAGES, lengths: Sequence[int] = LENGTHS, **more: Any
) -> tuple[Lanes, dict[int, AheadRunner]]:
    """Return a runner with lanes, and these by their block length."""
    runner = plain(model, pages, **more)
    lanes = make_lanes(runner, rows, lengths)
    forward = Lanes(runner, lanes)
    forward.capture(lambda done, of: None)
    return forward, {lane.graphs.layout.block: lane for lane in lanes}


def a_load(seed: int, count: int, lengths: Sequence[int | None]) -> list[list[Generate]]:
    """Return a mixed load of which the device can lead about two thirds, if it can lead the lengths."""
    draw = random.Random(seed)
    requests = list[Generate]()
    for number in range(count):
        plainer = draw.choice([{}, {"edits": None, "logprobs": None, "sampling": Sampling()}])
        change = {"block_length": draw.choice(lengths), **plainer}
        requests.append(a_request(number, draw).model_copy(update=change))
    return waves_of(requests, draw)


def steady(count: int, tokens: int, lengths: Sequence[int]) -> list[Generate]:
    """Return requests that finish a block in four steps, whatever its length."""
    draw = random.Random(count)
    return [
        Generate(
            id=f"g-{number}",
            model="tiny",
            prompt=tuple(draw.randrange(10, VOCAB - 10) for _ in range(32)),
            limits=Limits(max_tokens=tokens, ignore_eos=True),
            decoding=LowConfidenceStatic(steps=4),
            block_length=lengths[number % len(lengths)],
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("budget", [128, BUDGET, 400])
@pytest.mark.parametrize("seed", range(4))
def test_a_mixed_load_of_several_lengths_gets_the_tokens_of_the_plain_runner(model, seed, budget):
    # 12 has no lane.
    waves = a_load(seed, 24, (None, *LENGTHS, *LENGTHS, 12))
    expected = run(make_engine(model, plain(model), PAGES, 6, BUDGET, ahead=False, page_size=PAGE), waves)
    forward, lanes = led(model, 6)
    assert run(make_engine(model, forward, PAGES, 6, budget, page_size=PAGE), waves) == expected
    assert sum(lane.asked > lane.postponed for lane in lanes.values()) > 2


@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 10),
    rows=st.integers(1, 8),
    budget=st.integers(128, 300),
    pages=st.integers(12, 40),
    taken=st.sets(st.sampled_from(LENGTHS), min_size=1),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_lengths_come_and_have_lanes_tokens_are_those_of_the_plain_runner(
    model, seed, count, rows, budget, pages, taken
):
    waves = a_load(seed, count, (None, *LENGTHS))
    expected = run(make_engine(model, plain(model), PAGES, rows, BUDGET, ahead=False, page_size=PAGE), waves)
    forward, _ = led(model, rows, pages, sorted(taken))
    assert run(make_engine(model, forward, pages, rows, budget, page_size=PAGE), waves) == expected


@pytest.mark.parametrize("seed", range(2))
def test_the_bundled_model_says_the_same_with_each_of_its_lengths_when_it_is_led(bundled, seed):
    draw = random.Random(seed)
    lengths = (8, 16, 32)
    requests = [
        Generate(
            id=f"g-{number}",
            model="demo",
            prompt=tuple(draw.randrange(20, 800) for _ in range(draw.choice([5, 16, 40]))),
            sampling=draw.choice([Sampling(), Sampling(temperature=0.7, seed=number)]),
            limits=Limits(max_tokens=draw.choice([20, 60])),
            block_length=draw.choice((None, *lengths)),
        )
        for number in range(10)
    ]
    waves = waves_of(requests, draw)
    expected = run(make_engine(bundled, plain(bundled), PAGES, 8, 256, ahead=False, page_size=PAGE), waves)
    forward, lanes = led(bundled, 8, lengths=lengths)
    assert run(make_engine(bundled, forward, PAGES, 8, 256, page_size=PAGE), waves) == expected
    assert sorted(lanes) == [8, 16, 32] and all(lane.asked for lane in lanes.values())


@pytest.mark.parametrize("pages", [14, 18, 22])
def test_preemption_and_aborts_in_one_lane_change_nobodys_tokens(model, pages):
    lengths = (4, 8, 16)
    draw = random.Random(pages)
    requests = [
        each.model_copy(update={"prompt": each.prompt[: draw.choice([1, 9, 16])]}) for each in steady(16, 60, lengths)
    ]
    waves, aborts = waves_of(requests, draw), {9: "g-3", 14: "g-5", 20: "g-6", 25: "g-9"}
    expected = run(make_engine(model, Runner(model, 128, 16, DEVICE), 128, 16, 400, ahead=False, page_size=16), waves)
    runner = Runner(model, pages, 16, DEVICE)
    engine = make_engine(model, Lanes(runner, make_lanes(runner, 16, lengths)), pages, 16, 400, page_size=16)
    found = run(engine, waves, aborts)
    gone = {name for name, (_, detail, _) in found.items() if detail == "aborted"}
    assert gone and engine.load().preemptions > 0
    assert {name: end for name, end in found.items() if name not in gone} == {
        name: end for name, end in expected.items() if name not in gone
    }


class Watched(StepGraphs):
    """Notes what is launched and waited for, in order, and how many rows each step decides for."""

    def launch(self, rows: int, slots: int = 0, room: int | None = None, adapted: bool = False) -> Answer:
        self.seen.append(("launch", self.layout.block))
        self.counts["steps of a row"] += int((self.state[:rows, Field.LIVE] != 0).sum())
        answer = super().launch(rows, slots, room, adapted)
        return Noted(answer.values, answer.after, answer.written, self)

    seen: list[tuple[str, int]]
    counts: Counter[str]


class Noted(Answer):
    def __init__(self, values: Any, after: Any, written: Any, graphs: Watched) -> None:
        super().__init__(values, after, written)
        object.__setattr__(self, "graphs", graphs)

    def read(self) -> torch.Tensor:
        graphs: Watched = self.graphs  # type: ignore[attr-defined]
        graphs.seen.append(("wait", graphs.layout.block))
        return super().read()


def watch(lanes: dict[int, AheadRunner]) -> tuple[list[tuple[str, int]], Counter[str]]:
    seen, counts = list[tuple[str, int]](), Counter[str]()
    for lane in lanes.values():
        lane.graphs.__class__ = Watched
        assert isinstance(lane.graphs, Watched)
        lane.graphs.seen, lane.graphs.counts = seen, counts
    return seen, counts


def test_each_lane_is_waited_for_once_a_step_and_only_when_the_next_steps_of_all_are_under_way(model):
    lengths = (4, 8, 16)
    forward, lanes = led(model, 6, lengths=lengths)
    seen, _ = watch(lanes)
    steps: list[list[tuple[str, int]]] = []

    def watched(plan: Plan) -> Decision:
        seen.clear()
        decision = forward(plan)
        steps.append([*seen])
        return decision

    run(make_engine(model, watched, PAGES, 6, 400, page_size=PAGE), [steady(6, 32, lengths)])
    longest_first = sorted(lengths, reverse=True)
    own_pace = [("launch", length) for length in longest_first] + [("wait", length) for length in longest_first]
    # The first plan finds nothing under way: each lane then waits for what it has just launched, one more behind it.
    assert sorted(steps[0]) == sorted([*own_pace, *(("launch", length) for length in lengths)])
    # Blocks of 16 come to their end in 8 steps, the others go on.
    assert steps[1:8] == [own_pace] * 7
    assert Counter(what for step in steps for what, _ in step)["wait"] == sum(
        len({length for what, length in step if what == "wait"}) for step in steps
    )


def test_what_no_lane_leads_runs_in_one_forward_beside_them_with_what_stands_before_their_blocks(model, monkeypatch):
    lengths = (4, 8, 16)
    forward, lanes = led(model, 9, lengths=lengths)
    seen, _ = watch(lanes)
    ran: list[int] = []
    run_plain = Runner.__call__

    def counted(runner: Runner, plan: Plan) -> Decision:
        ran.append(len(plan.rows))
        return run_plain(runner, plan)

    def watched(plan: Plan) -> Decision:
        before = len(ran)
        decision = forward(plan)
        assert len(ran) - before <= 1
        return decision

    monkeypatch.setattr(Runner, "__call__", counted)
    requests = steady(9, 16, lengths)
    # Three that nobody leads, one of each length.
    cut = Sampling(temperature=0.8, top_k=5, seed=3)
    mixed = [each.model_copy(update={"sampling": cut}) if n < 3 else each for n, each in enumerate(requests)]
    run(make_engine(model, watched, PAGES, 9, 500, page_size=PAGE), [mixed])
    # The first one writes the prompts of all, then those three go on by themselves.
    assert ran[0] == 9 and set(ran[1:]) == {1, 2, 3}
    assert {length for _, length in seen} == {*lengths}


@pytest.mark.parametrize("fit", [64, 80])
def test_of_rows_of_several_lengths_that_take_turns_every_step_that_the_device_runs_decides_something(model, fit):
    requests = steady(8, 32, (4, 8, 16))
    forward, lanes = led(model, 8)
    for lane in lanes.values():
        # A slot for each whatever it takes, so that no row is put off for want of one.
        lane._slots = {size: [size] for size in lane._slots}
        lane._prices.clear()
    _, counts = watch(lanes)

    def watched(plan: Plan) -> Decision:
        decision = forward(plan)
        counts["plans"] += 1
        counts["sit out"] += len(plan.running) - len(plan.rows)
        counts["decided"] += sum(row.canvas is not None for row in plan.rows) - len(decision.postponed)
        return decision

    found = run(make_engine(model, watched, PAGES, 8, fit, page_size=PAGE), [requests])
    expected = run(make_engine(model, plain(model), PAGES, 8, fit, ahead=False, page_size=PAGE), [requests])
    assert found == expected
    assert counts["sit out"] > 10
    assert counts["steps of a row"] == counts["decided"]


def test_rows_of_a_worker_that_chooses_by_load_are_led_with_any_length_it_chooses(model):
    def choose(together: int) -> int:
        return 16 if together < 4 else 8

    draw = random.Random(7)
    requests = [
        Generate(
            id=f"g-{number}",
            model="tiny",
            prompt=tuple(draw.randrange(10, VOCAB - 10) for _ in range(9)),
            limits=Limits(max_tokens=40, ignore_eos=True),
        )
        for number in range(10)
    ]
    waves = [[requests[0]], [], requests[1:3], [], [], requests[3:]]
    expected = run(make_engine(model, plain(model), PAGES, 8, 400, ahead=False, page_size=PAGE, choose=choose), waves)
    forward, lanes = led(model, 8)
    assert run(make_engine(model, forward, PAGES, 8, 400, page_size=PAGE, choose=choose), waves) == expected
    assert lanes[8].asked > 0 < lanes[16].asked and lanes[4].asked == lanes[32].asked == 0


def test_rows_under_adapters_are_led_with_the_models_own_length_and_others_run_beside_them(model, tmp_path):
    folder = write_tiny_model(tmp_path / "model")
    loaded = load_model(folder, device=DEVICE)
    loaded = replace(loaded, spec=replace(loaded.spec, max_model_len=MAX_LEN))
    targets = find_targets(loaded)
    write_adapter(tmp_path / "fox", read_weights(folder), shapes_of(targets))
    shelf = Shelf({64 * "f": load_adapter(tmp_path / "fox", targets, loaded.device, loaded.dtype)})
    fox = LoraUse(name="fox", path="fox", digest=64 * "f")
    asked = steady(6, 24, (4, 8))
    waves = [[each.model_copy(update={"lora": (fox,) if n % 3 == 0 else ()}) for n, each in enumerate(asked)]]
    expected = run(
        make_engine(loaded, plain(loaded, adapters=shelf), PAGES, 6, 400, ahead=False, page_size=PAGE), waves
    )
    linears = [target.linear for target in targets.values()]
    bank = AdapterBank(linears, 2, 8, shelf, loaded.device, loaded.dtype)
    forward, lanes = led(loaded, 6, lengths=(4, 8), adapters=shelf, bank=bank)
    assert lanes[4].graphs.bank is bank and lanes[8].graphs.bank is None
    assert run(make_engine(loaded, forward, PAGES, 6, 400, page_size=PAGE), waves) == expected
    # g-0 with blocks of 4 is led, g-3 with blocks of 8 is not.
    assert lanes[4].asked > lanes[8].asked > 0


def test_a_model_with_one_length_has_no_lanes_in_front_of_what_leads_it(model):
    def made(*lengths: int) -> object:
        return make_runner(model, 8, PAGE, DEVICE, max_rows=2, ahead=True, lengths=lengths)

    assert isinstance(made(), AheadRunner) and isinstance(made(BLOCK_LENGTH), AheadRunner)
    assert isinstance(made(8), Lanes)


def test_captures_are_told_over_all_lanes_the_longest_first_and_fewer_of_other_lengths(model, monkeypatch):
    captured: list[int] = []

    def take(graphs: StepGraphs, *size: int) -> None:
        captured.append(graphs.layout.block)

    monkeypatch.setattr(StepGraphs, "capture", take)
    monkeypatch.setattr(StepGraphs, "capture_head", take)
    runner = plain(model, 8)
    lanes = make_lanes(runner, 64, (4, 8, 32))
    told: list[tuple[int, int]] = []
    Lanes(runner, lanes).capture(lambda done, of: told.append((done, of)))
    assert told == [(done, len(captured)) for done in range(1, len(captured) + 1)]
    assert captured == sorted(captured, reverse=True) and set(captured) == {4, 8, 32}
    # Of its own length the model has less of the head, for it is the shortest: by layers there are more.
    layers = {lane.graphs.layout.block: sum(map(len, lane._slots.values())) for lane in lanes}
    assert layers[4] > layers[8] == layers[32]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="only a GPU can be waited for")
def test_no_lane_waits_for_the_device_but_at_its_answer(model):
    strict = never_waiting(led(model, 6, lengths=(4, 8, 16))[0])
    waves = waves_of(steady(9, 33, (4, 8, 16)), random.Random(3))
    assert len(run(make_engine(model, strict, PAGES, 6, 400, page_size=PAGE), waves)) == 9


@pytest.mark.parametrize("seed", range(3))
def test_what_no_lane_leads_may_find_no_memory_at_no_cost_of_a_request_or_token(model, seed, monkeypatch):
    waves = a_load(seed, 14, (None, 8, 16, 12))
    expected = run(make_engine(model, plain(model), PAGES, 6, BUDGET, ahead=False, page_size=PAGE), waves)
    forward, lanes = led(model, 6, lengths=(8, 16))
    # What is captured needs no more memory than it has.
    tight = Tight(forward._runner, room=24, seed=seed)
    monkeypatch.setattr(forward, "_runner", tight)
    assert run(make_engine(model, guarded(forward), PAGES, 6, BUDGET, page_size=PAGE), waves) == expected
    assert tight.gave_out > 0 and sum(lane.asked for lane in lanes.values()) > 0


@pytest.mark.skipif(DEVICE != "cpu", reason="captured steps are no operations that could find no memory")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("lengths", [(), (8, 16)], ids=["one lane", "several"])
def test_rows_go_on_as_if_memory_had_never_given_out_in_the_middle_of_a_step(model, lengths, seed):
    waves = a_load(seed, 20, (None, *lengths))
    expected = run(make_engine(model, plain(model), PAGES, 6, BUDGET, ahead=False, page_size=PAGE), waves)
    forward, lanes = led(model, 6, lengths=lengths)
    shaky = Shaky(forward)
    assert run(make_engine(model, shaky, PAGES, 6, BUDGET, page_size=PAGE), waves) == expected
    assert shaky.gave_out > 10 and sum(lane.asked for lane in lanes.values()) > 0
