"""Denoise steps that the device runs by itself, each one captured graph.

The canvases live in one tensor (`kernels.canvas`). A step reads its input from there, runs the forward, accepts, moves
the rows on, and copies its answer to pinned memory behind itself. So a step can be launched while the one before it
still runs, and the host reads every answer one step late.

A step has two graphs, one behind the other: the layers, by the number of slots for finished blocks, and the head with
what follows, by the room for masked positions. So any number of the one goes with any of the other. What the last layer
does to each position by itself, behind its attention, is done with the head, where only masked positions have to be.
"""

from collections.abc import Callable
from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

import kernels
from kernels.attention import AttentionPlan, RowGroup, plan_attention
from kernels.canvas import Field, Layout, Query
from kernels.token_stats import Noise
from worker.adapters.bank import AdapterBank
from worker.draws import Draws
from worker.foresight import WHOLE
from worker.models import LoadedModel
from worker.models.layers import Decoder, ForwardContext, LowRank, Pages
from worker.parallel.proposing import propose, share_of

Captured = TypeVar("Captured")

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


class Recorder:
    """Captures graphs in one memory: they run one after the other, and nothing that outlives a run lies there but the
    answers, which are held."""

    def __init__(self, device: torch.device) -> None:
        # One for all: what a stream has freed is only found by itself again.
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._first: torch.cuda.CUDAGraph | None = None
        self._members = 0

    def join(self) -> int:
        """Return the number of another one whose steps are captured here: 0, 1 and so on."""
        self._members += 1
        return self._members - 1

    @torch.inference_mode()
    def record(self, work: Callable[[], Captured], state: Tensor, mode: str) -> tuple[torch.cuda.CUDAGraph, Captured]:
        """Return the graph of `work`, and what it returned; `state` is what it changes, and stays as it is."""
        # Before a capture everything runs once: compilers, handles and workspaces are then in place.
        side = self._side
        assert side is not None
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            kept = state.clone()
            work()
            state.copy_(kept)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        pool = None if self._first is None else self._first.pool()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode=mode):
            found = work()
        self._first = self._first or graph
        return graph, found


class StepGraphs:
    """The steps of one block length for up to `max_rows` rows, captured for some numbers of rows, slots and room.

    Row r of the state belongs to whoever put it there. All methods are called from one thread.
    """

    def __init__(
        self,
        model: LoadedModel,
        kv: tuple[Pages, ...],
        barred: Tensor,
        filler_ids: Tensor,
        layout: Layout,
        max_rows: int,
        bank: AdapterBank | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """`bank` has the adapters that steps may run under; `recorder` captures those of other block lengths too."""
        self.layout = layout
        self.bank = bank
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
        # What the layers hand to the head.
        positions = max_rows * layout.block
        self._hidden = torch.zeros((positions, model.spec.hidden_size), dtype=model.dtype, device=device)
        self._gathered: Tensor | None = None
        """Where it is kept, `_hidden` is the residual stream beside it; see `Decoder.begin`."""
        # Adapters are assigned to all positions, and what ranks exchange in each half of a step stays as it is.
        if isinstance(model.module, Decoder) and bank is None and positions > WHOLE:
            *_, last = model.module.layers
            if last.peers is None:
                gathered = (positions, last.attention.out.weight.shape[1])
                self._gathered = torch.zeros(gathered, dtype=model.dtype, device=device)
        self._decides = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._plain = torch.ones(max_rows * layout.block, device=device)
        self._layers: dict[tuple[int, int, bool], torch.cuda.CUDAGraph] = {}
        self._heads: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._recorder = recorder or Recorder(device)
        self._number = self._recorder.join()

    @property
    def kept_bytes(self) -> int:
        """What it holds on the device beside what its steps allocate."""
        return self.state.nbytes + self._hidden.nbytes + (0 if self._gathered is None else self._gathered.nbytes)

    def capture(self, rows: int, slots: int, adapted: bool = False) -> None:
        """Capture the layers of a step, with adapters or without; the largest first, so that the smaller ones find its
        memory."""
        if self._on_gpu:
            self._layers[rows, slots, adapted], _ = self._record(lambda: self._run_layers(rows, slots, adapted))

    def capture_head(self, rows: int, room: int) -> None:
        """Capture the rest of a step."""
        if self._on_gpu:
            self._heads[rows, room] = self._record(lambda: self._run_head(rows, room))

    def _record(self, work: Callable[[], Captured]) -> tuple[torch.cuda.CUDAGraph, Captured]:
        # NCCL looks after its work in a thread of its own, which must not end a capture of this one.
        mode = "global" if share_of(self._model.module) is None else "thread_local"
        return self._recorder.record(work, self.state, mode)

    def tidy(self) -> None:
        """Give back what only capturing needed."""
        if self._on_gpu:
            torch.cuda.synchronize(self._model.device)
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def measure(self, rows: int, slots: int, reach: int = 0) -> float | None:
        """Return the ms that the layers take once, for resting rows or for rows that see `reach` positions before their
        block; None if they are not captured. Those rows write to any pages: only before pages are in use."""
        graph = self._layers.get((rows, slots, False))
        if graph is None or not reach:
            return None if graph is None else _replay_ms(graph)
        kept, layout = self.state[:rows].clone(), self.layout
        start = reach // layout.block * layout.block
        pages = torch.arange(rows * layout.pages, device=self.state.device) % max(1, layout.scratch)
        self.state[:rows] = 0
        self.state[:rows, Field.LIVE], self.state[:rows, Field.START] = 1, start
        self.state[:rows, layout.table] = pages.view(rows, -1)
        ms = _replay_ms(graph)
        self.state[:rows] = kept
        return ms

    def measure_head(self, rows: int, room: int) -> float | None:
        """Return the ms that the rest of a step takes once; None if it is not captured."""
        captured = self._heads.get((rows, room))
        return None if captured is None else _replay_ms(captured[0])

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
    def launch(self, rows: int, slots: int = 0, room: int | None = None, adapted: bool = False) -> Answer:
        """Run one step of rows [0, rows) with so many slots, and room for so many masked positions or for all.

        Only if it is `adapted`, rows run under the adapters that their state names.
        Returns its answer without waiting for it.
        """
        room = rows * self.layout.block if room is None else room
        layers, head = self._layers.get((rows, slots, adapted)), self._heads.get((rows, room))
        if layers is None:
            self._run_layers(rows, slots, adapted)
        else:
            layers.replay()
        if head is None:
            answer = self._run_head(rows, room)
        else:
            head[0].replay()
            answer = head[1]
        place = self._launched % _KEPT_ANSWERS
        self._launched += 1
        values, written = self._answers[place, :rows], self._written[place]
        after = self._after[place, :rows]
        values.copy_(answer, non_blocking=True)
        after.copy_(self.state[:rows, : self.layout.table.start], non_blocking=True)
        if written is not None:
            written.record()
        return Answer(values, after, written)

    def _run_layers(self, rows: int, slots: int, adapted: bool) -> None:
        """Run the forward of the rows' positions and the slots'; keep what the head needs."""
        query = kernels.canvas_query(self.state[:rows], self.layout, slots)
        lora = self._lora(query) if adapted else None
        context = ForwardContext(self._plan(rows, slots, query), query.positions, self._kv, lora=lora)
        positions, module = rows * self.layout.block, self._model.module
        if self._gathered is not None and positions > WHOLE:
            assert isinstance(module, Decoder)
            gathered, hidden = module.begin(query.token_ids, context)
            torch.index_select(gathered, 0, query.own, out=self._gathered[:positions])
        else:
            hidden = module.forward(query.token_ids, context)
        torch.index_select(hidden, 0, query.own, out=self._hidden[:positions])
        self._decides[:rows].copy_(query.decides)

    def _lora(self, query: Query) -> LowRank:
        if self.bank is None:
            raise ValueError("a step was asked for with adapters, and there are none")
        columns = (Field.LIVE, Field.ADAPTER, Field.SCALE)
        live, adapter, scale = (self.state[:, column].index_select(0, query.owners) for column in columns)
        places = torch.where(live != 0, adapter - 1, -1)
        scales = scale.int().view(torch.float32)
        return LowRank(self.bank.stacks, (kernels.assign(places, scales, self.bank.ranks, self.layout.block),))

    def _run_head(self, rows: int, room: int) -> Tensor:
        """Propose, accept and move the rows on; return the answer."""
        state, layout = self.state[:rows], self.layout
        wanted = kernels.canvas_wanted(state, layout, self._decides[:rows], room)
        drawn, seed, position, step = wanted.draws.unbind()
        found = propose(
            self._model.module,
            self._finish(rows, wanted.sources),
            Draws(
                temperature=wanted.temperature,
                noise=Noise(None, seed, position, step, drawn != 0),
                ranking=self._plain[:room],
            ),
            self._barred,
        )
        return kernels.canvas_advance(
            state,
            layout,
            wanted.decides,
            wanted.places,
            found.token,
            found.confidence,
            found.finite,
            self._filler_ids,
            self._model.spec.mask_token_id,
        )

    def _finish(self, rows: int, sources: Tensor) -> Tensor:
        """Return the hidden states of some of the rows' positions, [sources, hidden]."""
        positions, module = rows * self.layout.block, self._model.module
        if self._gathered is None or positions <= WHOLE:
            return self._hidden.index_select(0, sources)
        assert isinstance(module, Decoder)
        return module.finish(self._gathered[:positions], self._hidden[:positions], None, sources)

    def _plan(self, rows: int, slots: int, query: Query) -> AttentionPlan:
        layout = self.layout
        if not self._on_gpu:
            return _reference_plan(query, layout, self._model.dtype)
        asks, reach = rows + slots, layout.pages * layout.page_size
        longest = layout.block * (2 if slots else 1)
        return AttentionPlan(
            slots=query.slots,
            row_offsets=query.offsets,
            visible_end=query.visible_end,
            page_table=query.page_table,
            # The kernel needs no more of its groups than the longest query.
            groups=(RowGroup(slice(0, asks * layout.block), slice(0, 0), asks, longest, reach, None),),
        )


def _replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _reference_plan(query: Query, layout: Layout, dtype: torch.dtype) -> AttentionPlan:
    """Return a plan with the groups that the reference needs, which are facts on the host."""
    offsets, ends, tables = query.offsets.tolist(), query.visible_end.tolist(), query.page_table.tolist()
    begins = query.positions.tolist()
    rows = [(first, behind, table) for first, behind, table in zip(offsets, offsets[1:], tables, strict=False)]
    rows = [(first, behind, table) for first, behind, table in rows if first < behind]
    plan = plan_attention(
        [begins[first] for first, _, _ in rows],
        [ends[first:behind] for first, behind, _ in rows],
        [table for _, _, table in rows],
        layout.page_size,
        device=query.slots.device,
        dtype=dtype,
    )
    return replace(plan, slots=query.slots)
