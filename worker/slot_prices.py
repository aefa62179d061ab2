"""What captured steps take on this device, by rows, slots and room: measured before any request is there."""

from collections.abc import Mapping
from collections.abc import Sequence as ReadOnly

from worker.foresight import Prices
from worker.graphs import StepGraphs

_ROUNDS = 4
_REACH = 1024
"""Positions that rows see when it is measured what they take."""


def measure_slots(
    graphs: StepGraphs, slots: Mapping[int, ReadOnly[int]], room: Mapping[int, ReadOnly[int]]
) -> dict[int, Prices]:
    """Return the prices of steps by their number of rows; `slots` and `room` tell with what each is captured. Numbers
    of rows of which nothing is captured have none.

    Of each step counts the best of some tries, which are made in rounds: another process that uses the device for a
    moment then meets one try of each step, not all of one, which would look dear beside the others.
    """
    layers, heads, far = dict[tuple[int, int], float](), dict[tuple[int, int], float](), dict[tuple[int, int], float]()
    reach = _reach(graphs)
    for _ in range(_ROUNDS):
        for rows, sizes in slots.items():
            for count in sizes:
                _note(layers, (rows, count), graphs.measure(rows, count))
            if len(sizes) > 1 and reach:
                _note(far, (rows, min(sizes)), graphs.measure(rows, min(sizes), reach))
        for rows, sizes in room.items():
            for count in sizes:
                _note(heads, (rows, count), graphs.measure_head(rows, count))
    found: dict[int, Prices] = {}
    for rows, sizes in slots.items():
        fewest = (rows, min(sizes))
        keys = max(0.0, far[fewest] - layers[fewest]) / (rows * reach) if fewest in far else 0.0
        known = Prices(_of(rows, layers), _of(rows, heads), keys)
        if known.layers and known.head:
            found[rows] = known
    return found


def _reach(graphs: StepGraphs) -> int:
    """Return how many positions rows can see in a measurement; 0: not even a block."""
    layout = graphs.layout
    reach = min(_REACH, layout.pages * layout.page_size - 2 * layout.block)
    return reach if reach >= layout.block else 0


def _note(best: dict[tuple[int, int], float], step: tuple[int, int], ms: float | None) -> None:
    if ms is not None:
        best[step] = min(ms, best.get(step, ms))


def _of(rows: int, measured: Mapping[tuple[int, int], float]) -> dict[int, float]:
    return {count: ms for (of, count), ms in measured.items() if of == rows}
