"""Twin of `kernels.lora`: a tile of tokens passes over the adapters that occur in it, usually one."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.overlap import overlap_options, wait_for_inputs

_BLOCK_M = 16
_BLOCK_N = 128
_BLOCK_K = 128
# Wider adapters pass in parts, so that a tile of theirs fits beside one of the inputs.
_MOST_R = 64
# The inner product is cut until so many programs share it: a decode step has only a few tiles of tokens. No part is
# shorter than this many inputs. The parts are added in order, so that a step gives the same sums each time.
_PROGRAMS = 256
_LEAST_K = 512


def lora(y: Tensor, x: Tensor, a: Tensor, b: Tensor, adapter: Tensor, scale: Tensor) -> Tensor:
    tokens, outputs = y.shape
    adapters, rank, inputs = a.shape
    if x.shape != (tokens, inputs) or b.shape != (adapters, outputs, rank) or adapter.shape != (tokens,):
        raise ValueError(f"y {list(y.shape)}, x {list(x.shape)}, a {list(a.shape)} and b {list(b.shape)} do not match")
    y, x, a, b = (t if t.is_contiguous() else t.contiguous() for t in (y, x, a, b))
    out = torch.empty_like(y)
    if not tokens:
        return out
    block_r = min(_MOST_R, max(16, triton.next_power_of_2(rank)))
    tiles, parts_r = triton.cdiv(tokens, _BLOCK_M), triton.cdiv(rank, block_r)
    parts_k = max(1, min(_PROGRAMS // (tiles * parts_r), triton.cdiv(inputs, _LEAST_K)))
    part = triton.cdiv(triton.cdiv(inputs, parts_k), _BLOCK_K) * _BLOCK_K
    parts_k = triton.cdiv(inputs, part)
    low = torch.empty((parts_k, tokens, rank), dtype=torch.float32, device=y.device)
    shape = {
        "TOKENS_AT_ONCE": _BLOCK_M,
        "BLOCK_R": block_r,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
    }
    options = overlap_options(y.device)
    _shrink[(tiles, parts_r, parts_k)](
        x, a, adapter, low, tokens, adapters, rank, inputs, part, BLOCK_K=_BLOCK_K, num_warps=4, **shape, **options
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
        parts_k,
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
    part,
    TOKENS_AT_ONCE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    m = tl.program_id(0) * TOKENS_AT_ONCE + tl.arange(0, TOKENS_AT_ONCE)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    wait_for_inputs(OVERLAP)
    adapter = tl.load(adapter_ptr + m, mask=m < tokens, other=-1)
    total = tl.zeros((TOKENS_AT_ONCE, BLOCK_R), tl.float32)
    first = tl.program_id(2) * part
    for number in range(adapters):
        mine = adapter == number
        if tl.max(mine.to(tl.int32), 0) > 0:
            acc = tl.zeros((TOKENS_AT_ONCE, BLOCK_R), tl.float32)
            for start in range(0, part, BLOCK_K):
                k = first + start + tl.arange(0, BLOCK_K)
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
    low_ptr += tl.program_id(2) * tokens * rank
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
    parts_k,
    TOKENS_AT_ONCE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    m = tl.program_id(0) * TOKENS_AT_ONCE + tl.arange(0, TOKENS_AT_ONCE)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (m < tokens)[:, None] & (n < outputs)[None, :]
    wait_for_inputs(OVERLAP)
    adapter = tl.load(adapter_ptr + m, mask=m < tokens, other=-1)
    place = m.to(tl.int64)[:, None] * outputs + n[None, :]
    total = tl.load(y_ptr + place, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + m, mask=m < tokens, other=0.0)
    for first in range(0, rank, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        held = (m < tokens)[:, None] & (r < rank)[None, :]
        low = tl.zeros((TOKENS_AT_ONCE, BLOCK_R), tl.float32)
        for part in range(parts_k):
            place_low = low_ptr + (part * tokens + m[:, None]) * rank + r[None, :]
            low += tl.load(place_low, mask=held, other=0.0)
        low *= scale[:, None]
        for number in range(adapters):
            mine = adapter == number
            if tl.max(mine.to(tl.int32), 0) > 0:
                b_place = b_ptr + (number * outputs + n[None, :]).to(tl.int64) * rank + r[:, None]
                b = tl.load(b_place, mask=(r < rank)[:, None] & (n < outputs)[None, :], other=0.0)
                total += tl.dot(tl.where(mine[:, None], low, 0.0), b.to(tl.float32), input_precision=PRECISION)
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=inside)
