"""Denoise steps that the device runs by itself, each one captured graph.

The canvases live in one tensor (`kernels.canvas`). A step reads its input from there, runs the forward, accepts, moves
the rows on, and copies its answer to pinned memory behind itself. So a step can be launched while the one before it
still runs, and the host reads every answer one step late.
"""

from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

import kernels
from kernels.attention import AttentionPlan, RowGroup, plan_attention
from kernels.canvas import Field, Layout, Query
from kernels.token_stats import Noise
from worker.models import LoadedModel
from worker.models.layers import ForwardContext

_KEPT_ANSWERS = 4
"""Answers that may be waiting to be read; a step's own is overwritten that many steps later."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a step has decided, on its way to the host."""

    values: Tensor
    """[rows, 3, block] int32, pinned; see `kernels.canvas.canvas_advance`."""
    after: Tensor
    """[rows, columns before the page numbers] int64, pinned: the state that the step has left behind."""
    written: torch.cuda.Event | None

    def read(self) -> Tensor:
        """Wait until the step has ended; return its values."""
        if self.written is not None:
            self.written.synchronize()
        return self.values


class StepGraphs:
    """The steps of one block length for up to `max_rows` rows, captured for some numbers of rows.

    Row r of the state belongs to whoever put it there. Steps are paired or not as the layout says, unless a call says
    otherwise. All methods are called from one thread.
    """

    def __init__(
        self,
        model: LoadedModel,
        kv: tuple[tuple[Tensor, Tensor], ...],
        barred: Tensor,
        filler_ids: Tensor,
        layout: Layout,
        max_rows: int,
    ) -> None:
        self.layout = layout
        self._model = model
        self._kv = kv
        self._barred = barred
        self._filler_ids = filler_ids
        device = model.device
        self._on_gpu = device.type == "cuda"
        self.state = torch.zeros((max_rows, layout.width), dtype=torch.int64, device=device)
        self.state[:, layout.table] = layout.scratch
        shape = (_KEPT_ANSWERS, max_rows, 3, layout.block)
        self._answers = torch.zeros(shape, dtype=torch.int32, pin_memory=self._on_gpu)
        told = (_KEPT_ANSWERS, max_rows, layout.table.start)
        self._after = torch.zeros(told, dtype=torch.int64, pin_memory=self._on_gpu)
        self._written = [torch.cuda.Event() if self._on_gpu else None for _ in range(_KEPT_ANSWERS)]
        self._launched = 0
        block = layout.block
        self._layouts = {paired: replace(layout, paired=paired) for paired in (False, True)}
        numbers = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._offsets = {paired: numbers * each.query for paired, each in self._layouts.items()}
        self._within = torch.arange(block, device=device)
        self._each = torch.arange(max_rows * block, device=device)
        self._plain = torch.ones(max_rows * block, device=device)
        # Of two blocks only the second is decided.
        self._wanted = (torch.arange(max_rows, device=device)[:, None] * 2 * block + block + self._within).view(-1)
        self._graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    @torch.inference_mode()
    def capture(self, sizes: ReadOnly[int], paired: bool | None = None) -> None:
        """Capture steps of these numbers of rows, the largest first, so that the smaller ones find its memory."""
        if not self._on_gpu:
            return
        paired = self.layout.paired if paired is None else paired
        for rows in sorted(sizes, reverse=True):
            # Before a capture everything runs once: compilers, handles and workspaces are then in place.
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                kept = self.state.clone()
                self._step(rows, paired)
                self.state.copy_(kept)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            pool = next(iter(self._graphs.values()))[0].pool() if self._graphs else None
            with torch.cuda.graph(graph, pool=pool):
                answer = self._step(rows, paired)
            self._graphs[rows, paired] = graph, answer

    def measure(self, rows: int, paired: bool) -> float | None:
        """Return the ms that a captured step of resting rows takes; None if it is not captured."""
        captured = self._graphs.get((rows, paired))
        if captured is None:
            return None
        times: list[float] = []
        for _ in range(3):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            captured[0].replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return median(times)

    @torch.inference_mode()
    def put(self, row: int, values: ReadOnly[int]) -> None:
        """Replace a row's state [width], in order with the steps launched before and after."""
        fresh = torch.tensor(values, dtype=torch.int64, pin_memory=self._on_gpu)
        self.state[row].copy_(fresh, non_blocking=True)

    @torch.inference_mode()
    def renumber(self, row: int, pages: ReadOnly[int]) -> None:
        """Replace a row's page numbers; behind the last come those of the scratch page."""
        table = [*pages, *[self.layout.scratch] * (self.layout.pages - len(pages))]
        fresh = torch.tensor(table, dtype=torch.int64, pin_memory=self._on_gpu)
        self.state[row, self.layout.table].copy_(fresh, non_blocking=True)

    @torch.inference_mode()
    def rest(self, row: int) -> None:
        """Let a row decide nothing more."""
        self.state[row, Field.LIVE].zero_()

    @torch.inference_mode()
    def move(self, row: int, to: int) -> None:
        """Let a row go on in another place, and rest in this one."""
        self.state[to].copy_(self.state[row])
        self.rest(row)

    @torch.inference_mode()
    def launch(self, rows: int, paired: bool | None = None) -> Answer:
        """Run one step of rows [0, rows); return its answer without waiting for it."""
        paired = self.layout.paired if paired is None else paired
        captured = self._graphs.get((rows, paired))
        if captured is None:
            answer = self._step(rows, paired)
        else:
            captured[0].replay()
            answer = captured[1]
        place = self._launched % _KEPT_ANSWERS
        self._launched += 1
        values, written = self._answers[place, :rows], self._written[place]
        after = self._after[place, :rows]
        values.copy_(answer, non_blocking=True)
        after.copy_(self.state[:rows, : self.layout.table.start], non_blocking=True)
        if written is not None:
            written.record()
        return Answer(values, after, written)

    def _step(self, rows: int, paired: bool) -> Tensor:
        state, layout = self.state[:rows], self._layouts[paired]
        query = kernels.canvas_query(state, layout)
        context = ForwardContext(self._plan(rows, query, layout), query.positions, self._kv)
        wanted = self._wanted[: rows * layout.block] if layout.paired else None
        hidden = self._model.module.forward(query.token_ids, context, wanted)
        logits = self._model.module.logits(hidden)
        temperature, noise = self._draws(state)
        plain = self._plain[: len(temperature)]
        found = kernels.token_stats(logits, temperature, self._barred, noise=noise, ranking=plain)
        return kernels.canvas_advance(
            state,
            layout,
            found.token,
            found.confidence,
            found.finite,
            self._filler_ids,
            self._model.spec.mask_token_id,
        )

    def _draws(self, state: Tensor) -> tuple[Tensor, Noise]:
        """Return how the positions of the active blocks are drawn: [rows * block] each."""
        count = state.shape[0] * self.layout.block
        warmth = state[:, Field.TEMPERATURE].int().view(torch.float32)
        warmth = torch.where(warmth == 0, 1.0, warmth)

        def spread(values: Tensor) -> Tensor:
            return values[:, None].expand(-1, self.layout.block).reshape(count).contiguous()

        noise = Noise(
            rows=self._each[:count],
            seed=spread(state[:, Field.SEED]),
            position=(state[:, Field.START, None] + self._within).view(count),
            step=spread(state[:, Field.STEP]),
            drawn=spread(state[:, Field.DRAWS]) != 0,
        )
        return spread(warmth), noise

    def _plan(self, rows: int, query: Query, layout: Layout) -> AttentionPlan:
        if not self._on_gpu:
            return _reference_plan(query, rows, layout, self._model.dtype)
        tokens, reach = rows * layout.query, layout.pages * layout.page_size
        return AttentionPlan(
            slots=query.slots,
            row_offsets=self._offsets[layout.paired][: rows + 1],
            visible_end=query.visible_end,
            page_table=query.page_table,
            # The kernel needs no more of its groups than the longest query.
            groups=(RowGroup(slice(0, tokens), slice(0, 0), rows, layout.query, reach, None),),
        )


def _reference_plan(query: Query, rows: int, layout: Layout, dtype: torch.dtype) -> AttentionPlan:
    """Return a plan with the groups that the reference needs, which are facts on the host."""
    ends = query.visible_end.view(rows, -1).tolist()
    plan = plan_attention(
        query.positions.view(rows, -1)[:, 0].tolist(),
        ends,
        query.page_table.tolist(),
        layout.page_size,
        device=query.slots.device,
        dtype=dtype,
    )
    return replace(plan, slots=query.slots)
