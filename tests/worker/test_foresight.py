"""What the host expects of a step that it has not read, against what the step does."""

from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.canvas import Field, Layout, Rule, canvas_advance, canvas_query, canvas_wanted
from worker.foresight import Need, Offer, Prices, at_least, foresee

BLOCK = 4
LAYOUT = Layout(BLOCK, 4, BLOCK, 1000)


@st.composite
def a_row(draw: st.DrawFn, rules: tuple[Rule, ...] = (Rule.STATIC, Rule.SEQUENTIAL)) -> list[int]:
    state = [0] * LAYOUT.width
    state[Field.LIVE] = draw(st.sampled_from([1, 1, 1, 0]))
    state[Field.START] = draw(st.integers(1, 2)) * BLOCK
    masked = draw(st.lists(st.integers(0, 1), min_size=BLOCK, max_size=BLOCK).filter(any))
    state[Field.RULE], state[Field.STEPS] = draw(st.sampled_from(rules)), draw(st.sampled_from([0, 1, 2, 3]))
    if state[Field.RULE] == Rule.SEQUENTIAL:
        # From left to right nothing is left out.
        masked = sorted(masked)
    state[LAYOUT.masked], state[Field.MISSING] = masked, sum(masked)
    state[Field.LIMIT] = state[Field.START] + draw(st.integers(BLOCK, 2 * BLOCK))
    state[Field.COMMIT] = draw(st.integers(0, 1))
    state[Field.STEP] = draw(st.integers(0, 3))
    return state


def after(states: list[list[int]], slots: int, room: int, seed: int) -> list[list[int]]:
    """Return the states behind a step."""
    state = torch.tensor(states)
    wanted = canvas_wanted(state, LAYOUT, canvas_query(state, LAYOUT, slots).decides, room)
    confidence = torch.rand(room, generator=torch.Generator().manual_seed(seed))
    token = torch.ones(room, dtype=torch.int64)
    moves = (wanted.decides, wanted.places, token, confidence, confidence >= 0)
    canvas_advance(state, LAYOUT, *moves, torch.tensor([], dtype=torch.int64), 99)
    return state.tolist()


def needed(states: list[list[int]]) -> tuple[int, int]:
    live = [state for state in states if state[Field.LIVE]]
    return sum(state[Field.COMMIT] for state in live), sum(state[Field.MISSING] for state in live)


@given(st.lists(a_row(), min_size=1, max_size=6), st.integers(0, 6), st.integers(1, 24), st.integers(0, 9))
def test_what_rows_of_a_fixed_schedule_need_next_is_known_before_their_step_is_read(states, slots, room, seed):
    need = foresee(states, [], BLOCK, slots, room, pace=2.0)
    assert (need.waiting, need.masked) == needed(after(states, slots, room, seed))
    assert need.variance == 0


@given(st.lists(a_row(), max_size=6))
def test_rows_that_were_just_put_there_need_what_they_say(states):
    live = [[1, *state[1:]] for state in states]
    need = foresee([], live, BLOCK, 0, 0, pace=1.0)
    assert (need.waiting, need.masked, need.variance) == (*needed(live), 0)


@given(st.lists(a_row(tuple(Rule)), min_size=1, max_size=6), st.integers(0, 6), st.floats(0.1, 9.0))
def test_what_is_expected_of_any_rows_is_something_that_they_can_need(states, slots, pace):
    need = foresee(states, [], BLOCK, slots, BLOCK * len(states), pace)
    assert 0 <= need.waiting <= len(states)
    assert 0 <= need.masked <= BLOCK * len(states)
    assert 1 <= need.room(slots, BLOCK)
    assert need.variance >= 0


def test_rows_without_a_slot_need_no_room():
    need = Need(waiting=5, masked=22, variance=4.0)
    assert need.room(5, BLOCK) == 24
    assert need.room(3, BLOCK) == 16


@given(st.integers(1, 300), st.integers(1, 64))
def test_there_is_always_room_for_all_rows_and_a_way_without_slots(rows, block):
    offer = Offer()
    assert offer.room_of(rows, block)[-1] == rows * block
    assert offer.slots_of(rows)[0] == 0 and offer.slots_of(rows)[-1] == rows
    for sizes in (offer.slots_of(rows), offer.room_of(rows, block)):
        assert sizes == sorted(set(sizes))


@given(st.lists(st.integers(0, 99), min_size=1).map(sorted), st.floats(0, 120))
def test_the_smallest_size_that_is_enough_is_taken(sizes, needed):
    taken = at_least(sizes, needed)
    assert taken in sizes
    assert taken >= needed or taken == sizes[-1]
    assert all(size < needed for size in sizes if size < taken)


@pytest.mark.parametrize(
    ("waiting", "slots"),
    [
        (0.0, 0),
        # A slot costs 0.2 ms, a row's step 10 / 8 ms.
        (1.0, 1),
        (2.5, 2),
        (6.0, 8),
        (8.0, 8),
    ],
)
def test_slots_are_taken_while_a_row_s_step_costs_more(waiting, slots):
    prices = Prices({0: 9.0, 1: 9.2, 2: 9.4, 8: 10.6}, {32: 1.0})
    assert prices.slots(8, waiting) == slots


def test_a_row_s_step_costs_what_its_keys_take_too():
    """64 rows of 4 by an H100's times: with 32 slots for 44 rows, 12 of them spent a step that reads all keys."""
    prices = Prices({0: 6.63, 8: 7.5, 16: 7.78, 32: 8.74, 64: 10.52}, {256: 0.557}, keys=3.83 / (64 * 1152))
    assert prices.slots(64, 44.0) == 32
    assert prices.slots(64, 44.0, 64 * 1152.0) == 64


@given(
    st.dictionaries(st.integers(1, 64), st.integers(1, 4000), max_size=4),
    st.integers(0, 64),
    st.tuples(st.integers(0, 100), st.integers(0, 100)).map(sorted),
)
def test_the_more_rows_see_the_more_rows_get_slots(layers, waiting, seen):
    prices = Prices({0: 5, **layers}, {32: 1}, keys=1)
    few, many = (prices.slots(1, waiting, each) for each in seen)
    assert min(few, waiting) <= min(many, waiting)


def test_what_rows_see_is_foreseen_for_those_that_stay_and_those_that_come():
    def row(start: int, live: int = 1) -> list[int]:
        state = [0] * LAYOUT.width
        state[Field.LIVE], state[Field.START], state[Field.LIMIT] = live, start, start + 64
        state[Field.RULE], state[Field.MISSING] = Rule.STATIC, BLOCK
        return state

    assert foresee([row(64), row(4096, 0), row(96)], [row(32)], BLOCK, 0, 4 * BLOCK, 1.0).seen == 64 + 96 + 32


def test_slots_that_cost_a_step_are_not_taken():
    assert Prices({0: 9.0, 4: 14.0, 8: 19.0}, {32: 0.5}).slots(8, 8.0) == 0


def test_every_column_of_a_state_is_one_that_was_thought_of():
    """A new field may change what rows need: think of `foresee`, then put it into this list."""
    assert {each.name for each in Field} == {
        *("LIVE", "START", "LIMIT", "STEP", "COMMIT", "RULE", "THRESHOLD", "STEPS", "FILLER_RULES", "DRAWS", "SEED"),
        *("TEMPERATURE", "END", "MISSING", "ADAPTER", "SCALE"),
    }
    assert {each.name for each in fields(Need)} == {"waiting", "masked", "variance", "seen"}
