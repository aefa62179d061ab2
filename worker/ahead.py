"""A runner that keeps the device one step ahead of the host.

Rows that a captured step can decide (`worker.graphs`) live on the device and move on by themselves. While the host
still works on one step's decision, the next one runs already. When its plan comes, each row is compared with what the
device was asked for in its place: what agrees is decided, everything else is put there anew and postponed by one step.
So the engine stays the only one that says what happens, and whatever it changes its mind about costs one row one step.

How many finished blocks a step can write beside its rows, and for how many masked positions it computes logits, is
chosen when it is launched, by what the rows are expected to need (`worker.foresight`).

All other rows (chunks of prompts, filters, guides, other strategies) run beside them, by the plain runner.
"""

import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass, field, replace
from functools import partial
from typing import assert_never

import torch

from kernels.canvas import Field, Layout, Rule
from shared.decoding import Decoding, LowConfidenceDynamic, LowConfidenceStatic, Sequential, Threshold
from worker.engine.plan import Canvas, Plan, Row
from worker.engine.ports import Decision
from worker.foresight import NO_SLOTS, Offer, Prices, at_least, foresee
from worker.graphs import Answer, StepGraphs
from worker.models.spec import Attention, Commit, ModelSpec
from worker.parallel.graphs import LedGraphs
from worker.runner import Runner, divisor, is_cut, is_greedy

MAX_ROWS = 256
"""More rows than this are decided by the plain runner."""

_REACH = 1024
"""Positions that rows see when it is measured what they take."""
_FRESH_SHARE = 0.1
"""Of each step in the mean number of positions that a row accepts."""

_DeviceRule = Threshold | LowConfidenceStatic | LowConfidenceDynamic | Sequential

Progress = Callable[[int, int], None]
"""(captured, of how many)"""


def goes_ahead(spec: ModelSpec) -> bool:
    """Tell whether the device can lead the model's rows by itself: from block to block, or through each block of a
    canvas whose keys a forward of the plain runner has renewed (dual cache)."""
    match spec.commit:
        case Commit.FUSED:
            attention, fits = Attention.BLOCK_CAUSAL, not spec.blocks_after_prompt
        case Commit.REFRESHED:
            attention, fits = Attention.BIDIRECTIONAL, True
        case _:
            return False
    plain = not spec.sliding_window and not spec.logit_shift and spec.block_length > 0
    return fits and plain and spec.attention is attention and spec.context in (None, attention)


def bucket_sizes(max_rows: int) -> list[int]:
    """Return the numbers of rows that steps are captured for: powers of two up to 32, then each 16 more."""
    most = min(max_rows, MAX_ROWS)
    return [*(size for size in (1, 2, 4, 8, 16, *range(32, most, 16)) if size < most), most]


def canvas_state(row: Row, layout: Layout, adapter: tuple[int, float] | None = None) -> list[int] | None:
    """Return what the device has to be told of a row, without its page numbers; None if it cannot decide it.

    `adapter` is place and scale of the row's adapters.
    """
    canvas = row.canvas
    if canvas is None or not _is_plain(row, canvas, layout.block) or (row.lora and adapter is None):
        return None
    rule = _rule(canvas.decoding)
    if rule is None:
        return None
    block, decoding, sampling = layout.block, canvas.decoding, canvas.sampling
    state = [0] * layout.table.start
    state[Field.LIVE] = 1
    state[Field.START] = canvas.start
    state[Field.LIMIT] = canvas.limit
    if not _ends_with_block(row, canvas, block):
        # Behind this block the host comes first again.
        state[Field.END], state[Field.LIMIT] = row.visible_end[-1], min(canvas.limit, row.end)
    state[Field.STEP] = canvas.step
    # More than a block is missing before it: that is written first, by itself.
    state[Field.COMMIT] = int(canvas.start - row.start == block)
    state[Field.RULE] = rule
    state[Field.MISSING] = sum(canvas.masked)
    state[Field.THRESHOLD] = _bits(getattr(decoding, "threshold", 0.0))
    state[Field.STEPS] = getattr(decoding, "steps", None) or 0
    state[Field.FILLER_RULES] = int(decoding.filler_rules)
    if not is_greedy(sampling):
        state[Field.DRAWS], state[Field.SEED] = 1, sampling.seed
    state[Field.TEMPERATURE] = _bits(divisor(sampling))
    if adapter is not None:
        state[Field.ADAPTER], state[Field.SCALE] = adapter[0] + 1, _bits(adapter[1])
    state[layout.tokens] = row.token_ids[-block:]
    state[layout.masked] = map(int, canvas.masked)
    # A row of an own end never asks for the block before, which may be shorter than its own.
    state[layout.before] = canvas.before if canvas.before and not state[Field.END] else [0] * block
    return state


def _ends_with_block(row: Row, canvas: Canvas, block: int) -> bool:
    """Tell whether everything in the row sees as far as its own block, and no further."""
    lead = canvas.start - row.start
    aligned = canvas.start % block == 0 and row.visible_end[-1] == row.end
    return aligned and (lead == 0 or row.visible_end[lead - 1] == canvas.start)


def _is_plain(row: Row, canvas: Canvas, block: int) -> bool:
    return (
        len(canvas.masked) == block
        and canvas.block_length in (0, block)
        and (_ends_with_block(row, canvas, block) or (row.start == canvas.start and len({*row.visible_end}) == 1))
        and row.end == canvas.start + block
        and canvas.limit > canvas.start
        and row.guide is None
        and row.positions is None
        and row.near is None
        and not (canvas.last or canvas.seed or canvas.shift or any(canvas.editable) or canvas.forbidden)
        and canvas.guarded is None
        and not (canvas.decoding.stops_last and canvas.stop_token_ids)
        and not is_cut(canvas)
        and (canvas.decoding.confidence == "model" or divisor(canvas.sampling) == 1)
        and not (canvas.edits or canvas.tests_draft)
        and canvas.logprobs is None
    )


def _rule(decoding: Decoding) -> Rule | None:
    if not isinstance(decoding, _DeviceRule):
        return None
    match decoding:
        case Threshold():
            return Rule.THRESHOLD
        case LowConfidenceStatic():
            return Rule.STATIC
        case LowConfidenceDynamic():
            return Rule.DYNAMIC if decoding.fallback == "confidence" else Rule.DYNAMIC_LEFTMOST
        case Sequential():
            return Rule.SEQUENTIAL
        case _:
            assert_never(decoding)


def _bits(value: float) -> int:
    return struct.unpack("<i", struct.pack("<f", value))[0]


@dataclass(slots=True)
class _Flight:
    """A step that was launched and not asked for yet."""

    answer: Answer
    slots: int
    room: int
    seats: dict[str, int]
    """Row of the device's state by request."""
    pages: dict[str, tuple[int, ...]]
    asked: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    """State of each row before the step; of rows that the step before left behind, it is known once that has ended."""


class AheadRunner:
    """Implements `worker.engine.ports.Forward`."""

    def __init__(self, runner: Runner, graphs: StepGraphs, sizes: ReadOnly[int], offer: Offer | None = None) -> None:
        """`graphs` shares the runner's pages; `sizes` are the numbers of rows that steps have, `offer` tells what
        slots and room they come with."""
        self._runner = runner
        self._graphs = graphs
        self._sizes = sorted(sizes)
        self._layout = graphs.layout
        commits = runner.model.spec.commit is Commit.FUSED
        # Where nothing is committed, a step has nothing to do for the block before.
        offer = offer or (Offer() if commits else NO_SLOTS)
        self._slots = {size: offer.slots_of(size) for size in self._sizes}
        self._room = {size: offer.room_of(size, self._layout.block) for size in self._sizes}
        self._prices: dict[int, Prices] = {}
        self._seats: dict[str, int] = {}
        self._pages: dict[str, tuple[int, ...]] = {}
        self._flight: _Flight | None = None
        self._pace = 1.0
        self._adapted = False
        """Some of the rows that are led run under adapters."""
        self._crowded = False
        """In the step that was read last a row found no room."""
        self._chosen = Counter[tuple[int, int, int]]()
        self.last: tuple[int, int, int] | None = None
        """Rows, slots and room of the step that was read last."""
        self.asked = self.postponed = 0
        """Rows that the device might have decided, and those of them that it did not."""

    def captures(self) -> list[tuple[int, Callable[[], None]]]:
        """Return (rows, capture) of all steps that may be launched; the largest first, so that the smaller ones find
        its memory."""
        graphs, found = self._graphs, list[tuple[int, Callable[[], None]]]()
        ways = (True, False) if graphs.bank is not None else (False,)
        for size in reversed(self._sizes):
            heads = [partial(graphs.capture_head, size, room) for room in reversed(self._room[size])]
            layers = [
                partial(graphs.capture, size, slots, way) for slots in reversed(self._slots[size]) for way in ways
            ]
            found += [(size, work) for work in (layers[0], heads[0], *layers[1:], *heads[1:])]
        return found

    def capture(self, progress: Progress) -> None:
        """Capture all steps that may be launched, and learn what they take."""
        graphs, captures = self._graphs, self.captures()
        for done, (_, work) in enumerate(captures, 1):
            work()
            progress(done, len(captures))
        graphs.tidy()
        for size in self._sizes:
            layers = {slots: graphs.measure(size, slots) for slots in self._slots[size]}
            head = {room: graphs.measure_head(size, room) for room in self._room[size]}
            known = Prices(
                {slots: ms for slots, ms in layers.items() if ms is not None},
                {room: ms for room, ms in head.items() if ms is not None},
                self._price_of_keys(size, layers) if len(layers) > 1 else 0.0,
            )
            if known.layers and known.head:
                self._prices[size] = known

    def _price_of_keys(self, rows: int, layers: Mapping[int, float | None]) -> float:
        """Return what a position more that a row sees takes; `layers` is what rows take that see nothing."""
        layout, fewest = self._layout, min(layers)
        reach = min(_REACH, layout.pages * layout.page_size - 2 * layout.block)
        near = layers[fewest]
        far = None if near is None or reach < layout.block else self._graphs.measure(rows, fewest, reach)
        return 0.0 if near is None or far is None else max(0.0, far - near) / (rows * reach)

    def choices(self) -> dict[str, object]:
        """Return what steps were launched, (rows, slots, room): how many, and what the sizes take, for reports."""
        prices = {size: (dict(each.layers), dict(each.head)) for size, each in self._prices.items()}
        return {"launched": {str(key): count for key, count in sorted(self._chosen.items())}, "ms": prices}

    def __call__(self, plan: Plan) -> Decision:
        rows = len(plan.rows)
        decision = Decision([[]] * rows, [[]] * rows, [[]] * rows, [None] * rows)
        states = self._states(plan)
        own = [index for index, state in enumerate(states) if state is not None][: self._sizes[-1]]
        flight, kept = self._flight, set[int]()
        if flight is not None:
            kept = {index for index in own if self._agrees(flight, plan.rows[index], states[index] or [])}
        # First, for it may fail for want of memory, and nothing has changed then.
        self._run_others(plan, set(own), kept, decision)
        self._seat(plan, own, kept, states)
        self._adapted = any(plan.rows[index].lora for index in own)
        fresh = {plan.rows[i].request_id: states[i] or [] for i in own if i not in kept}
        following = self._launch(fresh, flight)
        if own and not kept:
            # Nothing of what is under way is asked for: the step that was just launched is the one to wait for.
            flight, kept = following, set(own)
            following = self._launch({}, flight)
        if flight is not None and following is not None:
            self._read(flight, following, plan, own, kept, decision)
        self._flight = following
        self.asked += len(own)
        self.postponed += len(decision.postponed)
        return decision

    def _states(self, plan: Plan) -> list[list[int] | None]:
        bank = self._graphs.bank
        if bank is None:
            return [canvas_state(row, self._layout) for row in plan.rows]
        bank.bring(row.lora for row in plan.rows)
        return [canvas_state(row, self._layout, bank.find(row.lora) if row.lora else None) for row in plan.rows]

    def _agrees(self, flight: _Flight, row: Row, state: list[int]) -> bool:
        """Tell whether the step under way is the one that a row asks for."""
        if flight.asked.get(row.request_id) != state or self._lead(row) not in (0, self._layout.block):
            return False
        needed = -(-row.visible_end[-1] // self._layout.page_size)
        return flight.pages[row.request_id][:needed] == row.pages[:needed]

    def _lead(self, row: Row) -> int:
        """Return how many positions before its canvas a row asks for."""
        return 0 if row.canvas is None else row.canvas.start - row.start

    def _run_others(self, plan: Plan, own: set[int], kept: set[int], decision: Decision) -> None:
        """Run the rows that the device does not lead, and of those that it will lead what stands before their block."""
        others: list[tuple[int, Row]] = []
        for index, row in enumerate(plan.rows):
            lead = self._lead(row)
            if index not in own:
                others.append((index, row))
            elif index not in kept and lead not in (0, self._layout.block):
                ends = row.visible_end[:lead]
                others.append((index, replace(row, token_ids=row.token_ids[:lead], visible_end=ends, canvas=None)))
        if not others:
            return
        found = self._runner(Plan(tuple(row for _, row in others), plan.running))
        for place, (index, row) in enumerate(others):
            if row.pooled:
                decision.pooled[index] = found.pooled[place]
            if row.canvas is not None:
                decision.accepted[index] = found.accepted[place]
                decision.tokens[index] = found.tokens[place]
                decision.confidence[index] = found.confidence[place]
                decision.failed[index] = found.failed[place]
                if place in found.logprobs:
                    decision.logprobs[index] = found.logprobs[place]
                if place in found.dead_ends:
                    decision.dead_ends[index] = found.dead_ends[place]

    # --- the rows on the device

    def _seat(self, plan: Plan, own: list[int], kept: set[int], states: list[list[int] | None]) -> None:
        """Let rows leave, come, and learn of new pages."""
        graphs, layout = self._graphs, self._layout
        present = {plan.rows[index].request_id for index in own}
        for request_id in [request_id for request_id in self._seats if request_id not in present]:
            graphs.rest(self._seats.pop(request_id))
            del self._pages[request_id]
        free = sorted(set(range(self._sizes[-1])) - set(self._seats.values()), reverse=True)
        for index in own:
            row = plan.rows[index]
            pages, request_id = row.pages[: layout.pages], row.request_id
            if index not in kept:
                seat = self._seats.get(request_id)
                if seat is None:
                    seat = free.pop()
                table = [*pages, *[layout.scratch] * (layout.pages - len(pages))]
                graphs.put(seat, [*(states[index] or []), *table])
                self._seats[request_id] = seat
            elif pages != self._pages[request_id]:
                graphs.renumber(self._seats[request_id], pages)
            self._pages[request_id] = pages
        self._close_ranks()

    def _close_ranks(self) -> None:
        """Move the last rows to where others have left, if fewer rows then have to be run."""
        count = len(self._seats)
        if not count or self._size(max(self._seats.values()) + 1) == self._size(count):
            return
        holes = sorted(set(range(count)) - set(self._seats.values()))
        for request_id, seat in self._seats.items():
            if seat >= count:
                to = holes.pop()
                self._graphs.move(seat, to)
                self._seats[request_id] = to

    def _size(self, rows: int) -> int:
        return next(size for size in self._sizes if size >= rows)

    def _launch(self, fresh: dict[str, list[int]], behind: _Flight | None) -> _Flight | None:
        """Launch a step behind another one; `fresh` are the states of rows that were put there meanwhile."""
        if not self._seats:
            return None
        size = self._size(max(self._seats.values()) + 1)
        slots, room = self._choose(size, fresh, behind)
        self._chosen[size, slots, room] += 1
        answer = self._graphs.launch(size, slots, room, self._adapted)
        return _Flight(answer, slots, room, dict(self._seats), dict(self._pages), fresh)

    def _choose(self, size: int, fresh: dict[str, list[int]], behind: _Flight | None) -> tuple[int, int]:
        """Return how many slots and how much room the next step gets."""
        under_way: Iterable[list[int]] = ()
        slots = room = 0
        if behind is not None:
            slots, room = behind.slots, behind.room
            there = (name for name in self._seats if name not in fresh and name in behind.asked)
            under_way = [behind.asked[name] for name in sorted(there, key=behind.seats.__getitem__)]
        need = foresee(under_way, fresh.values(), self._layout.block, slots, room, self._pace)
        prices = self._prices.get(size)
        slots = (
            at_least(self._slots[size], need.waiting) if prices is None else prices.slots(size, need.waiting, need.seen)
        )
        rooms = self._room[size]
        return slots, rooms[-1] if self._crowded else at_least(rooms, need.room(slots, self._layout.block))

    def _read(
        self, flight: _Flight, following: _Flight, plan: Plan, own: list[int], kept: set[int], decision: Decision
    ) -> None:
        """Wait for a step and tell what it decided; note what the step behind it was asked for."""
        values = flight.answer.read()
        self.last = len(values), flight.slots, flight.room
        flags, tokens = values[:, :2].unbind(1)
        confidence = values[:, 2].contiguous().view(torch.float32)
        columns = (flags.tolist(), tokens.tolist(), confidence.tolist())
        after: list[list[int]] = flight.answer.after.tolist()
        for request_id in following.seats:
            if request_id not in following.asked and request_id in flight.seats:
                following.asked[request_id] = after[flight.seats[request_id]]
        self._crowded = False
        accepted = decided = 0
        for index in own:
            row = plan.rows[index]
            lead = self._lead(row)
            if index not in kept:
                written = row.start + lead if lead not in (0, self._layout.block) else None
                decision.postponed[index] = written
                continue
            seat = flight.seats[row.request_id]
            flag = columns[0][seat]
            if not any(flag):
                # No slot: the block before has been written, and that was all. Or no room for what is masked.
                self._crowded = self._crowded or lead == 0
                decision.postponed[index] = row.start + lead if lead else None
                continue
            decision.accepted[index] = [each == 1 for each in flag]
            decision.tokens[index] = columns[1][seat]
            decision.confidence[index] = columns[2][seat]
            if any(each == 2 for each in flag):
                decision.failed[index] = "the model's logits are not finite"
            accepted += sum(decision.accepted[index])
            decided += 1
        if decided:
            self._pace += _FRESH_SHARE * (accepted / decided - self._pace)


def make_graphs(runner: Runner, max_rows: int) -> StepGraphs:
    """Return the steps of a model's own block length over the runner's pages."""
    spec, page_size, scratch = runner.model.spec, runner.page_size, runner.num_pages
    width = -(-(spec.max_model_len + 2 * spec.block_length) // page_size)
    layout = Layout(spec.block_length, width, page_size, scratch)
    rows = min(max_rows, MAX_ROWS)
    if runner.model.lead is not None:
        return LedGraphs(runner, layout, rows)
    return StepGraphs(runner.model, runner.kv, runner.barred, runner.filler_ids, layout, rows, runner.bank)
