"""What steps take whose rows the device leads: each number of rows is timed as it runs, and leaves nothing behind."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.fleet.models import write_tiny_model
from tests.worker.test_ahead import DEVICE, make_engine, run
from tests.worker.test_lanes import BUDGET, MAX_LEN, PAGE, PAGES, a_load, led, plain
from worker.engine.plan import Plan
from worker.engine.ports import Decision, Forward
from worker.engine.scheduler import BatchLimits, CacheShape
from worker.led_prices import LedSteps
from worker.models import LoadedModel, load_model

LENGTHS = (4, 8, 16)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    loaded = load_model(write_tiny_model(tmp_path_factory.mktemp("model")), device=DEVICE)
    return replace(loaded, spec=replace(loaded.spec, max_model_len=MAX_LEN))


class Clocked:
    """A forward whose steps take their time by a rule, on a clock of its own."""

    def __init__(self, forward: Forward, seconds: Callable[[Plan], float]) -> None:
        self.now, self.plans, self._forward, self._seconds = 0.0, list[Plan](), forward, seconds

    def __call__(self, plan: Plan) -> Decision:
        self.plans.append(plan)
        self.now += self._seconds(plan)
        return self._forward(plan)


def steps(
    forward: Clocked, model: LoadedModel, length: int, rows: int, budget: int = 400, pages: int = PAGES
) -> LedSteps:
    limits = BatchLimits(rows, budget, pages_ahead=True)
    return LedSteps(forward, model.spec, CacheShape(PAGE, pages), limits, length, lambda: forward.now)


@pytest.mark.parametrize("length", LENGTHS)
def test_steps_are_told_as_long_as_those_that_follow_each_other_whatever_comes_before_them(model, length):
    def seconds(plan: Plan) -> float:
        # A prompt, and what has to be put there first, is much dearer.
        prompt = any(row.canvas is None or len(row.token_ids) > 2 * length for row in plan.rows)
        return 1.0 if prompt else 0.002 + 1e-4 * plan.tokens

    runner, lanes = led(model, 8, lengths=LENGTHS)
    forward = Clocked(runner, seconds)
    told = steps(forward, model, length, 8).prices()
    assert told.positions[0] >= length and told.positions[-1] >= 8 * length
    for tokens in (2 * length, 4 * length, 8 * length, 1000):
        assert told.of_step(tokens) == pytest.approx(0.002 + 1e-4 * tokens, rel=0.02)
    # All rows were led, each for itself, and nearly all steps were those that the device had begun.
    (lane,) = (lane for lane in lanes.values() if lane.asked)
    assert lane is lanes[length] and lane.postponed < 0.1 * lane.asked
    assert max(len({row.request_id for row in plan.rows}) for plan in forward.plans) == 8


def test_no_more_rows_are_timed_together_than_budget_and_pages_hold_with_a_finished_block_each(model):
    runner, _ = led(model, 8, lengths=LENGTHS)
    forward = Clocked(runner, lambda plan: 0.001)
    assert steps(forward, model, 16, rows=8, budget=400).most == 8
    assert steps(forward, model, 16, rows=8, budget=100).most == 3
    tight = steps(forward, model, 16, rows=8, pages=12)
    tight.prices()
    assert tight.most == max(len(plan.rows) for plan in forward.plans) == 2


def test_nothing_is_timed_behind_a_step_that_is_dear(model):
    runner, _ = led(model, 8, lengths=LENGTHS)
    forward = Clocked(runner, lambda plan: 0.03 * len(plan.rows))
    steps(forward, model, 4, rows=8).prices()
    assert max(len(plan.rows) for plan in forward.plans) == 2


@pytest.mark.parametrize("seed", range(2))
def test_requests_that_come_after_the_measuring_get_the_tokens_of_the_plain_runner(model, seed):
    waves = a_load(seed, 12, (None, *LENGTHS))
    expected = run(make_engine(model, plain(model), PAGES, 6, BUDGET, ahead=False, page_size=PAGE), waves)
    runner, _ = led(model, 6, lengths=LENGTHS)
    forward = Clocked(runner, lambda plan: 0.001)
    for length in random.Random(seed).sample(LENGTHS, len(LENGTHS)):
        steps(forward, model, length, 6).prices()
    assert run(make_engine(model, runner, PAGES, 6, BUDGET, page_size=PAGE), waves) == expected
