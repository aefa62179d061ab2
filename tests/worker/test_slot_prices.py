"""Prices of captured steps, by a device that somebody else uses now and then."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from worker.graphs import StepGraphs
from worker.slot_prices import measure_slots

SLOTS = {8: [0, 1, 8], 32: [0, 4, 32]}
ROOM = {8: [256], 32: [512, 1024]}


class Device:
    """A step takes what its positions do, ten times as much while it is disturbed."""

    def __init__(self, disturbed: range = range(0)) -> None:
        self.layout = SimpleNamespace(block=32, pages=64, page_size=32)
        self.disturbed = disturbed
        self.calls = 0

    def measure(self, rows: int, slots: int, reach: int = 0) -> float:
        return self._take((rows + slots) * (1.0 + reach / 1024))

    def measure_head(self, rows: int, room: int) -> float:
        return self._take(room / 256)

    def _take(self, ms: float) -> float:
        self.calls += 1
        return 10 * ms if self.calls - 1 in self.disturbed else ms


def graphs(device: object) -> StepGraphs:
    return cast(StepGraphs, device)


def test_a_step_costs_what_it_takes_where_nothing_else_runs():
    prices = measure_slots(graphs(Device()), SLOTS, ROOM)
    assert prices[8].layers == {0: 8.0, 1: 9.0, 8: 16.0} and prices[32].layers == {0: 32.0, 4: 36.0, 32: 64.0}
    assert prices[32].head == {512: 2.0, 1024: 4.0}
    assert prices[32].keys == pytest.approx(32 / (32 * 1024))


@pytest.mark.parametrize("first", range(0, 40, 3))
def test_what_disturbs_the_device_for_a_moment_makes_no_step_look_dear(first: int):
    quiet = measure_slots(graphs(Device()), SLOTS, ROOM)
    assert measure_slots(graphs(Device(range(first, first + 8))), SLOTS, ROOM) == quiet


def test_rows_that_are_not_captured_have_no_price():
    class Bare(Device):
        def measure(self, rows: int, slots: int, reach: int = 0) -> Any:
            return None if rows == 8 else super().measure(rows, slots, reach)

    assert measure_slots(graphs(Bare()), SLOTS, ROOM).keys() == {32}
