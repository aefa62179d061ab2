"""Block length by load: the rule, its prices, and what the engine makes of it."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shared.commands import Generate, Limits
from shared.constraints import Regex
from shared.decoding import Sequential, Threshold
from shared.events import Delta, Finished
from tests.worker.paper_model import PaperForward, decode_alone, paper_spec
from tests.worker.test_engine import Bench, ask, check, make_text
from worker.bridge import resume_of
from worker.device import Placement
from worker.engine.engine import Engine
from worker.engine.load_aware import MARGIN, LoadAware, Steady, StepPrices, can_choose, leaves_choice
from worker.engine.plan import Plan
from worker.engine.ports import Arrival, Decision, Inbox
from worker.engine.scheduler import BatchLimits, CacheShape
from worker.step_prices import clock_for, measure_prices, plan_of

FLAT = StepPrices.of([(1, 0.01), (100_000, 0.01)])
EACH = StepPrices.of([(1, 0.001)])
"""Every position costs the same."""


def aware(own: int, tokens: dict[int, float], prices: StepPrices, budget: int) -> LoadAware:
    """Return a choice where a step's price is one of its positions, whatever their blocks."""
    return LoadAware(own, tokens, dict.fromkeys(tokens, prices), budget)


points = st.lists(st.tuples(st.integers(1, 4096), st.floats(1e-6, 10)), min_size=1, max_size=12)
prices = points.map(StepPrices.of)
lengths = st.dictionaries(st.integers(1, 64), st.floats(0.5, 64), min_size=1, max_size=5)
loads = st.integers(1, 256)


@given(points, st.integers(1, 9000), st.integers(1, 9000))
def test_more_positions_are_never_cheaper_and_no_price_is_above_what_was_measured(
    measured: list[tuple[int, float]], one: int, other: int
) -> None:
    told = StepPrices.of(measured)
    assert told.of_step(min(one, other)) <= told.of_step(max(one, other)) * (1 + 1e-9)
    assert all(told.of_step(count) <= price * (1 + 1e-6) for count, price in measured)
    # No cheaper than the cheapest, either: noise only adds.
    assert told.of_step(1) >= min(price for _, price in measured) * (1 - 1e-9)


@given(points, st.lists(st.floats(1, 9000), min_size=3, max_size=3, unique=True))
def test_each_line_is_as_steep_as_the_one_before(measured: list[tuple[int, float]], at: list[float]) -> None:
    told = StepPrices.of(measured)
    assume(len(told.positions) > 1)
    left, middle, right = sorted(at)
    share = (middle - left) / (right - left)
    between = told.of_step(left) + share * (told.of_step(right) - told.of_step(left))
    assert told.of_step(middle) <= between * (1 + 1e-6)


@given(st.floats(1e-3, 1), st.floats(1e-5, 1e-2), st.lists(st.integers(1, 4096), min_size=2, unique=True))
def test_steps_of_a_fixed_and_an_even_part_are_told_as_they_are(fixed: float, each: float, counts: list[int]) -> None:
    told = StepPrices.of([(count, fixed + each * count) for count in counts])
    for count in range(min(counts), 2 * max(counts), 97):
        assert told.of_step(count) == pytest.approx(fixed + each * count, rel=1e-3)


def test_noise_that_only_adds_moves_nothing_while_the_steps_around_it_are_right() -> None:
    measured = [(count, 0.01 + 0.0002 * count) for count in (16, 32, 64, 128, 256)]
    measured[2] = (64, 0.5)
    assert StepPrices.of(measured).of_step(64) == pytest.approx(0.01 + 0.0002 * 64)
    with pytest.raises(ValueError, match="measured"):
        StepPrices.of([])


@given(lengths, prices, loads, st.integers(1, 8192), st.data())
def test_the_choice_is_the_models_own_or_faster_by_more_than_the_margin(
    tokens: dict[int, float], told: StepPrices, load: int, budget: int, data: st.DataObject
) -> None:
    own = data.draw(st.sampled_from(sorted(tokens)))
    choose = aware(own, tokens, told, budget)
    best = max(choose.rate(length, load) for length in tokens)
    if choose(load) == own:
        assert best <= (1 + MARGIN) * choose.rate(own, load) * (1 + 1e-12)
    else:
        assert choose.rate(choose(load), load) == best > (1 + MARGIN) * choose.rate(own, load)


@given(lengths, prices, loads, st.integers(1, 8192), st.data())
def test_a_length_that_runs_more_positions_for_no_more_tokens_is_never_taken_from_a_model_that_has_another(
    tokens: dict[int, float], told: StepPrices, load: int, budget: int, data: st.DataObject
) -> None:
    own = data.draw(st.sampled_from(sorted(tokens)))
    choose = aware(own, tokens, told, budget)
    taken = choose(load)
    beaten = [
        length
        for length in tokens
        if any(other < length and tokens[other] == tokens[length] for other in tokens if other != length)
    ]
    assert taken == own or taken not in beaten


@given(lengths, loads, st.data())
def test_where_positions_are_free_most_tokens_a_forward_win(
    tokens: dict[int, float], load: int, data: st.DataObject
) -> None:
    own = data.draw(st.sampled_from(sorted(tokens)))
    taken = aware(own, tokens, FLAT, 100_000)(load)
    assert tokens[taken] * (1 + MARGIN) * (1 + 1e-9) >= max(tokens.values())


@given(lengths, loads, st.data())
def test_where_each_position_has_its_price_most_tokens_a_position_win_at_every_load(
    tokens: dict[int, float], load: int, data: st.DataObject
) -> None:
    own = data.draw(st.sampled_from(sorted(tokens)))
    choose = aware(own, tokens, EACH, 100_000)
    taken = choose(load)
    worth = {length: count / (length + count) for length, count in tokens.items()}
    assert worth[taken] * (1 + MARGIN) * (1 + 1e-9) >= max(worth.values())
    assert choose.rate(taken, load) == pytest.approx(choose.rate(taken, 1))


@given(prices, st.floats(0.01, 100), lengths, loads, st.data())
def test_a_faster_device_chooses_alike(
    told: StepPrices, factor: float, tokens: dict[int, float], load: int, data: st.DataObject
) -> None:
    own = data.draw(st.sampled_from(sorted(tokens)))
    scaled = StepPrices(told.positions, tuple(price * factor for price in told.seconds))
    choose, other = aware(own, tokens, told, 2048), aware(own, tokens, scaled, 2048)
    assert other.rate(own, load) == pytest.approx(choose.rate(own, load) / factor)
    assert other.rate(other(load), load) == pytest.approx(other.rate(choose(load), load), rel=MARGIN + 1e-6)


def test_of_equals_the_models_own_is_taken_and_else_the_shorter() -> None:
    tokens = {8: 5.0, 16: 5.0, 32: 5.0}
    assert [aware(own, tokens, FLAT, 2048)(4) for own in (8, 16, 32)] == [8, 16, 32]
    assert aware(64, {64: 1.0} | tokens, FLAT, 2048)(4) == 8


def test_long_blocks_alone_and_short_ones_in_company_where_arithmetic_comes_to_bind() -> None:
    # Weights take 10 ms; from 100 positions on each takes 0.1 ms.
    told = StepPrices.of([(1, 0.01), (100, 0.01), (1000, 0.1)])
    choose = aware(16, {8: 4.3, 16: 5.7, 32: 6.6}, told, 2048)
    assert [choose(load) for load in (1, 2, 4, 8, 32)] == [32, 32, 16, 8, 8]


def test_each_length_goes_by_its_own_prices() -> None:
    tokens = {8: 4.0, 16: 5.0}
    dear = StepPrices.of([(1, 0.02), (1000, 0.02)])
    assert LoadAware(8, tokens, {8: FLAT, 16: dear}, 2048)(4) == 8
    assert LoadAware(8, tokens, {8: dear, 16: FLAT}, 2048)(4) == 16


ups_and_downs = st.lists(st.integers(1, 64), min_size=1, max_size=30)


@given(lengths, prices, ups_and_downs, st.data())
def test_a_steady_choice_changes_for_one_that_is_faster_by_the_margin_or_for_a_request_that_is_alone(
    tokens: dict[int, float], told: StepPrices, loads: list[int], data: st.DataObject
) -> None:
    choose = aware(data.draw(st.sampled_from(sorted(tokens))), tokens, told, 2048)
    steady, last = Steady(choose), choose.own
    for load in loads:
        taken = steady(load)
        if load == 1:
            assert taken == choose(1)
        elif taken != last:
            assert choose.rate(taken, load) > (1 + MARGIN) * choose.rate(last, load)
        else:
            assert all(choose.rate(each, load) <= (1 + MARGIN) * choose.rate(last, load) for each in tokens)
        last = taken


def test_a_load_that_wavers_about_a_boundary_keeps_its_length() -> None:
    told = StepPrices.of([(1, 0.01), (100, 0.01), (1000, 0.1)])
    choose = aware(16, {8: 4.3, 16: 5.7}, told, 2048)
    wavering = [7, 8, 7, 8, 7, 8]
    assert [choose(load) for load in wavering] == [16, 8, 16, 8, 16, 8]
    steady = Steady(choose)
    assert [steady(load) for load in wavering] == [16, 8, 8, 8, 8, 8]
    assert [steady(load) for load in (2, 8, 1)] == [16, 8, 16]


# --- measuring


class Priced:
    """A forward that takes its time by a rule, on a clock of its own."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self.now, self.plans, self._seconds = 0.0, list[Plan](), seconds

    def __call__(self, plan: Plan) -> Decision:
        self.plans.append(plan)
        self.now += self._seconds(plan.tokens)
        return Decision([], [], [], [])


def test_steps_are_measured_up_to_the_largest_that_comes() -> None:
    forward = Priced(lambda tokens: 0.002 + 1e-5 * tokens)
    told = measure_prices(forward, paper_spec(), CacheShape(4, 64), 130, clock=lambda: forward.now)
    assert max(plan.tokens for plan in forward.plans) == 128
    for tokens in (4, 100, 1000):
        assert told.of_step(tokens) == pytest.approx(0.002 + 1e-5 * tokens)


def test_nothing_is_measured_behind_a_step_that_is_dear() -> None:
    forward = Priced(lambda tokens: 0.01 * tokens)
    measure_prices(forward, paper_spec(), CacheShape(4, 64), 4096, clock=lambda: forward.now)
    assert max(plan.tokens for plan in forward.plans) == 16


def test_what_others_do_with_the_core_does_not_count_where_one_thread_does_all_the_work() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert clock_for(Placement(cpu, torch.float32, 1)) is time.thread_time
    for placement in (Placement(cpu, torch.float32, 2), Placement(gpu, torch.bfloat16, 1)):
        assert clock_for(placement) is time.perf_counter


@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 40))
def test_a_measured_step_stays_within_the_pages_that_there_are(block: int, page_size: int, pages: int) -> None:
    assume(page_size * pages >= block)
    plan = plan_of(paper_spec(block), CacheShape(page_size, pages), 3)
    (row,) = set(plan.rows)
    assert row.end <= page_size * pages and set(row.pages) <= set(range(pages)) and row.visible_end[-1] == row.end
    assert row.canvas is not None and any(row.canvas.masked)


# --- the engine


class Choosing(Bench):
    """A bench whose engine gives each newcomer a length by how many run together."""

    def __init__(self, choose: Callable[[int], int], rows: int = 8, **shape: Any) -> None:
        super().__init__(rows=rows, **shape)
        cache = CacheShape(shape.get("page_size", 4), shape.get("pages", 200))
        self.forward = PaperForward(cache.num_pages, cache.page_size)
        limits = BatchLimits(rows, shape.get("budget", 64))
        self.engine = Engine(self.spec, cache, limits, self.forward, make_text, choose_length=choose)

    def lengths(self, request: Generate) -> set[int | None]:
        return {delta.block_length for delta in self.deltas(request)}


def named(request: Generate, length: int) -> Generate:
    return request.model_copy(update={"block_length": length})


def by_load(load: int) -> int:
    return 8 if load < 3 else 2


free = st.builds(
    ask, st.lists(st.integers(0, 59), min_size=1, max_size=40), st.integers(1, 40), seed=st.integers(0, 50)
)


@given(st.lists(st.tuples(free, st.integers(0, 6)), min_size=1, max_size=8), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_requests_with_blocks_of_several_lengths_in_one_batch_are_answered_as_each_would_be_alone(
    arrivals: list[tuple[Generate, int]], rows: int
) -> None:
    bench = Choosing(by_load, rows=rows, budget=32)
    for moment in range(7):
        bench.step(Inbox(arrivals=[Arrival(request, 1) for request, at in arrivals if at == moment]))
    bench.run()
    for request, _ in arrivals:
        end = bench.end(request)
        assert isinstance(end, Finished) and end.usage.block_length in ((8,) if rows < 3 else (8, 2))
        check(bench, request, decode_alone(named(request, end.usage.block_length), bench.spec))
        assert bench.lengths(request) <= {end.usage.block_length}


def test_the_load_is_what_runs_and_waits_and_comes_but_no_more_than_there_are_rows() -> None:
    seen = list[int]()

    def choose(load: int) -> int:
        seen.append(load)
        return 4

    bench = Choosing(choose, rows=3)
    bench.step(Inbox(arrivals=[Arrival(ask([1, n], 20, ignore_eos=True), 1) for n in range(2)]))
    bench.step(Inbox(arrivals=[Arrival(ask([2, n], 20, ignore_eos=True), 1) for n in range(4)]))
    assert seen == [2, 2, 3, 3, 3, 3]


def test_the_models_own_length_is_not_recorded_and_the_end_tells_the_one_that_was_used() -> None:
    for choice, recorded in ((4, None), (8, 8)):
        bench = Choosing(lambda _, choice=choice: choice)
        request = ask([1, 2, 3], 20, ignore_eos=True)
        bench.run([request])
        end = bench.end(request)
        assert isinstance(end, Finished) and end.usage.block_length == choice
        assert bench.lengths(request) == {recorded}


@given(free, st.sampled_from([2, 3, 8]), st.integers(1, 30))
@settings(max_examples=80, deadline=None)
def test_whoever_resumes_a_request_keeps_the_length_that_was_chosen_for_it(
    request: Generate, length: int, steps: int
) -> None:
    first = Choosing(lambda _: length)
    first.step(Inbox(arrivals=[Arrival(request, 1)]))
    for _ in range(steps):
        first.step()
    log = first.events.get(request.id, [])
    if log and isinstance(log[-1], Finished):
        return
    seen = [event for event in log if isinstance(event, Delta)]
    # The next owner would choose another one, or chooses none at all.
    for second in (Choosing(lambda _: 5), Bench()):
        second.events[request.id] = list(seen)
        second.step(Inbox(arrivals=[Arrival(request, 2, resume_of(seen))]))
        second.run()
        used = length if seen else 5 if isinstance(second, Choosing) else 4
        check(second, request, decode_alone(named(request, used), second.spec))
        assert second.end(request).usage.block_length == used  # type: ignore[union-attr]


def test_a_request_that_was_begun_with_the_models_own_length_keeps_it() -> None:
    request = ask([1, 2, 3], 30, ignore_eos=True)
    first = Bench()
    first.run([request])
    seen = first.deltas(request)[:2]
    second = Choosing(lambda _: 8)
    second.events[request.id] = list(seen)
    second.step(Inbox(arrivals=[Arrival(request, 2, resume_of(seen))]))
    second.run()
    check(second, request)
    assert second.lengths(request) == {None}


def test_texts_of_different_block_lengths_do_not_share_pages() -> None:
    choices = iter([2, 4, 2])
    bench = Choosing(lambda _: next(choices), page_size=4)
    prompt = list(range(20))
    cached = list[int]()
    for length in (2, 4, 2):
        request = ask(prompt, 8, ignore_eos=True)
        bench.run([request])
        check(bench, request, decode_alone(named(request, length), bench.spec))
        end = bench.end(request)
        assert isinstance(end, Finished)
        cached.append(end.usage.cached_tokens)
    assert cached == [0, 0, 20]


PLAIN = Generate(id="r", model="paper", prompt=(1, 2))


@pytest.mark.parametrize(
    ("change", "left"),
    [
        ({}, True),
        ({"decoding": Threshold(threshold=0.7)}, True),
        ({"decoding": Threshold(threshold=0.8)}, False),
        ({"decoding": Sequential()}, False),
        ({"block_length": 4}, False),
        ({"template": (-1, 5)}, False),
        ({"draft": (5, 6)}, False),
        ({"constraint": Regex(pattern="a")}, False),
        ({"embed": True}, False),
        ({"cfg_scale": 1.0}, False),
        ({"limits": Limits(max_nfe=9)}, False),
    ],
)
def test_only_requests_that_are_decoded_as_was_measured_leave_the_choice(change: dict[str, Any], left: bool) -> None:
    assert leaves_choice(PLAIN.model_copy(update=change), paper_spec()) is left


@pytest.mark.parametrize("change", [{"block_length": 0}, {"fixed_block_length": True}])
def test_a_model_with_one_block_length_has_no_choice(change: dict[str, Any]) -> None:
    assert can_choose(paper_spec()) and not can_choose(replace(paper_spec(), **change))
