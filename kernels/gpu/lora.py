"""Twin of `kernels.lora`: a tile of tokens passes over the adapters that occur in it, usually one."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.overlap import overlap_options, wait_for_inputs

_BLOCK_M = 16
_BLOCK_N = 128
_BLOCK_K = 128


def lora(y: Tensor, x: Tensor, a: Tensor, b: Tensor, adapter: Tensor, scale: Tensor) -> Tensor:
    tokens, outputs = y.shape
    adapters, rank, inputs = a.shape
    if x.shape != (tokens, inputs) or b.shape != (adapters, outputs, rank) or adapter.shape != (tokens,):
        raise ValueError(f"y {list(y.shape)}, x {list(x.shape)}, a {list(a.shape)} and b {list(b.shape)} do not match")
    y, x, a, b = (t if t.is_contiguous() else t.contiguous() for t in (y, x, a, b))
    out = torch.empty_like(y)
    if not tokens:
        return out
    low = torch.empty((tokens, rank), dtype=torch.float32, device=y.device)
    block_r = max(16, triton.next_power_of_2(rank))
    tiles = triton.cdiv(tokens, _BLOCK_M)
    shape = {
        "TOKENS_AT_ONCE": _BLOCK_M,
        "BLOCK_R": block_r,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
    }
    options = overlap_options(y.device)
    _shrink[(tiles,)](
        x, a, adapter, low, tokens, adapters, rank, inputs, BLOCK_K=_BLOCK_K, num_warps=4, **shape, **options
    )
    grid = (tiles, triton.cdiv(outputs, _BLOCK_N))
    _expand[grid](
        y,
        low,
        b,
        adapter,
        scale,
        out,
        tokens,
        adapters,
        rank,
        outputs,
        BLOCK_N=_BLOCK_N,
        num_warps=4,
        **shape,
        **options,
    )
    return out


@triton.jit(do_not_specialize=["tokens", "adapters"])
def _shrink(
    x_ptr,
    a_ptr,
    adapter_ptr,
    low_ptr,
    tokens,
    adapters,
    rank,
    inputs,
    TOKENS_AT_ONCE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    m = tl.program_id(0) * TOKENS_AT_ONCE + tl.arange(0, TOKENS_AT_ONCE)
    r = tl.arange(0, BLOCK_R)
    wait_for_inputs(OVERLAP)
    adapter = tl.load(adapter_ptr + m, mask=m < tokens, other=-1)
    total = tl.zeros((TOKENS_AT_ONCE, BLOCK_R), tl.float32)
    for number in range(adapters):
        mine = adapter == number
        if tl.max(mine.to(tl.int32), 0) > 0:
            acc = tl.zeros((TOKENS_AT_ONCE, BLOCK_R), tl.float32)
            for start in range(0, inputs, BLOCK_K):
                k = start + tl.arange(0, BLOCK_K)
                inside = k < inputs
                x = tl.load(
                    x_ptr + m.to(tl.int64)[:, None] * inputs + k[None, :],
                    mask=mine[:, None] & inside[None, :],
                    other=0.0,
                )
                a_place = a_ptr + (number * rank + r[None, :]) * inputs + k[:, None]
                a = tl.load(a_place, mask=(r < rank)[None, :] & inside[:, None], other=0.0)
                acc = tl.dot(x, a, acc, input_precision=PRECISION)
            total += acc
    tl.store(low_ptr + m[:, None] * rank + r[None, :], total, mask=(m < tokens)[:, None] & (r < rank)[None, :])


@triton.jit(do_not_specialize=["tokens", "adapters"])
def _expand(
    y_ptr,
    low_ptr,
    b_ptr,
    adapter_ptr,
    scale_ptr,
    out_ptr,
    tokens,
    adapters,
    rank,
    outputs,
    TOKENS_AT_ONCE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    m = tl.program_id(0) * TOKENS_AT_ONCE + tl.arange(0, TOKENS_AT_ONCE)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.arange(0, BLOCK_R)
    inside = (m < tokens)[:, None] & (n < outputs)[None, :]
    wait_for_inputs(OVERLAP)
    adapter = tl.load(adapter_ptr + m, mask=m < tokens, other=-1)
    place = m.to(tl.int64)[:, None] * outputs + n[None, :]
    total = tl.load(y_ptr + place, mask=inside, other=0.0).to(tl.float32)
    low = tl.load(low_ptr + m[:, None] * rank + r[None, :], mask=(m < tokens)[:, None] & (r < rank)[None, :], other=0.0)
    for number in range(adapters):
        mine = adapter == number
        if tl.max(mine.to(tl.int32), 0) > 0:
            b_place = b_ptr + (number * outputs + n[None, :]).to(tl.int64) * rank + r[:, None]
            b = tl.load(b_place, mask=(r < rank)[:, None] & (n < outputs)[None, :], other=0.0)
            part = tl.dot(tl.where(mine[:, None], low, 0.0), b.to(tl.float32), input_precision=PRECISION)
            total += part * tl.load(scale_ptr + number)
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=inside)
