"""Captured steps on all ranks: each has the canvases and its own graphs, and rank 0 says what is launched."""

from collections.abc import Sequence as ReadOnly
from dataclasses import asdict
from typing import Any

from kernels.canvas import Layout
from worker.graphs import Answer, Recorder, StepGraphs
from worker.parallel.messages import Graphs, OnGraphs
from worker.runner import Runner

LED = frozenset(
    {"capture", "capture_head", "tidy", "measure", "measure_head", "put", "renumber", "rest", "move", "launch"}
)
"""Methods that every rank runs: all that touch the device."""


class LedGraphs(StepGraphs):
    """Rank 0's own: whatever it does, the others have been told to do."""

    def __init__(self, runner: Runner, layout: Layout, max_rows: int, recorder: Recorder | None = None) -> None:
        lead = runner.model.lead
        assert lead is not None
        self._lead = lead
        super().__init__(runner.model, runner.kv, runner.barred, runner.filler_ids, layout, max_rows, recorder=recorder)
        lead.tell(Graphs(self._number, asdict(layout), max_rows))

    def _told(self, method: str, *arguments: Any) -> None:
        self._lead.tell(OnGraphs(self._number, method, arguments))

    def capture(self, rows: int, slots: int, adapted: bool = False) -> None:
        self._told("capture", rows, slots, adapted)
        super().capture(rows, slots, adapted)

    def capture_head(self, rows: int, room: int) -> None:
        self._told("capture_head", rows, room)
        super().capture_head(rows, room)

    def tidy(self) -> None:
        self._told("tidy")
        super().tidy()

    def measure(self, rows: int, slots: int, reach: int = 0) -> float | None:
        self._told("measure", rows, slots, reach)
        return super().measure(rows, slots, reach)

    def measure_head(self, rows: int, room: int) -> float | None:
        self._told("measure_head", rows, room)
        return super().measure_head(rows, room)

    def put(self, row: int, values: ReadOnly[int]) -> None:
        self._told("put", row, [*values])
        super().put(row, values)

    def renumber(self, row: int, pages: ReadOnly[int]) -> None:
        self._told("renumber", row, [*pages])
        super().renumber(row, pages)

    def rest(self, row: int) -> None:
        self._told("rest", row)
        super().rest(row)

    def move(self, row: int, to: int) -> None:
        self._told("move", row, to)
        super().move(row, to)

    def launch(self, rows: int, slots: int = 0, room: int | None = None, adapted: bool = False) -> Answer:
        self._told("launch", rows, slots, room, adapted)
        return super().launch(rows, slots, room, adapted)
