"""Twins of `kernels.lora`: a tile of tokens passes over the adapters that occur in it, usually one."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.overlap import overlap_options, release_and_wait, wait_for_inputs
from kernels.lora import Assignment, Factors
from kernels.lora import assign as reference

_BLOCK_N = 128
_MOST_R = 64
"""Wider adapters pass in parts."""
_MOST_ROWS = 1024
"""Rows up to which each one counts those that stand before it."""


def assign(adapter: Tensor, scale: Tensor, ranks: Tensor, each: int = 1) -> Assignment:
    rows = adapter.shape[0]
    if not 0 < rows <= _MOST_ROWS:
        return reference(adapter, scale, ranks, each)
    order, adapters, rank = torch.empty((3, rows * each), dtype=torch.int32, device=adapter.device).unbind()
    scales = torch.empty(rows * each, dtype=torch.float32, device=adapter.device)
    _assign[(rows,)](
        adapter.contiguous(),
        scale.contiguous(),
        ranks,
        order,
        adapters,
        rank,
        scales,
        rows,
        each,
        BLOCK=max(16, triton.next_power_of_2(rows)),
        BLOCK_E=triton.next_power_of_2(each),
        num_warps=1,
        **overlap_options(adapter.device),
    )
    return Assignment(order, adapters, rank, scales)


def lora(y: Tensor, low: Tensor, factors: Factors, assignment: Assignment) -> Tensor:
    out = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    _launch(y, low, factors, assignment, out, gated=False)
    return out


def lora_swiglu(y: Tensor, low: Tensor, factors: Factors, assignment: Assignment) -> Tensor:
    inner = y.shape[1] // 2
    if factors.ends != (inner, 2 * inner):
        raise ValueError(f"parts that end at {factors.ends} are no gate and what it gates")
    out = torch.empty((y.shape[0], inner), dtype=y.dtype, device=y.device)
    _launch(y, low, factors, assignment, out, gated=True)
    return out


def _launch(y: Tensor, low: Tensor, factors: Factors, assignment: Assignment, out: Tensor, gated: bool) -> None:
    (tokens, outputs), (adapters, columns, _) = y.shape, factors.a.shape
    rank, ends = factors.b.shape[2], factors.ends
    fits = low.shape == (tokens, adapters * columns) and factors.b.shape == (adapters, outputs, rank)
    if not fits or columns != len(ends) * rank or ends[-1] != outputs or len(ends) > 3:
        shapes = f"y {list(y.shape)}, low {list(low.shape)}, a {list(factors.a.shape)} and b {list(factors.b.shape)}"
        raise ValueError(f"{shapes} do not match")
    if y.stride(1) != 1 or low.stride(1) != 1 or not factors.b.is_contiguous():
        raise ValueError("columns of y or low, or values of b, lie apart")
    for each in (assignment.order, assignment.adapter, assignment.rank, assignment.scale):
        if each.shape != (tokens,) or not each.is_contiguous():
            raise ValueError(f"{each.shape[0]} tokens are assigned, there are {tokens}; or the assignments lie apart")
    if not tokens:
        return
    block_m = 16 if tokens <= 512 else 32
    _expand[triton.cdiv(tokens, block_m), triton.cdiv(out.shape[1], _BLOCK_N)](
        y,
        low,
        factors.b,
        assignment.order,
        assignment.adapter,
        assignment.rank,
        assignment.scale,
        out,
        tokens,
        out.shape[1],
        y.stride(0),
        low.stride(0),
        rank,
        columns,
        outputs,
        *(*ends, outputs, outputs)[:2],
        GATED=gated,
        BLOCK_M=block_m,
        BLOCK_N=_BLOCK_N,
        BLOCK_R=min(_MOST_R, max(16, triton.next_power_of_2(rank))),
        PRECISION="ieee" if y.dtype == torch.float32 else "tf32",
        num_warps=4,
        **overlap_options(y.device),
    )


@triton.jit(do_not_specialize=["rows", "each"])
def _assign(
    adapter_ptr,
    scale_ptr,
    ranks_ptr,
    order_ptr,
    adapters_ptr,
    rank_ptr,
    scales_ptr,
    rows,
    each,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0)
    other = tl.arange(0, BLOCK)
    within = tl.arange(0, BLOCK_E)
    wait_for_inputs(OVERLAP)
    mine = tl.load(adapter_ptr + row).to(tl.int32)
    theirs = tl.load(adapter_ptr + other, mask=other < rows, other=1 << 30).to(tl.int32)
    first = (theirs < mine) | ((theirs == mine) & (other < row))
    place = tl.sum(first.to(tl.int32), 0) * each + within
    rank = tl.load(ranks_ptr + tl.maximum(mine, 0), mask=mine >= 0, other=0).to(tl.int32)
    held = within < each
    tl.store(order_ptr + place, row * each + within, mask=held)
    tl.store(adapters_ptr + place, tl.zeros_like(within) + mine, mask=held)
    tl.store(rank_ptr + place, tl.zeros_like(within) + rank, mask=held)
    tl.store(scales_ptr + place, tl.zeros_like(within).to(tl.float32) + tl.load(scale_ptr + row), mask=held)


@triton.jit
def _read_b(
    b_ptr,
    number,
    n,
    inside,
    first,
    most,
    outputs,
    BLOCK_R: tl.constexpr,
):
    """Return b^T [ranks, n] of an adapter, from the rank `first` on."""
    r = first + tl.arange(0, BLOCK_R)
    place = b_ptr + (number * outputs + n[None, :]).to(tl.int64) * most + r[:, None]
    return tl.load(place, mask=(r < most)[:, None] & inside[None, :], other=0.0)


@triton.jit
def _read_low(low_ptr, token, adapter, rank, piece, first, low_stride, most, columns, BLOCK_R: tl.constexpr):
    r = first + tl.arange(0, BLOCK_R)
    row = low_ptr + token[:, None] * low_stride + adapter[:, None] * columns + piece * most
    return tl.load(row + r[None, :], mask=(rank > 0)[:, None] & (r < most)[None, :], other=0.0)


@triton.jit
def _added(
    low_ptr,
    b_ptr,
    known,
    lowest,
    token,
    adapter,
    rank,
    n,
    inside,
    piece,
    low_stride,
    most,
    columns,
    outputs,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return low b^T [places, n] of one projection.

    `known` is what `_read_b` has of the lowest adapter's first ranks.
    """
    low = _read_low(low_ptr, token, adapter, rank, piece, 0, low_stride, most, columns, BLOCK_R)
    low = tl.where((adapter == lowest)[:, None], low, 0.0)
    acc = tl.dot(low.to(known.dtype), known, input_precision=PRECISION)
    last = tl.max(adapter, 0)
    for first in range(tl.where(last > lowest, 0, BLOCK_R), tl.max(rank, 0), BLOCK_R):
        low = _read_low(low_ptr, token, adapter, rank, piece, first, low_stride, most, columns, BLOCK_R)
        for number in range(tl.where(first > 0, lowest, lowest + 1), last + 1):
            mine = adapter == number
            if tl.max(mine.to(tl.int32), 0) > 0:
                b = _read_b(b_ptr, number, n, inside, first, most, outputs, BLOCK_R)
                acc = tl.dot(tl.where(mine[:, None], low, 0.0).to(b.dtype), b, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["tokens"])
def _expand(
    y_ptr,
    low_ptr,
    b_ptr,
    order_ptr,
    adapter_ptr,
    rank_ptr,
    scale_ptr,
    out_ptr,
    tokens,
    width,
    y_stride,
    low_stride,
    most,
    columns,
    outputs,
    end_0,
    end_1,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    # The product in front of this kernel, or whatever wrote y, has waited for all that came before it, and so for
    # the assignment and the factors: they need not wait for y.
    held = place < tokens
    token = tl.load(order_ptr + place, mask=held, other=0).to(tl.int64)
    adapter = tl.load(adapter_ptr + place, mask=held, other=-1)
    rank = tl.load(rank_ptr + place, mask=held, other=0)
    scale = tl.load(scale_ptr + place, mask=held, other=0.0)
    inside = n < width
    mask = held[:, None] & inside[None, :]
    # Tokens of one adapter stand together: a tile has one, as a rule. Without any, zeros are added.
    last = tl.max(adapter, 0)
    lowest = tl.minimum(tl.min(tl.where(rank > 0, adapter, 1 << 30), 0), tl.maximum(last, 0))
    adapts = n < tl.where(last >= 0, width, 0)
    if GATED:
        known = _read_b(b_ptr, lowest, n, adapts, 0, most, outputs, BLOCK_R)
        known_up = _read_b(b_ptr, lowest, n + width, adapts, 0, most, outputs, BLOCK_R)
    else:
        piece_of = (n >= end_0).to(tl.int32) + (n >= end_1).to(tl.int32)
        piece = tl.min(piece_of, 0)
        known = _read_b(b_ptr, lowest, n, adapts & (piece_of == piece), 0, most, outputs, BLOCK_R)
    release_and_wait(OVERLAP)
    y_place = y_ptr + token[:, None] * y_stride + n[None, :]
    value = tl.load(y_place, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(y_place + width, mask=mask, other=0.0).to(tl.float32)
        value += scale[:, None] * _added(
            low_ptr,
            b_ptr,
            known,
            lowest,
            token,
            adapter,
            rank,
            n,
            adapts,
            0,
            low_stride,
            most,
            columns,
            outputs,
            BLOCK_R,
            PRECISION,
        )
        up += scale[:, None] * _added(
            low_ptr,
            b_ptr,
            known_up,
            lowest,
            token,
            adapter,
            rank,
            n + width,
            adapts,
            1,
            low_stride,
            most,
            columns,
            outputs,
            BLOCK_R,
            PRECISION,
        )
        value = value * tl.sigmoid(value) * up
    else:
        # A tile lies in one projection, as a rule.
        for other in range(piece, tl.max(tl.where(inside, piece_of, 0), 0) + 1):
            if other > piece:
                known = _read_b(b_ptr, lowest, n, adapts & (piece_of == other), 0, most, outputs, BLOCK_R)
            value += scale[:, None] * _added(
                low_ptr,
                b_ptr,
                known,
                lowest,
                token,
                adapter,
                rank,
                n,
                adapts & (piece_of == other),
                other,
                low_stride,
                most,
                columns,
                outputs,
                BLOCK_R,
                PRECISION,
            )
    tl.store(out_ptr + token[:, None] * width + n[None, :], value.to(out_ptr.dtype.element_ty), mask=mask)
