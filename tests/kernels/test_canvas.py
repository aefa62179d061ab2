"""Rows that decode by themselves: what they accept, how they move on, and the fused twins."""

import math
from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels.canvas import Field, Layout, Query, Rule, Wanted, canvas_advance, canvas_query, canvas_wanted
from shared.decoding import Decoding, LowConfidenceDynamic, LowConfidenceStatic, Sequential, Threshold
from tests.kernels.gpu_cases import DEVICE, generator, integers
from worker.decoding import decide
from worker.decoding.types import BlockView, TokenStats

pytest.importorskip("triton")

import kernels.gpu.canvas

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

FILLERS = torch.tensor([3, 5], device=DEVICE)
MASK = 99


def _decodings(rows: int) -> list[Decoding]:
    kinds: list[Decoding] = [
        Threshold(threshold=0.6),
        LowConfidenceStatic(steps=3, filler_rules=False),
        LowConfidenceDynamic(threshold=0.7, steps=2),
        LowConfidenceDynamic(threshold=0.7, fallback="leftmost"),
        Sequential(steps=4),
        LowConfidenceStatic(),
        Threshold(threshold=1.0, filler_rules=False),
    ]
    return [kinds[row % len(kinds)] for row in range(rows)]


def _rule(decoding: Decoding) -> Rule:
    match decoding:
        case LowConfidenceStatic():
            return Rule.STATIC
        case LowConfidenceDynamic(fallback="leftmost"):
            return Rule.DYNAMIC_LEFTMOST
        case LowConfidenceDynamic():
            return Rule.DYNAMIC
        case Sequential():
            return Rule.SEQUENTIAL
        case _:
            return Rule.THRESHOLD


def _state(rows: int, layout: Layout, seed: int) -> Tensor:
    block = layout.block
    state = torch.zeros(rows, layout.width, dtype=torch.int64)
    for row, decoding in enumerate(_decodings(rows)):
        tau = torch.tensor(getattr(decoding, "threshold", 0.0)).view(torch.int32)
        state[row, Field.RULE] = _rule(decoding)
        state[row, Field.THRESHOLD] = tau.long()
        state[row, Field.STEPS] = getattr(decoding, "steps", None) or 0
        state[row, Field.FILLER_RULES] = decoding.filler_rules
    state[:, Field.LIVE] = 1
    state = state.to(DEVICE)
    state[:, Field.START] = integers(0, 3, (rows,), seed) * block
    state[:, Field.LIMIT] = state[:, Field.START] + integers(1, 3 * block, (rows,), seed + 1)
    state[:, Field.STEP] = integers(0, 3, (rows,), seed + 2)
    state[:, layout.tokens] = integers(0, 9, (rows, block), seed + 3)
    state[:, layout.before] = integers(0, 9, (rows, block), seed + 4)
    masked = integers(0, 2, (rows, block), seed + 5)
    masked[:, 0] |= masked.sum(-1) == 0
    position = state[:, Field.START, None] + torch.arange(block, device=DEVICE)
    state[:, layout.masked] = masked * (position < state[:, Field.LIMIT, None])
    state[:, Field.MISSING] = state[:, layout.masked].sum(-1)
    state[:, Field.TEMPERATURE] = torch.tensor(0.5).view(torch.int32).long() * integers(0, 2, (rows,), seed + 6)
    state[:, Field.DRAWS], state[:, Field.SEED] = integers(0, 2, (rows,), seed + 7), integers(0, 99, (rows,), seed + 8)
    state[:, layout.table] = torch.arange(rows * layout.pages, device=DEVICE).view(rows, -1).flip(0)
    return state


def _proposals(room: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    token = integers(0, 9, (room,), seed)
    # Few distinct values: ties have to be broken.
    confidence = (torch.rand(room, generator=generator(seed + 1), device=DEVICE) * 8).round() / 8
    finite = torch.ones(room, dtype=torch.bool, device=DEVICE)
    return token, confidence, finite


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("block", [1, 4, 6, 32])
def test_rows_accept_what_the_strategies_accept(seed, block):
    rows, layout = 14, Layout(block, 8, 4 * block, 1000)
    state = _state(rows, layout, 10 * seed)
    wanted = canvas_wanted(state, layout, canvas_query(state, layout, 0).decides, rows * block)
    token, confidence, finite = _proposals(rows * block, 100 + seed)
    masked = state[:, layout.masked] != 0
    shape, places = (rows, block), wanted.places.long()
    still = torch.zeros(shape, device=DEVICE)
    view = BlockView(
        masked=masked,
        step=state[:, Field.STEP].clone(),
        length=torch.full((rows,), block, device=DEVICE),
        seed=torch.zeros(rows, dtype=torch.int64, device=DEVICE),
        start=state[:, Field.START].clone(),
        editable=torch.zeros_like(masked),
        current=torch.zeros(shape, dtype=torch.int64, device=DEVICE),
        undecided_at_first=masked.sum(-1),
    )
    stats = TokenStats(token[places].view(shape), confidence[places].view(shape), still, still)
    expected = decide(stats, view, _decodings(rows), None, FILLERS)
    answer = canvas_advance(state, layout, wanted.decides, wanted.places, token, confidence, finite, FILLERS, MASK)
    assert torch.equal(answer[:, 0] == 1, expected)


@pytest.mark.parametrize(("slots", "share"), [(0, 1.0), (2, 0.4), (9, 0.7)])
@pytest.mark.parametrize("block", [1, 4, 6, 32])
def test_the_twins_do_what_the_references_do(slots, share, block):
    rows, layout = 9, Layout(block, 5, 2 * block, 1000)
    room = math.ceil(share * rows * block)
    state = _state(rows, layout, 7)
    state[:, Field.COMMIT] = (state[:, Field.START] > 0).long()
    state[4, Field.LIVE] = 0
    state[6, Field.END], state[6, Field.START], state[6, Field.COMMIT] = 3 * block + 1, block + 1, 0
    ours = state.clone()
    for step in range(5):
        asked, expected = kernels.gpu.canvas.canvas_query(ours, layout, slots), canvas_query(state, layout, slots)
        for each in fields(Query):
            assert torch.equal(getattr(asked, each.name), getattr(expected, each.name)), each.name
        found = kernels.gpu.canvas.canvas_wanted(ours, layout, asked.decides, room)
        wanted = canvas_wanted(state, layout, asked.decides, room)
        for each in fields(Wanted):
            assert torch.equal(getattr(found, each.name), getattr(wanted, each.name)), each.name
        token, confidence, finite = _proposals(room, 50 + step)
        finite[room // 2] = step != 2
        moves = (layout, wanted.decides, wanted.places, token, confidence, finite, FILLERS, MASK)
        answer = kernels.gpu.canvas.canvas_advance(ours, *moves)
        assert torch.equal(answer, canvas_advance(state, *moves))
        assert torch.equal(ours, state)


@given(st.data())
def test_each_row_that_waits_gets_a_slot_or_writes_its_block_itself(data):
    """The first ones get the slots; no position is asked for twice, and no two write to the same place."""
    rows, slots = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 9))
    block, layout = 2, Layout(block=2, pages=6, page_size=2, scratch=1000)
    state = _state(rows, layout, data.draw(st.integers(0, 99)))
    flags = st.lists(st.integers(0, 1), min_size=rows, max_size=rows)
    state[:, Field.LIVE] = torch.tensor(data.draw(flags), device=DEVICE)
    waiting = torch.tensor(data.draw(flags), device=DEVICE) * (state[:, Field.START] > 0)
    state[:, Field.COMMIT] = waiting
    query = canvas_query(state, layout, slots)
    waits = [row for row in range(rows) if state[row, Field.LIVE] and waiting[row]]
    alone = waits[slots:]
    assert query.decides.tolist() == [int(bool(state[row, Field.LIVE]) and row not in alone) for row in range(rows)]
    ids, places = query.token_ids.tolist(), query.slots.tolist()
    asked, ends, owners = query.positions.tolist(), query.visible_end.tolist(), query.owners.tolist()
    offsets, scratch = query.offsets.tolist(), [layout.scratch * layout.page_size] * block
    assert (len(offsets), offsets[0], offsets[-1]) == (rows + slots + 1, 0, (rows + slots) * block)
    assert offsets == sorted(offsets)
    written: list[int] = []
    for row in range(rows):
        first, behind = offsets[row], offsets[row + 1]
        own = query.own[row * block : (row + 1) * block].tolist()
        assert own == [*range(behind - block, behind)]
        assert query.page_table[row].tolist() == state[row, layout.table].tolist()
        if not state[row, Field.LIVE]:
            assert places[first:behind] == scratch
            continue
        start = int(state[row, Field.START])
        tokens, before = state[row, layout.tokens].tolist(), state[row, layout.before].tolist()
        expected = before if row in alone else [*before, *tokens] if row in waits else tokens
        begin = start - block if row in waits else start
        assert ids[first:behind] == expected
        assert asked[first:behind] == [*range(begin, begin + len(expected))]
        assert ends[first:behind] == [position // block * block + block for position in asked[first:behind]]
        assert {*owners[first // block : behind // block]} == {row}
        written += places[first:behind]
    # Slots that nobody has stand behind all rows, each by itself.
    unused = max(0, slots - len(waits))
    lengths = [behind - first for first, behind in zip(offsets[rows:], offsets[rows + 1 :], strict=False)]
    assert lengths == [0] * (slots - unused) + [block] * unused
    assert places[offsets[rows] :] == scratch * unused
    assert len(set(written)) == len(written)


@given(st.data())
def test_room_goes_to_whole_rows_in_their_order(data):
    rows, block = data.draw(st.integers(1, 7)), 4
    layout = Layout(block, 3, 4, 1000)
    state = _state(rows, layout, data.draw(st.integers(0, 99)))
    decides = torch.tensor(data.draw(st.lists(st.integers(0, 1), min_size=rows, max_size=rows)), device=DEVICE)
    room = data.draw(st.integers(1, rows * block))
    wanted = canvas_wanted(state, layout, decides, room)
    masked = [[*(state[row, layout.masked] != 0).nonzero()[:, 0].tolist()] for row in range(rows)]
    expected, open_still = list[int](), True
    for row in range(rows):
        if decides[row]:
            open_still = open_still and len(expected) + len(masked[row]) <= room
            if open_still:
                expected += [row * block + place for place in masked[row]]
        assert wanted.decides[row] == int(bool(decides[row]) and open_still)
    assert wanted.sources.tolist() == expected + [0] * (room - len(expected))
    assert [int(wanted.places[position]) for position in expected] == [*range(len(expected))]
    for place, position in enumerate(expected):
        row = state[position // block]
        drawn = [row[Field.DRAWS], row[Field.SEED], row[Field.START] + position % block, row[Field.STEP]]
        assert wanted.draws[:, place].tolist() == [int(each) for each in drawn]
        assert wanted.temperature[place] == (0.5 if row[Field.TEMPERATURE] else 1.0)


def _one_row() -> tuple[Tensor, Layout]:
    """Return a row at its second block of two, of which three more positions are wanted."""
    layout = Layout(block=2, pages=4, page_size=2, scratch=9)
    state = torch.zeros(1, layout.width, dtype=torch.int64, device=DEVICE)
    state[0, Field.LIVE], state[0, Field.START], state[0, Field.LIMIT], state[0, Field.MISSING] = 1, 2, 5, 2
    state[0, layout.masked] = 1
    state[0, layout.tokens] = MASK
    state[0, layout.table] = torch.tensor([3, 1, 0, 9], device=DEVICE)
    return state, layout


def _take(state: Tensor, layout: Layout, slots: int, room: int = 2) -> Tensor:
    """Run a step that proposes 7 and 8, both surely; return its answer for the row."""
    decides = canvas_query(state, layout, slots).decides
    wanted = canvas_wanted(state, layout, decides, room)
    token, sure = torch.tensor([7, 8], device=DEVICE), torch.ones(2, device=DEVICE)
    moves = (wanted.decides, wanted.places, token, sure, sure > 0, FILLERS, MASK)
    return canvas_advance(state, layout, *moves)[0]


def test_without_a_slot_a_finished_block_is_written_before_the_next_one_is_decided():
    state, layout = _one_row()
    assert canvas_query(state, layout, 0).positions.tolist() == [2, 3]
    _take(state, layout, 0)
    query = canvas_query(state, layout, 0)
    assert (query.token_ids.tolist(), query.slots.tolist()) == ([7, 8], [2, 3])
    assert _take(state, layout, 0)[0].tolist() == [0, 0]
    query = canvas_query(state, layout, 0)
    assert (query.token_ids.tolist(), query.slots.tolist()) == ([MASK, MASK], [0, 1])
    # Only one position is wanted in the last block; then the row is at rest.
    assert _take(state, layout, 0)[0].tolist() == [1, 0]
    assert int(state[0, Field.LIVE]) == 0
    assert canvas_query(state, layout, 0).slots.tolist() == [18, 18]


def test_with_a_slot_it_is_written_beside_the_next_one():
    state, layout = _one_row()
    _take(state, layout, 1)
    query = canvas_query(state, layout, 1)
    assert (query.token_ids.tolist(), query.slots.tolist()) == ([7, 8, MASK, MASK], [2, 3, 0, 1])
    assert query.visible_end.tolist() == [4, 4, 6, 6]
    assert (query.offsets.tolist(), query.own.tolist()) == ([0, 4, 4], [2, 3])
    assert _take(state, layout, 1)[0].tolist() == [1, 0]
    assert int(state[0, Field.LIVE]) == 0


def test_a_row_without_room_stays_as_it_is_but_for_the_block_that_is_written():
    state, layout = _one_row()
    _take(state, layout, 1)
    before = state.clone()
    assert _take(state, layout, 1, room=0).any().item() is False
    before[0, Field.COMMIT] = 0
    assert torch.equal(state, before)
