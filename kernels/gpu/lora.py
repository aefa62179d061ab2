"""Twins of `kernels.lora`: a tile of tokens passes over the adapters that occur in it, usually one."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.overlap import overlap_options, wait_for_inputs
from kernels.lora import Assignment, Factors

_BLOCK_N = 128
_MOST_R = 64
"""Wider adapters pass in parts."""


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


@triton.jit
def _added(
    low_ptr,
    b_ptr,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return low b^T [places, n] of one projection."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    row = low_ptr + token[:, None] * low_stride + adapter[:, None] * columns + piece * most
    for first in range(0, tl.max(rank, 0), BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        low = tl.load(row + r[None, :], mask=(rank > 0)[:, None] & (r < most)[None, :], other=0.0)
        for number in range(tl.min(tl.where(rank > 0, adapter, 1 << 30), 0), tl.max(adapter, 0) + 1):
            mine = adapter == number
            if tl.max(mine.to(tl.int32), 0) > 0:
                b_place = b_ptr + (number * outputs + n[None, :]).to(tl.int64) * most + r[:, None]
                b = tl.load(b_place, mask=(r < most)[:, None] & inside[None, :], other=0.0)
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
    wait_for_inputs(OVERLAP)
    held = place < tokens
    token = tl.load(order_ptr + place, mask=held, other=0).to(tl.int64)
    adapter = tl.load(adapter_ptr + place, mask=held, other=-1)
    rank = tl.load(rank_ptr + place, mask=held, other=0)
    scale = tl.load(scale_ptr + place, mask=held, other=0.0)
    inside = n < width
    mask = held[:, None] & inside[None, :]
    y_place = y_ptr + token[:, None] * y_stride + n[None, :]
    value = tl.load(y_place, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(y_place + width, mask=mask, other=0.0).to(tl.float32)
        value += scale[:, None] * _added(
            low_ptr,
            b_ptr,
            token,
            adapter,
            rank,
            n,
            inside,
            0,
            low_stride,
            most,
            columns,
            outputs,
            BLOCK_M,
            BLOCK_N,
            BLOCK_R,
            PRECISION,
        )
        up += scale[:, None] * _added(
            low_ptr,
            b_ptr,
            token,
            adapter,
            rank,
            n + width,
            inside,
            1,
            low_stride,
            most,
            columns,
            outputs,
            BLOCK_M,
            BLOCK_N,
            BLOCK_R,
            PRECISION,
        )
        value = value * tl.sigmoid(value) * up
    else:
        piece_of = (n >= end_0).to(tl.int32) + (n >= end_1).to(tl.int32)
        # A tile lies in one projection, as a rule.
        for piece in range(tl.min(piece_of, 0), tl.max(tl.where(inside, piece_of, 0), 0) + 1):
            value += scale[:, None] * _added(
                low_ptr,
                b_ptr,
                token,
                adapter,
                rank,
                n,
                inside & (piece_of == piece),
                piece,
                low_stride,
                most,
                columns,
                outputs,
                BLOCK_M,
                BLOCK_N,
                BLOCK_R,
                PRECISION,
            )
    tl.store(out_ptr + token[:, None] * width + n[None, :], value.to(out_ptr.dtype.element_ty), mask=mask)
