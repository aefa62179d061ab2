"""Twins of `kernels.canvas`: a program a row, so that a step begins with one small kernel and ends with
two."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.canvas import Field, Layout, Query, Rule, Wanted
from kernels.gpu.overlap import overlap_options, wait_for_inputs

_FIELDS = tl.constexpr(len(Field))
_LIVE = tl.constexpr(int(Field.LIVE))
_START = tl.constexpr(int(Field.START))
_LIMIT = tl.constexpr(int(Field.LIMIT))
_STEP = tl.constexpr(int(Field.STEP))
_COMMIT = tl.constexpr(int(Field.COMMIT))
_RULE = tl.constexpr(int(Field.RULE))
_THRESHOLD = tl.constexpr(int(Field.THRESHOLD))
_STEPS = tl.constexpr(int(Field.STEPS))
_FILLER_RULES = tl.constexpr(int(Field.FILLER_RULES))
_DRAWS = tl.constexpr(int(Field.DRAWS))
_SEED = tl.constexpr(int(Field.SEED))
_TEMPERATURE = tl.constexpr(int(Field.TEMPERATURE))
_END = tl.constexpr(int(Field.END))
_MISSING = tl.constexpr(int(Field.MISSING))
_STATIC = tl.constexpr(int(Rule.STATIC))
_DYNAMIC = tl.constexpr(int(Rule.DYNAMIC))
_DYNAMIC_LEFTMOST = tl.constexpr(int(Rule.DYNAMIC_LEFTMOST))
_SEQUENTIAL = tl.constexpr(int(Rule.SEQUENTIAL))


def canvas_query(state: Tensor, layout: Layout, slots: int) -> Query:
    rows, width = state.shape
    if width != layout.width or state.stride(1) != 1:
        raise ValueError(f"state {list(state.shape)} does not go with a layout of {layout.width} columns")
    asks, device = rows + slots, state.device
    tokens = asks * layout.block
    decides = torch.empty(asks, dtype=torch.int32, device=device)
    query = Query(
        token_ids=torch.empty(tokens, dtype=torch.int64, device=device),
        positions=torch.empty(tokens, dtype=torch.int64, device=device),
        slots=torch.empty(tokens, dtype=torch.int64, device=device),
        visible_end=torch.empty(tokens, dtype=torch.int32, device=device),
        page_table=torch.empty((asks, layout.pages), dtype=torch.int32, device=device),
        offsets=torch.empty(asks + 1, dtype=torch.int32, device=device),
        own=torch.empty(rows * layout.block, dtype=torch.int64, device=device),
        decides=decides[:rows],
        owners=torch.empty(asks, dtype=torch.int32, device=device),
    )
    _ask[(asks,)](
        state,
        query.token_ids,
        query.positions,
        query.slots,
        query.visible_end,
        query.page_table,
        query.offsets,
        query.own,
        decides,
        query.owners,
        state.stride(0),
        rows,
        slots,
        layout.pages,
        layout.scratch * layout.page_size,
        BLOCK=layout.block,
        PAGE=layout.page_size,
        BLOCK_S=triton.next_power_of_2(layout.block),
        BLOCK_R=triton.next_power_of_2(rows),
        num_warps=1,
        **overlap_options(device),
    )
    return query


@triton.jit(do_not_specialize=["rows", "slots", "pages", "scratch"])
def _ask(
    state_ptr,
    ids_ptr,
    positions_ptr,
    slots_ptr,
    ends_ptr,
    table_ptr,
    offsets_ptr,
    own_ptr,
    decides_ptr,
    owners_ptr,
    stride,
    rows,
    slots,
    pages,
    scratch,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_R: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    ask = tl.program_id(0)
    i = tl.arange(0, BLOCK_S)
    r = tl.arange(0, BLOCK_R)
    inside = i < BLOCK
    wait_for_inputs(OVERLAP)
    all_live = tl.load(state_ptr + r.to(tl.int64) * stride + _LIVE, mask=r < rows, other=0) != 0
    waiting = all_live & (tl.load(state_ptr + r.to(tl.int64) * stride + _COMMIT, mask=r < rows, other=0) != 0)
    order = tl.cumsum(waiting.to(tl.int32), 0)
    # The row that this program asks for; a slot's owner is the one that comes in its place among those that wait.
    slot = ask - rows
    mine = ((slot < 0) & (r == ask)) | ((slot >= 0) & waiting & (order == slot + 1))
    row = tl.sum(tl.where(mine, r, 0), 0)
    live = tl.max((mine & all_live).to(tl.int32), 0)
    alone = tl.max((mine & waiting & (order > slots)).to(tl.int32), 0)
    before = tl.where(slot < 0, alone, 1)
    # Where its block stands: behind those of the rows and slots before it.
    used = tl.minimum(tl.max(order, 0), slots)
    upto = tl.minimum(tl.sum(tl.where(mine, order, 0), 0), slots)
    has = tl.max((mine & waiting & (order <= slots)).to(tl.int32), 0)
    chunk = tl.where(slot < 0, ask + upto, tl.where(has != 0, row + slot, ask))
    begin = tl.where(slot < 0, chunk - has, rows + tl.maximum(slot, used))

    state = state_ptr + row.to(tl.int64) * stride
    lists = state + _FIELDS
    start = tl.load(state + _START)
    # A flag of the row is spread over its positions before it is compared: the interpreter has no masks of scalars.
    position = start + i - before * BLOCK
    column = i + before * (2 * BLOCK)
    bound = tl.load(state + _END) + 0 * i
    real = (live + 0 * i != 0) & (position >= 0) & inside & ((bound == 0) | (position >= start))
    position = tl.where(real, position, 0)
    page = tl.load(lists + 3 * BLOCK + position // PAGE, mask=real, other=0)
    place = chunk * BLOCK + i
    ends = tl.where(bound > 0, bound, (position // BLOCK + 1) * BLOCK)
    tl.store(ids_ptr + place, tl.load(lists + column, mask=real, other=0), mask=inside)
    tl.store(positions_ptr + place, position, mask=inside)
    tl.store(slots_ptr + place, tl.where(real, page * PAGE + position % PAGE, scratch), mask=inside)
    tl.store(ends_ptr + place, tl.where(real, ends, 1).to(tl.int32), mask=inside)
    tl.store(decides_ptr + ask, live * (1 - alone))
    tl.store(owners_ptr + chunk, row)
    tl.store(offsets_ptr + ask, begin * BLOCK)
    tl.store(offsets_ptr + rows + slots, (rows + slots) * BLOCK)
    tl.store(own_ptr + ask * BLOCK + i, place.to(tl.int64), mask=inside & (slot + 0 * i < 0))
    lists = state_ptr + tl.where(slot < 0, row, 0).to(tl.int64) * stride + _FIELDS
    for first in range(0, pages, BLOCK_S):
        number = first + i
        page = tl.load(lists + 3 * BLOCK + number, mask=number < pages, other=0)
        tl.store(table_ptr + ask.to(tl.int64) * pages + number, page.to(tl.int32), mask=number < pages)


def canvas_wanted(state: Tensor, layout: Layout, decides: Tensor, room: int) -> Wanted:
    rows, width = state.shape
    if width != layout.width or decides.shape != (rows,):
        raise ValueError(f"state {list(state.shape)} and {decides.shape[0]} rows do not go with the layout")
    device = state.device
    wanted = Wanted(
        sources=torch.empty(room, dtype=torch.int64, device=device),
        places=torch.empty(rows * layout.block, dtype=torch.int32, device=device),
        decides=torch.empty(rows, dtype=torch.int32, device=device),
        temperature=torch.empty(room, dtype=torch.float32, device=device),
        draws=torch.empty((4, room), dtype=torch.int64, device=device),
    )
    _want[(rows,)](
        state,
        decides,
        wanted.sources,
        wanted.places,
        wanted.decides,
        wanted.temperature,
        wanted.draws,
        state.stride(0),
        rows,
        room,
        BLOCK=layout.block,
        BLOCK_S=triton.next_power_of_2(layout.block),
        BLOCK_R=triton.next_power_of_2(rows),
        num_warps=1,
        **overlap_options(device),
    )
    return wanted


@triton.jit(do_not_specialize=["rows", "room"])
def _want(
    state_ptr,
    decides_ptr,
    sources_ptr,
    places_ptr,
    served_ptr,
    temperature_ptr,
    draws_ptr,
    stride,
    rows,
    room,
    BLOCK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_R: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK_S)
    r = tl.arange(0, BLOCK_R)
    inside = i < BLOCK
    wait_for_inputs(OVERLAP)
    decides = tl.load(decides_ptr + r, mask=r < rows, other=0)
    missing = tl.load(state_ptr + r.to(tl.int64) * stride + _MISSING, mask=r < rows, other=0).to(tl.int32) * decides
    ends = tl.cumsum(missing, 0)
    used = tl.max(tl.where(ends <= room, ends, 0), 0)
    end = tl.sum(tl.where(r == row, ends, 0), 0)
    served = tl.sum(tl.where((r == row) & (ends <= room), decides, 0), 0)
    first = end - tl.sum(tl.where(r == row, missing, 0), 0)

    state = state_ptr + row.to(tl.int64) * stride
    masked = (tl.load(state + _FIELDS + BLOCK + i, mask=inside, other=0) != 0) & (served + 0 * i != 0)
    place = tl.where(masked, first + tl.cumsum(masked.to(tl.int32), 0) - 1, 0)
    warmth = tl.load(state + _TEMPERATURE).to(tl.int32).to(tl.float32, bitcast=True)
    tl.store(places_ptr + row * BLOCK + i, place, mask=inside)
    tl.store(served_ptr + row, served)
    tl.store(sources_ptr + place, (row * BLOCK + i).to(tl.int64), mask=masked)
    tl.store(temperature_ptr + place, tl.where(warmth == 0, 1.0, warmth) + 0.0 * i, mask=masked)
    drawn = (tl.load(state + _DRAWS) != 0).to(tl.int64)
    tl.store(draws_ptr + place, drawn + 0 * i, mask=masked)
    tl.store(draws_ptr + room + place, tl.load(state + _SEED) + 0 * i, mask=masked)
    tl.store(draws_ptr + 2 * room + place, tl.load(state + _START) + i, mask=masked)
    tl.store(draws_ptr + 3 * room + place, tl.load(state + _STEP) + 0 * i, mask=masked)
    # What is left of the room is filled by all programs in turn.
    nothing = tl.zeros((BLOCK_S,), tl.int64)
    for begin in range(used + row * BLOCK_S, room, rows * BLOCK_S):
        place = begin + i
        free = place < room
        tl.store(sources_ptr + place, nothing, mask=free)
        tl.store(temperature_ptr + place, nothing.to(tl.float32) + 1.0, mask=free)
        tl.store(draws_ptr + place, nothing, mask=free)
        tl.store(draws_ptr + room + place, nothing, mask=free)
        tl.store(draws_ptr + 2 * room + place, nothing, mask=free)
        tl.store(draws_ptr + 3 * room + place, nothing, mask=free)


def canvas_advance(
    state: Tensor,
    layout: Layout,
    decides: Tensor,
    places: Tensor,
    token: Tensor,
    confidence: Tensor,
    finite: Tensor,
    filler_ids: Tensor,
    mask_id: int,
) -> Tensor:
    rows, width = state.shape
    if width != layout.width or places.shape != (rows * layout.block,):
        raise ValueError(f"state {list(state.shape)} and {places.shape[0]} positions do not go with the layout")
    answer = torch.empty((rows, 3, layout.block), dtype=torch.int32, device=state.device)
    _advance[(rows,)](
        state,
        decides,
        places,
        token,
        confidence,
        finite,
        filler_ids,
        answer,
        state.stride(0),
        mask_id,
        filler_ids.shape[0],
        BLOCK=layout.block,
        BLOCK_S=triton.next_power_of_2(layout.block),
        num_warps=1,
        **overlap_options(state.device),
    )
    return answer


@triton.jit(do_not_specialize=["mask_id", "fillers"])
def _advance(
    state_ptr,
    decides_ptr,
    places_ptr,
    token_ptr,
    confidence_ptr,
    finite_ptr,
    filler_ptr,
    answer_ptr,
    stride,
    mask_id,
    fillers,
    BLOCK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK_S)
    inside = i < BLOCK
    wait_for_inputs(OVERLAP)
    state = state_ptr + row * stride
    lists = state + _FIELDS
    live = tl.load(state + _LIVE)
    start = tl.load(state + _START)
    limit = tl.load(state + _LIMIT)
    step = tl.load(state + _STEP)
    rule = tl.load(state + _RULE)
    tau = tl.load(state + _THRESHOLD).to(tl.int32).to(tl.float32, bitcast=True)
    steps = tl.load(state + _STEPS)
    ruled = (tl.load(state + _FILLER_RULES) != 0) & (rule != _SEQUENTIAL)
    deciding = (live != 0) & (tl.load(decides_ptr + row) != 0)

    was = tl.load(lists + BLOCK + i, mask=inside, other=0) != 0
    masked = was & (deciding.to(tl.int32) + 0 * i != 0)
    place = tl.load(places_ptr + row * BLOCK + i, mask=masked, other=0)
    token = tl.load(token_ptr + place, mask=masked, other=0)
    confidence = tl.load(confidence_ptr + place, mask=masked, other=0.0)
    finite = tl.load(finite_ptr + place, mask=masked, other=1)
    broken = masked & (finite == 0)
    fails = tl.max(broken.to(tl.int32), 0) != 0

    filler = i < 0
    for number in range(fillers):
        filler = filler | (token == tl.load(filler_ptr + number))
    others = masked & ((filler & ruled) == 0)
    view = tl.where(tl.max(others.to(tl.int32), 0) != 0, others, masked)

    steps = tl.where(steps > 0, steps, BLOCK)
    count = tl.maximum(BLOCK // steps + (step < BLOCK % steps).to(tl.int64), 1)
    # Rank of each position among those in view, the leftmost first among equals.
    flat = tl.where(view, confidence, -1.0)
    ahead = (flat[None, :] > confidence[:, None]) | ((flat[None, :] == confidence[:, None]) & (i[None, :] < i[:, None]))
    rank = tl.sum((ahead & view[None, :]).to(tl.int32), 1)
    best = view & (rank == 0)
    quota = view & (rank < count)
    sure = view & (confidence > tau)
    enough = tl.sum(sure.to(tl.int32), 0) >= count
    accepted = (view & (confidence >= tau)) | best
    if rule == _STATIC:
        accepted = quota
    if rule == _DYNAMIC:
        accepted = tl.where(enough, sure, quota)
    if rule == _DYNAMIC_LEFTMOST:
        accepted = tl.where(enough, sure, view & (tl.cumsum(view.to(tl.int32), 0) <= count))
    if rule == _SEQUENTIAL:
        first = tl.min(tl.where(masked, i, BLOCK_S), 0)
        accepted = view & (i >= first) & (i < first + count)
    accepted = tl.where(tl.max(accepted.to(tl.int32), 0) != 0, accepted, best)
    accepted = accepted & (fails == 0)

    out = answer_ptr + row * (3 * BLOCK) + i
    tl.store(out, accepted.to(tl.int32) + 2 * broken.to(tl.int32), mask=inside)
    tl.store(out + BLOCK, token.to(tl.int32), mask=inside)
    tl.store(out + 2 * BLOCK, confidence.to(tl.int32, bitcast=True), mask=inside)

    tokens = tl.where(accepted, token, tl.load(lists + i, mask=inside, other=0))
    left = masked & (accepted == 0)
    done = deciding & (tl.max(left.to(tl.int32), 0) == 0) & (fails == 0)
    start = start + tl.where(done, BLOCK, 0)
    kept = tl.where(deciding, left, was)
    # Everything has been read before anything is written.
    tl.debug_barrier()
    tl.store(lists + 2 * BLOCK + i, tokens, mask=inside & (done.to(tl.int32) + 0 * i != 0))
    tl.store(lists + i, tl.where(done, mask_id, tokens), mask=inside)
    kept = tl.where(done, start + i < limit, kept) & inside
    tl.store(lists + BLOCK + i, kept.to(tl.int64), mask=inside)
    tl.store(state + _MISSING, tl.sum(kept.to(tl.int64), 0))
    tl.store(state + _STEP, tl.where(done, 0, step + deciding.to(tl.int64)))
    tl.store(state + _COMMIT, done.to(tl.int64))
    tl.store(state + _LIVE, live * ((fails == 0) & (start < limit)).to(tl.int64))
    tl.store(state + _START, start)
