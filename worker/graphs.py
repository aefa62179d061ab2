"""Denoise steps that the device runs by itself, each one captured graph.

The canvases live in one tensor (`kernels.canvas`). A step reads its input from there, runs the forward, accepts, moves
the rows on, and copies its answer to pinned memory behind itself. So a step can be launched while the one before it
still runs, and the host reads every answer one step late.
"""

from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import kernels
from kernels.attention import AttentionPlan, RowGroup, plan_attention
from kernels.canvas import Layout, Query
from worker.models import LoadedModel
from worker.models.layers import ForwardContext

_KEPT_ANSWERS = 4
"""Answers that may be waiting to be read; a step's own is overwritten that many steps later."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a step has decided, on its way to the host."""

    values: Tensor
    """[rows, 3, block] int32, pinned; see `kernels.canvas.canvas_advance`."""
    written: torch.cuda.Event | None

    def read(self) -> Tensor:
        """Wait until the step has ended; return its values."""
        if self.written is not None:
            self.written.synchronize()
        return self.values


class StepGraphs:
    """The steps of one block length for up to `max_rows` rows, captured for some numbers of rows.

    Row r of the state belongs to whoever put it there. All methods are called from one thread.
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
        self._written = [torch.cuda.Event() if self._on_gpu else None for _ in range(_KEPT_ANSWERS)]
        self._launched = 0
        self._offsets = torch.arange(0, max_rows * layout.query + 1, layout.query, dtype=torch.int32, device=device)
        within = torch.arange(layout.query - layout.block, layout.query, device=device)
        self._wanted = (torch.arange(max_rows, device=device)[:, None] * layout.query + within).view(-1)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    @torch.inference_mode()
    def capture(self, sizes: ReadOnly[int]) -> None:
        """Capture steps of these numbers of rows, the largest first, so that the smaller ones find its memory."""
        if not self._on_gpu:
            return
        for rows in sorted(sizes, reverse=True):
            # Before a capture everything runs once: compilers, handles and workspaces are then in place.
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                kept = self.state.clone()
                self._step(rows)
                self.state.copy_(kept)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            pool = next(iter(self._graphs.values()))[0].pool() if self._graphs else None
            with torch.cuda.graph(graph, pool=pool):
                answer = self._step(rows)
            self._graphs[rows] = graph, answer

    @torch.inference_mode()
    def put(self, row: int, values: ReadOnly[int]) -> None:
        """Replace a row's state [width], in order with the steps launched before and after."""
        fresh = torch.tensor(values, dtype=torch.int64, pin_memory=self._on_gpu)
        self.state[row].copy_(fresh, non_blocking=True)

    @torch.inference_mode()
    def launch(self, rows: int) -> Answer:
        """Run one step of rows [0, rows); return its answer without waiting for it."""
        captured = self._graphs.get(rows)
        if captured is None:
            answer = self._step(rows)
        else:
            captured[0].replay()
            answer = captured[1]
        place = self._launched % _KEPT_ANSWERS
        self._launched += 1
        values, written = self._answers[place, :rows], self._written[place]
        values.copy_(answer, non_blocking=True)
        if written is not None:
            written.record()
        return Answer(values, written)

    def _step(self, rows: int) -> Tensor:
        state, layout = self.state[:rows], self.layout
        query = kernels.canvas_query(state, layout)
        context = ForwardContext(self._plan(rows, query), query.positions, self._kv)
        wanted = self._wanted[: rows * layout.block] if layout.paired else None
        hidden = self._model.module.forward(query.token_ids, context, wanted)
        found = kernels.token_stats(self._model.module.logits(hidden), barred=self._barred)
        return kernels.canvas_advance(
            state,
            layout,
            found.token,
            found.confidence,
            found.finite,
            self._filler_ids,
            self._model.spec.mask_token_id,
        )

    def _plan(self, rows: int, query: Query) -> AttentionPlan:
        layout = self.layout
        if not self._on_gpu:
            return _reference_plan(query, rows, layout, self._model.dtype)
        tokens, reach = rows * layout.query, layout.pages * layout.page_size
        return AttentionPlan(
            slots=query.slots,
            row_offsets=self._offsets[: rows + 1],
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
