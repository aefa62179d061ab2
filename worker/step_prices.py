"""What steps take on this device, measured by running some on pages that nobody uses yet."""

import time
from collections.abc import Callable

from shared.commands import Sampling
from worker.device import Placement
from worker.engine.load_aware import StepPrices
from worker.engine.plan import Canvas, Plan, Row, visible_ends
from worker.engine.ports import Forward
from worker.engine.scheduler import CacheShape
from worker.models.spec import ModelSpec

CONTEXT = 128
"""Positions before the block, about those of a short chat."""
_DEAR_S = 0.1
"""Behind a step that takes so long no larger one is tried: prices grow evenly there."""
_ROUNDS = 5

Clock = Callable[[], float]
"""Seconds."""


def clock_for(placement: Placement) -> Clock:
    """Return what tells a step's time: where one thread does all the work its CPU time, which does not pass while
    somebody else has the core."""
    alone = placement.device.type == "cpu" and placement.threads == 1
    return time.thread_time if alone else time.perf_counter


def measure_prices(
    forward: Forward,
    spec: ModelSpec,
    cache: CacheShape,
    most: int,
    clock: Clock = time.perf_counter,
) -> StepPrices:
    """Time steps of one block, two, four, and so on up to `most` positions; of each the best of several rounds.

    All rows write to the same pages, the first ones: what is in them afterwards is worth nothing.
    """
    block = spec.block_length
    plans: list[Plan] = []
    price = 0.0
    while price < _DEAR_S and (not plans or len(plans[-1].rows) * 2 * block <= most):
        plans.append(plan_of(spec, cache, len(plans[-1].rows) * 2 if plans else 1))
        forward(plans[-1])
        price = _seconds(forward, plans[-1], clock)
    # In rounds, so that a slow moment of the machine meets one try of each size and not all tries of one.
    measured = [(plan.tokens, _seconds(forward, plan, clock)) for _ in range(_ROUNDS) for plan in plans]
    return StepPrices.of(measured)


def plan_of(spec: ModelSpec, cache: CacheShape, rows: int) -> Plan:
    """Return a step of rows that are half-way through a block of the model's own length."""
    block = spec.block_length
    room = min(cache.page_size * cache.num_pages, spec.max_model_len) - block
    start = max(0, min(CONTEXT, room)) // block * block
    end = start + block
    canvas = Canvas(
        start=start,
        masked=tuple(index >= block // 2 for index in range(block)),
        step=1,
        last=False,
        sampling=Sampling(),
        decoding=spec.decoding,
        stop_token_ids=spec.stop_token_ids,
        undecided_at_first=block,
        limit=end,
    )
    row = Row(
        request_id="",
        start=start,
        token_ids=(spec.mask_token_id,) * block,
        visible_end=visible_ends(spec.attention, start, end, block, end),
        pages=tuple(range(-(-end // cache.page_size))),
        canvas=canvas,
    )
    return Plan((row,) * rows)


def _seconds(forward: Forward, plan: Plan, clock: Clock) -> float:
    began = clock()
    forward(plan)
    return clock() - began
