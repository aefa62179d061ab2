"""Twin of `kernels.lora`: a tile of tokens passes over the adapters that occur in it, usually one."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.overlap import overlap_options, wait_for_inputs
from kernels.lora import Assignment, Factors

_BLOCK_N = 128
_BLOCK_K = 128
# The inner product is cut until so many programs share it: a decode step has only a few tiles of tokens. No part is
# shorter than this many inputs. The parts are added in order, so that a step gives the same sums each time.
_PROGRAMS = 384
_LEAST_K = 256
_MOST_PARTS = 16


def lora(y: Tensor, x: Tensor, factors: Factors, assignment: Assignment) -> Tensor:
    if not y.is_contiguous():
        raise ValueError("y is not contiguous")
    low = _Low(y, x, factors, assignment)
    if low.tokens:
        grid = (low.tiles, triton.cdiv(low.outputs, _BLOCK_N))
        _expand[grid](y, *low.arguments, **low.shape)
    return y


def lora_swiglu(y: Tensor, x: Tensor, factors: Factors, assignment: Assignment) -> Tensor:
    inner = y.shape[1] // 2
    if factors.ends != (inner, 2 * inner) or not y.is_contiguous():
        raise ValueError(f"y {list(y.shape)} with parts that end at {factors.ends} is no gate and what it gates")
    out = torch.empty((y.shape[0], inner), dtype=y.dtype, device=y.device)
    low = _Low(y, x, factors, assignment)
    if low.tokens:
        _expand_gated[low.tiles, triton.cdiv(inner, _BLOCK_N)](y, out, *low.arguments, inner, **low.shape)
    return out


class _Low:
    """x a^T [parts, tokens, projections * rank] float32, and how the kernels that go on with it are launched."""

    def __init__(self, y: Tensor, x: Tensor, factors: Factors, assignment: Assignment) -> None:
        tokens, outputs = y.shape
        adapters, columns, inputs = factors.a.shape
        rank, pieces = factors.b.shape[2], len(factors.ends)
        fits = x.shape == (tokens, inputs) and factors.b.shape == (adapters, outputs, rank)
        if not fits or columns != pieces * rank or factors.ends[-1] != outputs or pieces > 3:
            shapes = f"y {list(y.shape)}, x {list(x.shape)}, a {list(factors.a.shape)} and b {list(factors.b.shape)}"
            raise ValueError(f"{shapes} do not match")
        if assignment.order.shape != (tokens,):
            raise ValueError(f"{assignment.order.shape[0]} tokens are assigned, there are {tokens}")
        x = x if x.is_contiguous() else x.contiguous()
        self.tokens, self.outputs = tokens, outputs
        block_m = 16 if tokens <= 256 else 32 if tokens <= 1024 else 64
        block_r = 16 if rank <= 16 else 32
        self.tiles, chunks = triton.cdiv(tokens, block_m), triton.cdiv(rank, block_r)
        shared = max(1, self.tiles * pieces * chunks)
        parts = max(1, min(_PROGRAMS // shared, triton.cdiv(inputs, _LEAST_K), _MOST_PARTS))
        part = triton.cdiv(triton.cdiv(inputs, parts), _BLOCK_K) * _BLOCK_K
        parts = triton.cdiv(inputs, part)
        low = torch.empty((parts, tokens, columns), dtype=torch.float32, device=y.device)
        common = {
            "BLOCK_M": block_m,
            "BLOCK_R": block_r,
            "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
            "num_warps": 4,
            **overlap_options(y.device),
        }
        order, adapter, ranks = assignment.order, assignment.adapter, assignment.rank
        if tokens:
            _shrink[self.tiles, pieces * chunks, parts](
                x,
                factors.a,
                order,
                adapter,
                ranks,
                low,
                tokens,
                rank,
                columns,
                inputs,
                part,
                BLOCK_K=_BLOCK_K,
                **common,
            )
        ends = (*factors.ends, *[outputs] * 3)[:2]
        self.arguments = (
            *(low, factors.b, order, adapter, ranks, assignment.scale),
            *(tokens, rank, columns, outputs, parts, *ends),
        )
        self.shape = {"PARTS": triton.next_power_of_2(parts), "BLOCK_N": _BLOCK_N, **common}


@triton.jit(do_not_specialize=["tokens"])
def _shrink(
    x_ptr,
    a_ptr,
    order_ptr,
    adapter_ptr,
    rank_ptr,
    low_ptr,
    tokens,
    most,
    columns,
    inputs,
    part,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    chunks = tl.cdiv(most, BLOCK_R)
    piece = tl.program_id(1) // chunks
    first_r = tl.program_id(1) % chunks * BLOCK_R
    r = first_r + tl.arange(0, BLOCK_R)
    first = tl.program_id(2) * part
    wait_for_inputs(OVERLAP)
    held = place < tokens
    adapter = tl.load(adapter_ptr + place, mask=held, other=-1)
    rank = tl.load(rank_ptr + place, mask=held, other=0)
    token = tl.load(order_ptr + place, mask=held, other=0)
    if tl.max(rank, 0) > first_r:
        total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for number in range(tl.min(tl.where(rank > 0, adapter, 1 << 30), 0), tl.max(adapter, 0) + 1):
            mine = adapter == number
            own = tl.max(tl.where(mine, rank, 0), 0)
            if own > first_r:
                x_row = x_ptr + token.to(tl.int64)[:, None] * inputs
                a_row = a_ptr + (number * columns + piece * most + r[None, :]).to(tl.int64) * inputs
                acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
                for start in range(0, part, BLOCK_K):
                    k = first + start + tl.arange(0, BLOCK_K)
                    inside = k < inputs
                    x = tl.load(x_row + k[None, :], mask=mine[:, None] & inside[None, :], other=0.0)
                    a = tl.load(a_row + k[:, None], mask=(r < own)[None, :] & inside[:, None], other=0.0)
                    acc = tl.dot(x, a, acc, input_precision=PRECISION)
                total += acc
        out = low_ptr + (tl.program_id(2) * tokens + place[:, None]) * columns + piece * most + r[None, :]
        tl.store(out, total, mask=held[:, None] & (r < most)[None, :])


@triton.jit
def _added(
    total,
    low_ptr,
    b_ptr,
    place,
    adapter,
    rank,
    scale,
    n,
    mine_n,
    piece,
    tokens,
    most,
    columns,
    outputs,
    parts,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return total [places, outputs] with the products of one projection."""
    part = tl.arange(0, PARTS)
    for first_r in range(0, tl.max(rank, 0), BLOCK_R):
        r = first_r + tl.arange(0, BLOCK_R)
        within = r[None, :] < rank[:, None]
        low_place = (part[:, None, None] * tokens + place[None, :, None]) * columns + piece * most + r[None, None, :]
        low_parts = tl.load(low_ptr + low_place, mask=(part < parts)[:, None, None] & within[None, :, :], other=0.0)
        low = tl.sum(low_parts, 0) * scale[:, None]
        for number in range(tl.min(tl.where(rank > 0, adapter, 1 << 30), 0), tl.max(adapter, 0) + 1):
            mine = adapter == number
            own = tl.max(tl.where(mine, rank, 0), 0)
            if own > first_r:
                b_place = b_ptr + (number * outputs + n[None, :]).to(tl.int64) * most + r[:, None]
                b = tl.load(b_place, mask=(r < own)[:, None] & mine_n[None, :], other=0.0)
                total += tl.dot(tl.where(mine[:, None], low, 0.0), b.to(tl.float32), input_precision=PRECISION)
    return total


@triton.jit(do_not_specialize=["tokens"])
def _expand(
    y_ptr,
    low_ptr,
    b_ptr,
    order_ptr,
    adapter_ptr,
    rank_ptr,
    scale_ptr,
    tokens,
    most,
    columns,
    outputs,
    parts,
    end_0,
    end_1,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    of = (n >= end_0).to(tl.int32) + (n >= end_1).to(tl.int32)
    wait_for_inputs(OVERLAP)
    held = place < tokens
    adapter = tl.load(adapter_ptr + place, mask=held, other=-1)
    rank = tl.load(rank_ptr + place, mask=held, other=0)
    if tl.max(rank, 0) > 0:
        token = tl.load(order_ptr + place, mask=held, other=0)
        scale = tl.load(scale_ptr + place, mask=held, other=0.0)
        y_place = y_ptr + token.to(tl.int64)[:, None] * outputs + n[None, :]
        inside = (rank > 0)[:, None] & (n < outputs)[None, :]
        total = tl.load(y_place, mask=inside, other=0.0).to(tl.float32)
        last = tl.max(tl.where(n < outputs, of, 0), 0)
        for piece in range(tl.min(of, 0), last + 1):
            mine_n = (of == piece) & (n < outputs)
            total = _added(
                total,
                low_ptr,
                b_ptr,
                place,
                adapter,
                rank,
                scale,
                n,
                mine_n,
                piece,
                tokens,
                most,
                columns,
                outputs,
                parts,
                PARTS,
                BLOCK_M,
                BLOCK_R,
                PRECISION,
            )
        tl.store(y_place, total.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _expand_gated(
    y_ptr,
    out_ptr,
    low_ptr,
    b_ptr,
    order_ptr,
    adapter_ptr,
    rank_ptr,
    scale_ptr,
    tokens,
    most,
    columns,
    outputs,
    parts,
    end_0,
    end_1,
    inner,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    wait_for_inputs(OVERLAP)
    held = place < tokens
    adapter = tl.load(adapter_ptr + place, mask=held, other=-1)
    rank = tl.load(rank_ptr + place, mask=held, other=0)
    token = tl.load(order_ptr + place, mask=held, other=0).to(tl.int64)
    scale = tl.load(scale_ptr + place, mask=held, other=0.0)
    y_place = y_ptr + token[:, None] * outputs + n[None, :]
    mine_n = n < inner
    inside = held[:, None] & mine_n[None, :]
    gate = tl.load(y_place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(y_place + inner, mask=inside, other=0.0).to(tl.float32)
    gate = _added(
        gate,
        low_ptr,
        b_ptr,
        place,
        adapter,
        rank,
        scale,
        n,
        mine_n,
        0,
        tokens,
        most,
        columns,
        outputs,
        parts,
        PARTS,
        BLOCK_M,
        BLOCK_R,
        PRECISION,
    )
    up = _added(
        up,
        low_ptr,
        b_ptr,
        place,
        adapter,
        rank,
        scale,
        n + inner,
        mine_n,
        1,
        tokens,
        most,
        columns,
        outputs,
        parts,
        PARTS,
        BLOCK_M,
        BLOCK_R,
        PRECISION,
    )
    value = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + token[:, None] * inner + n[None, :], value.to(out_ptr.dtype.element_ty), mask=inside)
