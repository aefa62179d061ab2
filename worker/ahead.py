"""A runner that keeps the device one step ahead of the host.

Rows that a captured step (`worker.graphs`) can decide (`worker.leadable`) live on the device and move on by themselves.
While the host still works on one step's decision, the next one runs already. When its plan comes, each row is compared
with what the device was asked for in its place: what agrees is decided, everything else is put there anew and postponed
by one step. So the engine stays the only one that says what happens, and whatever it changes its mind about costs one
row one step.
A row that only sits a step out, as the token budget holds fewer than there are, costs none: its answer is kept for when
it is asked for.

How many finished blocks a step can write beside its rows, and for how many masked positions it computes logits, is
chosen when it is launched, by what the rows are expected to need (`worker.foresight`).

All other rows (chunks of prompts, filters, guides, other strategies) run beside them, by the plain runner.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from kernels.canvas import Field, Layout
from worker.engine.plan import Plan, Row
from worker.engine.ports import Decision
from worker.foresight import NO_SLOTS, Offer, Prices, at_least, foresee
from worker.graphs import Answer, Recorder, StepGraphs
from worker.leadable import canvas_state
from worker.models.spec import Commit
from worker.parallel.graphs import LedGraphs
from worker.runner import Runner
from worker.slot_prices import measure_slots

MAX_ROWS = 256
"""More rows than this are decided by the plain runner."""

_FRESH_SHARE = 0.1
"""Of each step in the mean number of positions that a row accepts."""

Progress = Callable[[int, int], None]
"""(captured, of how many)"""


def bucket_sizes(max_rows: int, stride: int = 16) -> list[int]:
    """Return the numbers of rows that steps are captured for: powers of two up to 32, then each `stride` more."""
    most = min(max_rows, MAX_ROWS)
    return [*(size for size in (1, 2, 4, 8, 16, *range(32, most, stride)) if size < most), most]


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


@dataclass(frozen=True, slots=True)
class _RowAnswer:
    """What a step has decided of one row."""

    asked: list[int]
    """State before the step."""
    pages: tuple[int, ...]
    flags: list[int]
    """[block]; this and the next two as in `kernels.canvas.canvas_advance`."""
    tokens: list[int]
    confidence: list[float]
    after: list[int]
    """State behind the step."""

    @property
    def decides(self) -> bool:
        """False: it found no slot, and only the block before has been written; or no room for what is masked."""
        return any(self.flags)


@dataclass(slots=True)
class Turn:
    """A plan, as far as it is about the rows that an `AheadRunner` leads; rows are told by their index in it."""

    plan: Plan
    states: ReadOnly[list[int] | None]
    """[rows]: what the device has to be told of them; None: it cannot decide that row."""
    led: list[int]
    kept: set[int]
    """Those that the step under way decides."""
    back: dict[int, _RowAnswer]
    """Those that have sat out, and had been decided before."""
    apart: set[int]
    """Those whose block stands behind something else that is not written: that goes first, by itself."""
    flight: _Flight | None
    """The step under way."""
    following: _Flight | None = None
    """The one that was launched behind it."""


class AheadRunner:
    """Implements `worker.engine.ports.Forward`."""

    def __init__(self, runner: Runner, graphs: StepGraphs, sizes: ReadOnly[int], offer: Offer | None = None) -> None:
        """`graphs` shares the runner's pages; `sizes` are the numbers of rows that steps have, `offer` tells what
        slots and room they come with."""
        self._runner = runner
        self.graphs = graphs
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
        self._unasked: dict[str, _RowAnswer] = {}
        """By request: what is decided of rows that sit out, for when they are asked for."""
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
        graphs, found = self.graphs, list[tuple[int, Callable[[], None]]]()
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
        graphs, captures = self.graphs, self.captures()
        for done, (_, work) in enumerate(captures, 1):
            work()
            progress(done, len(captures))
        graphs.tidy()
        self._prices = measure_slots(graphs, self._slots, self._room)

    def choices(self) -> dict[str, object]:
        """Return what steps were launched, (rows, slots, room): how many, and what the sizes take, for reports."""
        prices = {size: (dict(each.layers), dict(each.head)) for size, each in self._prices.items()}
        return {"launched": {str(key): count for key, count in sorted(self._chosen.items())}, "ms": prices}

    def __call__(self, plan: Plan) -> Decision:
        decision, turn = Decision.open(len(plan.rows)), self.begin(plan)
        # First, for it may fail for want of memory, and nothing has changed then.
        run_others(self._runner, plan, (turn,), decision)
        self.launch(turn)
        self.end(turn, decision)
        return decision

    def begin(self, plan: Plan) -> Turn:
        """Find the rows that are led, and those of them that the step under way decides; change nothing."""
        states = self._states(plan)
        led = [index for index, state in enumerate(states) if state is not None][: self._sizes[-1]]
        flight, kept, back = self._flight, set[int](), dict[int, _RowAnswer]()
        for index in led:
            row, state = plan.rows[index], states[index] or []
            name = row.request_id
            if flight is not None and self._agrees(row, state, flight.asked.get(name), flight.pages.get(name, ())):
                kept.add(index)
            elif (answer := self._unasked.get(name)) and self._agrees(row, state, answer.asked, answer.pages):
                back[index] = answer
        apart = {index for index in led if index not in kept and not self._stands(plan.rows[index])}
        return Turn(plan, states, led, kept, back, apart, flight)

    def launch(self, turn: Turn) -> None:
        """Put rows there that do not go on by themselves, and launch the step behind the one under way."""
        plan, back = turn.plan, turn.back
        # Should anything go wrong from here on, all rows are put there anew by the next plan.
        self._flight = None
        fresh = [index for index in turn.led if index not in turn.kept]
        put = {index: back[index].after if index in back else turn.states[index] or [] for index in fresh}
        self._seat(plan, turn.led, put)
        self._adapted = any(plan.rows[index].lora for index in turn.led)
        asked = {plan.rows[index].request_id: state for index, state in put.items()}
        turn.following = self._launch(asked, turn.flight)

    def end(self, turn: Turn, decision: Decision) -> None:
        """Wait for the step that decides the turn's rows, and note what it has decided."""
        plan, led, kept, back = turn.plan, turn.led, turn.kept, turn.back
        flight, following = turn.flight, turn.following
        sitting = plan.running - {row.request_id for row in plan.rows}
        self._unasked = {name: answer for name, answer in self._unasked.items() if name in sitting}
        answers: dict[str, _RowAnswer] = {}
        if flight is not None and (kept or not sitting.isdisjoint(flight.asked)):
            answers = self._read(flight, following)
            self._unasked |= {name: answers[name] for name in sitting & answers.keys() if answers[name].decides}
        if following is not None and not kept and not back:
            # Nothing that is decided is asked for: the step that was just launched is the one to wait for.
            flight, kept = following, set(led)
            following = self._launch({}, flight)
            answers = self._read(flight, following)
        postponed = len(decision.postponed)
        for index in led:
            row = plan.rows[index]
            self._tell(index, row, answers[row.request_id] if index in kept else back.get(index), decision)
        self._flight = following
        self.asked += len(led)
        self.postponed += len(decision.postponed) - postponed

    def _states(self, plan: Plan) -> list[list[int] | None]:
        bank = self.graphs.bank
        if bank is None:
            return [canvas_state(row, self._layout) for row in plan.rows]
        bank.bring(row.lora for row in plan.rows)
        return [canvas_state(row, self._layout, bank.find(row.lora) if row.lora else None) for row in plan.rows]

    def _agrees(self, row: Row, state: list[int], asked: list[int] | None, pages: tuple[int, ...]) -> bool:
        """Tell whether a step on such pages, asked for such a state, is the one that a row asks for."""
        if asked != state or not self._stands(row):
            return False
        needed = -(-row.visible_end[-1] // self._layout.page_size)
        return pages[:needed] == row.pages[:needed]

    def _stands(self, row: Row) -> bool:
        """Tell whether a row asks for its block alone, or with the whole one before it."""
        return _before(row) in (0, self._layout.block)

    # --- the rows on the device

    def _seat(self, plan: Plan, led: list[int], put: Mapping[int, list[int]]) -> None:
        """Let rows leave, come, and learn of new pages; `put` are the states of those that do not go on."""
        graphs, layout = self.graphs, self._layout
        present = {plan.rows[index].request_id for index in led}
        for request_id in [request_id for request_id in self._seats if request_id not in present]:
            graphs.rest(self._seats.pop(request_id))
            del self._pages[request_id]
        free = sorted(set(range(self._sizes[-1])) - set(self._seats.values()), reverse=True)
        for index in led:
            row = plan.rows[index]
            pages, request_id = row.pages[: layout.pages], row.request_id
            if index in put:
                seat = self._seats.get(request_id)
                if seat is None:
                    seat = free.pop()
                table = [*pages, *[layout.scratch] * (layout.pages - len(pages))]
                graphs.put(seat, [*put[index], *table])
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
                self.graphs.move(seat, to)
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
        answer = self.graphs.launch(size, slots, room, self._adapted)
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

    def _read(self, flight: _Flight, following: _Flight | None) -> dict[str, _RowAnswer]:
        """Wait for a step and return what it decided, by request; note what the step behind it was asked for."""
        values = flight.answer.read()
        self.last = len(values), flight.slots, flight.room
        flags, tokens = values[:, :2].unbind(1)
        confidence = values[:, 2].contiguous().view(torch.float32)
        columns = flags.tolist(), tokens.tolist(), confidence.tolist(), flight.answer.after.tolist()
        answers: dict[str, _RowAnswer] = {}
        for name, asked in flight.asked.items():
            answers[name] = _RowAnswer(asked, flight.pages[name], *(each[flight.seats[name]] for each in columns))
        if following is not None:
            for name in following.seats.keys() - following.asked.keys():
                following.asked[name] = answers[name].after
        decided = [answer for answer in answers.values() if answer.decides]
        if decided:
            accepted = sum(answer.flags.count(1) for answer in decided)
            self._pace += _FRESH_SHARE * (accepted / len(decided) - self._pace)
        self._crowded = any(
            answer.asked[Field.LIVE] and not answer.asked[Field.COMMIT] and not answer.decides
            for answer in answers.values()
        )
        return answers

    def _tell(self, index: int, row: Row, answer: _RowAnswer | None, decision: Decision) -> None:
        """Note what was decided of a row of the plan; None: it was only put there, behind what stands before it."""
        before = _before(row)
        if answer is None:
            decision.postponed[index] = None if self._stands(row) else row.start + before
        elif not answer.decides:
            decision.postponed[index] = row.start + before if before else None
        else:
            decision.accepted[index] = [flag == 1 for flag in answer.flags]
            decision.tokens[index] = answer.tokens
            decision.confidence[index] = answer.confidence
            if 2 in answer.flags:
                decision.failed[index] = "the model's logits are not finite"


def run_others(runner: Runner, plan: Plan, turns: ReadOnly[Turn], decision: Decision) -> None:
    """Run the rows that nobody leads, and of those that somebody will lead what stands before their block."""
    led = {index for turn in turns for index in turn.led}
    apart = {index for turn in turns for index in turn.apart}
    others: list[tuple[int, Row]] = []
    for index, row in enumerate(plan.rows):
        if index not in led:
            others.append((index, row))
        elif index in apart:
            before = _before(row)
            ends = row.visible_end[:before]
            others.append((index, replace(row, token_ids=row.token_ids[:before], visible_end=ends, canvas=None)))
    if not others:
        return
    found = runner(Plan(tuple(row for _, row in others), plan.running))
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


def _before(row: Row) -> int:
    """Return how many positions before its canvas a row asks for."""
    return 0 if row.canvas is None else row.canvas.start - row.start


def make_graphs(
    runner: Runner, max_rows: int, length: int | None = None, recorder: Recorder | None = None
) -> StepGraphs:
    """Return the steps of a block length, the model's own by default, over the runner's pages.

    Adapters are for those of the model's own length alone: each of the others would be captured twice.
    """
    model, layout, rows = runner.model, layout_of(runner, length), min(max_rows, MAX_ROWS)
    if model.lead is not None:
        return LedGraphs(runner, layout, rows, recorder)
    bank = runner.bank if layout.block == model.spec.block_length else None
    return StepGraphs(model, runner.kv, runner.barred, runner.filler_ids, layout, rows, bank, recorder)


def layout_of(runner: Runner, length: int | None = None) -> Layout:
    """Return the state of rows with blocks of a length, the model's own by default."""
    block = length or runner.model.spec.block_length
    width = -(-(runner.model.spec.max_model_len + 2 * block) // runner.page_size)
    return Layout(block, width, runner.page_size, runner.num_pages)
