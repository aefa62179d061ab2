"""The device one step ahead of the host decides what the plain runner decides, whatever happens in between."""

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.canvas import Field
from shared.commands import Generate, Limits, LogitEdits, Preview, Sampling
from shared.decoding import Decoding, Factor, LowConfidenceDynamic, LowConfidenceStatic, Sequential, Threshold
from shared.events import Delta, Failed, Finished
from tests.fleet.models import BLOCK_LENGTH, VOCAB, write_tiny_model
from tests.worker.exhausted import Tight
from tests.worker.texts import NoText
from worker.ahead import AheadRunner, bucket_sizes, make_graphs
from worker.device import guarded
from worker.engine.engine import ChooseLength, Engine
from worker.engine.plan import Canvas, Plan, Row
from worker.engine.ports import Arrival, Decision, Forward, Inbox
from worker.engine.scheduler import BatchLimits, CacheShape
from worker.foresight import Offer
from worker.leadable import goes_ahead
from worker.models import LoadedModel, load_model
from worker.models.spec import Attention, Commit
from worker.runner import Runner

PAGE = 8
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAX_LEN = 128


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    loaded = load_model(write_tiny_model(tmp_path_factory.mktemp("model")), device=DEVICE)
    return replace(loaded, spec=replace(loaded.spec, max_model_len=MAX_LEN))


OFFERS = {
    "chosen": Offer(whole=0),
    "no slots": Offer(slots=(0,)),
    "a slot for each": Offer(slots=(1,)),
    "too few slots, too little room": Offer(slots=(1 / 6,), room=(1 / 4,), whole=0),
}


def make_ahead(model: LoadedModel, num_pages: int, max_rows: int, offer: str | None = None) -> AheadRunner:
    runner = Runner(model, num_pages, PAGE, DEVICE)
    forward = AheadRunner(runner, make_graphs(runner, max_rows), bucket_sizes(max_rows), OFFERS.get(offer or ""))
    forward.capture(lambda done, of: None)
    return forward


def never_waiting(forward: Forward) -> Forward:
    """Return what fails where PyTorch waits for the device; the wait for an answer's event is not its own."""

    def strict(plan: Plan) -> Decision:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return forward(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return strict


def make_engine(
    model: LoadedModel,
    forward: Forward,
    num_pages: int,
    max_rows: int,
    budget: int = 64,
    ahead: bool = True,
    page_size: int = PAGE,
    choose: ChooseLength | None = None,
) -> Engine:
    limits, cache = BatchLimits(max_rows, budget, pages_ahead=ahead), CacheShape(page_size, num_pages)
    return Engine(model.spec, cache, limits, forward, lambda request, resume: NoText(), choose_length=choose)


def a_request(number: int, draw: random.Random, decoding: Decoding | None = None) -> Generate:
    """Return a request of a mixed load: most can be led by the device, some cannot."""
    kinds: list[Decoding] = [
        LowConfidenceStatic(steps=2),
        LowConfidenceDynamic(threshold=0.02),
        LowConfidenceDynamic(threshold=0.02, fallback="leftmost"),
        Sequential(steps=2),
        Threshold(threshold=0.02),
        Factor(),
    ]
    samplings = [
        Sampling(),
        Sampling(temperature=0.7, seed=number),
        Sampling(temperature=0.7, top_k=1),
        Sampling(temperature=0.9, top_p=0.8, seed=number),
    ]
    tokens = draw.choice([1, 3, 8, 21])
    return Generate(
        id=f"g-{number}",
        model="tiny",
        prompt=tuple(draw.randrange(10, VOCAB - 10) for _ in range(draw.choice([1, 4, 6, 16, 27, 40]))),
        sampling=draw.choice(samplings) if decoding is None else Sampling(),
        limits=Limits(
            max_tokens=tokens,
            ignore_eos=draw.random() < 0.7,
            min_tokens=draw.choice([0, 0, 0, min(tokens, 2)]),
            max_nfe=draw.choice([None, None, None, 5]),
            stop_token_ids=tuple(draw.sample(range(10, VOCAB - 10), 40)),
        ),
        decoding=decoding or draw.choice(kinds),
        block_length=draw.choice([None, None, None, None, 8]) if decoding is None else None,
        preview=draw.choice([None, Preview()]),
        edits=draw.choice([None, None, None, LogitEdits(presence_penalty=1.5, logit_bias=((20, 1.0),))]),
        logprobs=draw.choice([None, None, None, 2]),
    )


def run(
    engine: Engine, waves: Sequence[Sequence[Generate]], aborts: dict[int, str] | None = None
) -> dict[str, tuple[list[int], str, int]]:
    """Return (tokens, ending, forwards) of each request that came to an end."""
    tokens: dict[str, list[int]] = defaultdict(list)
    ends: dict[str, tuple[list[int], str, int]] = {}
    step = 0
    while step < len(waves) or not engine.idle:
        wave = waves[step] if step < len(waves) else ()
        inbox = Inbox(arrivals=[Arrival(request, epoch=1) for request in wave])
        if aborts and step in aborts:
            inbox.aborts = [(aborts[step], "cancelled")]
        for event in engine.step(inbox).events:
            match event:
                case Delta():
                    tokens[event.id] += event.token_ids
                case Finished():
                    ends[event.id] = (tokens[event.id], event.detail, event.usage.nfe)
                case Failed():
                    raise AssertionError(f"{event.id}: {event.message}")
                case _:
                    pass
        step += 1
        assert step < 3000, "the engine does not come to an end"
    load = engine.load()
    assert load.free_pages == load.total_pages
    return ends


def waves_of(requests: Sequence[Generate], draw: random.Random) -> list[list[Generate]]:
    waves: list[list[Generate]] = [[] for _ in range(12)]
    for request in requests:
        draw.choice(waves).append(request)
    return waves


@pytest.mark.parametrize("budget", [32, 64])
@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize("seed", range(4))
def test_a_mixed_load_gets_the_tokens_of_the_plain_runner(model, offer, seed, budget):
    draw = random.Random(seed)
    waves = waves_of([a_request(number, draw) for number in range(14)], draw)
    plain = make_engine(model, Runner(model, 96, PAGE, DEVICE), 96, 6, ahead=False)
    ahead = make_engine(model, make_ahead(model, 96, 6, offer), 96, 6, budget)
    assert run(ahead, waves) == run(plain, waves)


@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize("num_pages", [18, 24, 40])
def test_preemption_and_aborts_change_nobody_elses_tokens(model, offer, num_pages):
    draw = random.Random(num_pages)
    requests = [a_request(number, draw, LowConfidenceStatic(steps=2)) for number in range(16)]
    waves, aborts = waves_of(requests, draw), {9: "g-3", 14: "g-5", 20: "g-6", 25: "g-9"}
    plain = run(make_engine(model, Runner(model, 96, PAGE, DEVICE), 96, 16, ahead=False), waves)
    engine = make_engine(model, make_ahead(model, num_pages, 16, offer), num_pages, 16)
    found = run(engine, waves, aborts)
    gone = {name for name, (_, detail, _) in found.items() if detail == "aborted"}
    assert {name: end for name, end in found.items() if name not in gone} == {
        name: end for name, end in plain.items() if name not in gone
    }


@pytest.mark.parametrize("seed", range(3))
def test_blocks_of_a_dual_cache_get_the_tokens_of_the_plain_runner(model, seed):
    """The whole canvas runs at each block's start; between two of those the device leads."""
    draw = random.Random(seed)
    spec = replace(
        model.spec,
        commit=Commit.REFRESHED,
        attention=Attention.BIDIRECTIONAL,
        blocks_after_prompt=True,
        cache="dual",
    )
    dual = replace(model, spec=spec)
    waves = waves_of([a_request(number, draw, LowConfidenceStatic(steps=4)) for number in range(8)], draw)
    plain = make_engine(dual, Runner(dual, 96, PAGE, DEVICE), 96, 6, 256, ahead=False)
    forward = make_ahead(dual, 96, 6)
    assert run(make_engine(dual, forward, 96, 6, 256), waves) == run(plain, waves)
    assert forward.asked > forward.postponed > 0


@pytest.mark.parametrize("seed", range(4))
def test_steps_that_find_no_memory_cost_no_request_and_no_token(model, seed, monkeypatch):
    draw = random.Random(seed)
    waves = waves_of([a_request(number, draw) for number in range(14)], draw)
    plain = make_engine(model, Runner(model, 96, PAGE, DEVICE), 96, 6, ahead=False)
    ahead = make_ahead(model, 96, 6)
    # What is captured needs no more memory than it has.
    tight = Tight(ahead._runner, room=16, seed=seed)
    monkeypatch.setattr(ahead, "_runner", tight)
    assert run(make_engine(model, guarded(ahead), 96, 6), waves) == run(plain, waves)
    assert tight.gave_out > 0


@pytest.mark.parametrize("budget", [16, 20, 33])
def test_rows_that_share_too_small_a_budget_all_come_to_an_end(model, budget):
    draw = random.Random(budget)
    requests = [a_request(number, draw, LowConfidenceStatic(steps=2)) for number in range(12)]
    plain = run(make_engine(model, Runner(model, 96, PAGE, DEVICE), 96, 12, ahead=False), [requests])
    assert run(make_engine(model, make_ahead(model, 96, 12), 96, 12, budget), [requests]) == plain


@pytest.mark.parametrize("fit", [4, 5, 6, 7])
def test_of_rows_that_take_turns_every_step_that_the_device_runs_decides_something(model, fit):
    runner = Runner(model, 96, PAGE, DEVICE)
    graphs = make_graphs(runner, 8)
    counts, original = Counter[str](), graphs.launch

    def launch(rows: int, slots: int = 0, room: int | None = None, adapted: bool = False):
        counts["steps of a row"] += int((graphs.state[:rows, Field.LIVE] != 0).sum())
        return original(rows, slots, room, adapted)

    graphs.launch = launch
    forward = AheadRunner(runner, graphs, bucket_sizes(8), OFFERS["a slot for each"])

    def watched(plan: Plan) -> Decision:
        decision = forward(plan)
        counts["plans"] += 1
        counts["decided"] += len(plan.rows) - len(decision.postponed)
        return decision

    draw = random.Random(fit)
    requests = [
        Generate(
            id=f"g-{number}",
            model="tiny",
            prompt=tuple(draw.randrange(10, VOCAB - 10) for _ in range(BLOCK_LENGTH)),
            limits=Limits(max_tokens=24, ignore_eos=True),
            decoding=LowConfidenceStatic(steps=4),
        )
        for number in range(8)
    ]
    found = run(make_engine(model, watched, 96, 8, budget=fit * BLOCK_LENGTH), [requests])
    ran = Counter(counts)
    counts.clear()
    forward = Runner(model, 96, PAGE, DEVICE)
    assert run(make_engine(model, watched, 96, 8, budget=fit * BLOCK_LENGTH, ahead=False), [requests]) == found
    assert ran["steps of a row"] == ran["decided"] == counts["decided"]
    # Each row is put there once, which takes a place in a plan.
    assert counts["plans"] <= ran["plans"] <= counts["plans"] + 4


def test_rows_in_steady_state_are_never_postponed(model):
    """What the device does by itself is what the engine asks for, and there are slots for all who need one."""
    requests = [
        Generate(
            id=f"g-{number}",
            model="tiny",
            prompt=tuple(range(20, 20 + 4 * number)),
            limits=Limits(max_tokens=40, ignore_eos=True),
            decoding=LowConfidenceStatic(steps=2),
        )
        for number in range(1, 5)
    ]
    forward = make_ahead(model, 96, 4, "a slot for each")
    run(make_engine(model, forward, 96, 4), [requests])
    assert forward.postponed == 0
    assert forward.asked == 4 * 20


def test_the_next_step_is_under_way_before_the_engine_hears_of_the_last_one(model):
    runner = Runner(model, 96, PAGE, DEVICE)
    graphs = make_graphs(runner, 1)
    launched = Counter[str]()
    original = graphs.launch

    def launch(rows: int, slots: int = 0, room: int | None = None, adapted: bool = False):
        launched["steps"] += 1
        return original(rows, slots, room, adapted)

    graphs.launch = launch
    forward = AheadRunner(runner, graphs, [1])
    told: list[int] = []

    def watched(plan: Plan) -> Decision:
        decision = forward(plan)
        told.append(launched["steps"])
        return decision

    request = Generate(
        id="g", model="tiny", prompt=(11, 12, 13), limits=Limits(max_tokens=9), decoding=LowConfidenceStatic(steps=2)
    )
    run(make_engine(model, watched, 96, 1), [[request]])
    assert told == [number + 2 for number in range(len(told))]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="only a GPU can be waited for")
@pytest.mark.parametrize("offer", OFFERS)
def test_neither_prompts_nor_steps_wait_for_the_device_but_at_the_answer(model, offer):
    strict = never_waiting(make_ahead(model, 96, 4, offer))
    draw = random.Random(3)
    requests = [
        Generate(
            id=f"g-{number}",
            model="tiny",
            prompt=tuple(draw.randrange(10, VOCAB - 10) for _ in range(7 * number)),
            sampling=Sampling(temperature=number % 2 / 2, seed=number),
            limits=Limits(max_tokens=17, ignore_eos=True),
            decoding=LowConfidenceStatic(steps=2),
        )
        for number in range(1, 7)
    ]
    assert len(run(make_engine(model, strict, 96, 4), waves_of(requests, draw))) == 6


def test_every_fact_of_a_row_is_one_that_the_device_is_told_or_that_keeps_a_row_from_it():
    """A new field belongs into `canvas_state`, or into `_is_plain` as a reason against it; then into this list."""
    assert {each.name for each in fields(Canvas)} == {
        *("start", "masked", "step", "last", "sampling", "decoding", "stop_token_ids", "shift", "seed", "editable"),
        *(
            "undecided_at_first",
            "forbidden",
            "limit",
            "block_length",
            "before",
            "tests_draft",
            "edits",
            "logprobs",
            "guarded",
            "tests_draft",
        ),
    }
    assert {each.name for each in fields(Row)} == {
        *("request_id", "start", "token_ids", "visible_end", "pages", "canvas", "positions", "near", "guide"),
        *("pooled", "lora"),
    }


@given(st.integers(1, 400))
def test_sizes_end_with_all_rows_that_the_device_leads(max_rows):
    sizes = bucket_sizes(max_rows)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == min(max_rows, 256)
    assert all(following <= max(2 * size, size + 16) for size, following in zip(sizes, sizes[1:], strict=False))


def test_only_families_that_go_from_block_to_block_are_led(model):
    spec = model.spec
    assert goes_ahead(spec)
    assert spec.block_length == BLOCK_LENGTH
    dual = {"commit": Commit.REFRESHED, "attention": Attention.BIDIRECTIONAL, "blocks_after_prompt": True}
    assert goes_ahead(replace(spec, **dual))
    assert not goes_ahead(replace(spec, **{**dual, "attention": Attention.CAUSAL}))
    assert not goes_ahead(replace(spec, commit=Commit.SEEDED))
    for changes in ({"logit_shift": 1}, {"blocks_after_prompt": True}, {"sliding_window": 4}, {"block_length": 0}):
        assert not goes_ahead(replace(spec, **changes))
