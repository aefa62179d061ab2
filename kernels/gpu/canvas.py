"""Twins of `kernels.canvas`: a program a row, so that a step begins and ends with one small kernel each."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.canvas import Field, Layout, Query, Rule
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
_END = tl.constexpr(int(Field.END))
_STATIC = tl.constexpr(int(Rule.STATIC))
_DYNAMIC = tl.constexpr(int(Rule.DYNAMIC))
_DYNAMIC_LEFTMOST = tl.constexpr(int(Rule.DYNAMIC_LEFTMOST))
_SEQUENTIAL = tl.constexpr(int(Rule.SEQUENTIAL))


def canvas_query(state: Tensor, layout: Layout) -> Query:
    rows, width = state.shape
    if width != layout.width or state.stride(1) != 1:
        raise ValueError(f"state {list(state.shape)} does not go with a layout of {layout.width} columns")
    tokens, device = rows * layout.query, state.device
    query = Query(
        token_ids=torch.empty(tokens, dtype=torch.int64, device=device),
        positions=torch.empty(tokens, dtype=torch.int64, device=device),
        slots=torch.empty(tokens, dtype=torch.int64, device=device),
        visible_end=torch.empty(tokens, dtype=torch.int32, device=device),
        page_table=torch.empty((rows, layout.pages), dtype=torch.int32, device=device),
    )
    _ask[(rows,)](
        state,
        query.token_ids,
        query.positions,
        query.slots,
        query.visible_end,
        query.page_table,
        state.stride(0),
        layout.pages,
        layout.scratch * layout.page_size,
        BLOCK=layout.block,
        QUERY=layout.query,
        PAGE=layout.page_size,
        PAIRED=layout.paired,
        BLOCK_Q=triton.next_power_of_2(layout.query),
        num_warps=1,
        **overlap_options(device),
    )
    return query


@triton.jit(do_not_specialize=["pages", "scratch"])
def _ask(
    state_ptr,
    ids_ptr,
    positions_ptr,
    slots_ptr,
    ends_ptr,
    table_ptr,
    stride,
    pages,
    scratch,
    BLOCK: tl.constexpr,
    QUERY: tl.constexpr,
    PAGE: tl.constexpr,
    PAIRED: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK_Q)
    inside = i < QUERY
    wait_for_inputs(OVERLAP)
    state = state_ptr + row.to(tl.int64) * stride
    lists = state + _FIELDS
    # A flag of the row is spread over its positions before it is compared: the interpreter has no masks of scalars.
    live = tl.load(state + _LIVE) + 0 * i != 0
    start = tl.load(state + _START)
    if PAIRED:
        position = start + i - BLOCK
        column = tl.where(i < BLOCK, 2 * BLOCK + i, i - BLOCK)
    else:
        committing = tl.load(state + _COMMIT) != 0
        position = start + i - tl.where(committing, BLOCK, 0)
        column = i + tl.where(committing, 2 * BLOCK, 0)
    bound = tl.load(state + _END) + 0 * i
    real = live & (position >= 0) & inside & ((bound == 0) | (position >= start))
    position = tl.where(real, position, 0)
    page = tl.load(lists + 3 * BLOCK + position // PAGE, mask=real, other=0)
    place = row * QUERY + i
    ends = tl.where(bound > 0, bound, (position // BLOCK + 1) * BLOCK)
    tl.store(ids_ptr + place, tl.load(lists + column, mask=real, other=0), mask=inside)
    tl.store(positions_ptr + place, position, mask=inside)
    tl.store(slots_ptr + place, tl.where(real, page * PAGE + position % PAGE, scratch), mask=inside)
    tl.store(ends_ptr + place, tl.where(real, ends, 1).to(tl.int32), mask=inside)
    for first in range(0, pages, BLOCK_Q):
        number = first + i
        page = tl.load(lists + 3 * BLOCK + number, mask=number < pages, other=0)
        tl.store(table_ptr + row.to(tl.int64) * pages + number, page.to(tl.int32), mask=number < pages)


def canvas_advance(
    state: Tensor, layout: Layout, token: Tensor, confidence: Tensor, finite: Tensor, filler_ids: Tensor, mask_id: int
) -> Tensor:
    rows, width = state.shape
    if width != layout.width or token.shape != (rows * layout.block,):
        raise ValueError(f"state {list(state.shape)} and {token.shape[0]} proposals do not go with the layout")
    answer = torch.empty((rows, 3, layout.block), dtype=torch.int32, device=state.device)
    _advance[(rows,)](
        state,
        token,
        confidence,
        finite,
        filler_ids,
        answer,
        state.stride(0),
        mask_id,
        filler_ids.shape[0],
        BLOCK=layout.block,
        PAIRED=layout.paired,
        BLOCK_S=triton.next_power_of_2(layout.block),
        num_warps=1,
        **overlap_options(state.device),
    )
    return answer


@triton.jit(do_not_specialize=["mask_id", "fillers"])
def _advance(
    state_ptr,
    token_ptr,
    confidence_ptr,
    finite_ptr,
    filler_ptr,
    answer_ptr,
    stride,
    mask_id,
    fillers,
    BLOCK: tl.constexpr,
    PAIRED: tl.constexpr,
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
    if PAIRED:
        deciding = live != 0
    else:
        deciding = (live != 0) & (tl.load(state + _COMMIT) == 0)

    token = tl.load(token_ptr + row * BLOCK + i, mask=inside, other=0)
    confidence = tl.load(confidence_ptr + row * BLOCK + i, mask=inside, other=0.0)
    finite = tl.load(finite_ptr + row * BLOCK + i, mask=inside, other=1)
    was = tl.load(lists + BLOCK + i, mask=inside, other=0) != 0
    masked = was & deciding
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
    tl.store(lists + BLOCK + i, tl.where(done, start + i < limit, kept).to(tl.int64), mask=inside)
    tl.store(state + _STEP, tl.where(done, 0, step + deciding.to(tl.int64)))
    tl.store(state + _COMMIT, done.to(tl.int64))
    tl.store(state + _LIVE, live * ((fails == 0) & (start < limit)).to(tl.int64))
    tl.store(state + _START, start)
