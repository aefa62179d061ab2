"""A card that is not there: steps decide in no time, and the host waits for as long as an H100 takes for SDAR-8B.

For what surrounds the steps. The times are those of `docs/benchmarks/2026-11-28-h100/tenth-serving.jsonl`, with lines
between them; the tokens mean nothing.
"""

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

import kernels
import worker.lanes
import worker.runners
from kernels.canvas import Field, Layout
from worker.ahead import layout_of
from worker.engine.plan import Plan
from worker.engine.ports import Decision
from worker.graphs import Answer, Recorder, StepGraphs
from worker.runner import Runner

_LAYERS = ((1, 5.17), (2, 5.3), (4, 5.8), (8, 6.62), (16, 10.2), (32, 18.3), (64, 37.5))
"""Rows, ms."""
_SLOTS = ((0.0, 0.0), (0.125, 0.24), (0.25, 0.35), (0.5, 0.66), (1.0, 1.1))
"""Slots over rows; what they add to the layers, as a part of those."""
_HEAD = 0.35, 0.0018
"""ms, and for each masked position there is room for."""
_KEY = 0.15e-3
"""ms for each position that a row sees before its block."""
_PROMPT = 8.0, 0.023
"""ms of a forward that was not captured, and for each token."""


def _between(points: Sequence[tuple[float, float]], x: float) -> float:
    at = min(max(1, bisect_left([each for each, _ in points], x)), len(points) - 1)
    (left, low), (right, high) = points[at - 1], points[at]
    return low + (high - low) * (x - left) / (right - left)


def layers_ms(rows: int, slots: int, seen: int) -> float:
    alone = _between(_LAYERS, rows)
    return alone * (1 + _between(_SLOTS, slots / rows)) + _KEY * seen


def head_ms(room: int) -> float:
    first, each = _HEAD
    return first + each * room


@dataclass
class Card:
    """Does one thing after the other, each as soon as it was asked for and the one before has ended."""

    free_at: float = 0.0

    def work(self, ms: float) -> float:
        """Return when work that is asked for now will have ended, s."""
        self.free_at = max(time.perf_counter(), self.free_at) + ms / 1e3
        return self.free_at


def wait_until(moment: float) -> None:
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)


@dataclass(frozen=True, slots=True)
class Later(Answer):
    ready_at: float = field(default=0.0)

    def read(self) -> torch.Tensor:
        wait_until(self.ready_at)
        return self.values


class EmulatedRunner(Runner):
    """Writes nothing; for the chunks of prompts."""

    def __init__(self, *args: object, **others: object) -> None:
        super().__init__(*args, **others)  # pyright: ignore[reportArgumentType]
        self.card = Card()

    def __call__(self, plan: Plan) -> Decision:
        if any(row.canvas is not None for row in plan.rows):
            raise ValueError("the emulated card decides in captured steps only")
        first, each = _PROMPT
        self.card.work(first + each * sum(len(row.token_ids) for row in plan.rows))
        return Decision.open(len(plan.rows))


class EmulatedGraphs(StepGraphs):
    """Every row accepts what its rule allows, of tokens and confidences that stay the same."""

    def __init__(self, runner: EmulatedRunner, layout: Layout, max_rows: int, recorder: Recorder | None) -> None:
        super().__init__(runner.model, runner.kv, runner.barred, runner.filler_ids, layout, max_rows, recorder=recorder)
        self._card = runner.card
        positions = max_rows * layout.block
        self._token = torch.arange(positions) % 900
        self._confidence, self._finite = torch.rand(positions), torch.ones(positions, dtype=torch.bool)

    def measure(self, rows: int, slots: int, reach: int = 0) -> float:
        return layers_ms(rows, slots, rows * reach)

    def measure_head(self, rows: int, room: int) -> float:
        return head_ms(room)

    @torch.inference_mode()
    def launch(self, rows: int, slots: int = 0, room: int | None = None, adapted: bool = False) -> Answer:
        state, layout = self.state[:rows], self.layout
        room = rows * layout.block if room is None else room
        live = state[:, Field.LIVE] != 0
        seen = int((state[:, Field.START] * live).sum())
        waiting = live & (state[:, Field.COMMIT] != 0)
        decides = (live & ~(waiting & (waiting.cumsum(0) > slots))).int()
        wanted = kernels.canvas_wanted(state, layout, decides, room)
        values = kernels.canvas_advance(
            state,
            layout,
            wanted.decides,
            wanted.places,
            self._token[:room],
            self._confidence[:room],
            self._finite[:room],
            self._filler_ids,
            self._model.spec.mask_token_id,
        )
        ready_at = self._card.work(layers_ms(rows, slots, seen) + head_ms(room))
        return Later(values, state[:, : layout.table.start].clone(), None, ready_at)


def use_emulated_card() -> None:
    """Let this process run its steps on the card that is not there."""

    def make_graphs(
        runner: Runner, max_rows: int, length: int | None = None, recorder: Recorder | None = None
    ) -> StepGraphs:
        assert isinstance(runner, EmulatedRunner)
        return EmulatedGraphs(runner, layout_of(runner, length), max_rows, recorder)

    worker.runners.Runner = EmulatedRunner  # pyright: ignore[reportPrivateImportUsage]
    worker.lanes.make_graphs = make_graphs  # pyright: ignore[reportPrivateImportUsage]
