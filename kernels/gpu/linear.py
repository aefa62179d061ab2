"""Twins of `kernels.linear`: weight streaming for few tokens, cuBLAS for many.

Up to some 64 tokens a product is one pass over its weights, and what counts is bytes in flight. The weights are the
left operand, so that they fill the 64 rows of a Hopper matrix instruction and the tokens are its short side. Outputs
too narrow to occupy the device are cut along the inputs; the last program to finish adds the parts in their order, so
a result does not depend on who was first.
"""

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.overlap import overlap_options, prefetch_rows, release_next, wait_for_inputs
from kernels.gpu.swiglu import swiglu

# Above this cuBLAS, whose tiles reuse what they load, is as fast or faster (docs/benchmarks).
MAX_TOKENS = 64
# Weights of a row that are asked for in advance: 1 KiB.
_PREFETCH = 512


@dataclass(frozen=True, slots=True)
class Tiling:
    block_n: int
    """Output columns of a program."""
    block_k: int
    splits: int
    """Programs that share an output tile, each a stretch of the inputs."""
    warps: int
    stages: int


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not _streams(x, weight):
        return F.linear(x, weight, bias)
    return stream(x, weight, bias, choose_tiling(weight.shape[0], x.shape[1], x.shape[0], gated=False), gated=False)


def gated_linear(x: Tensor, weight: Tensor) -> Tensor:
    if not _streams(x, weight):
        return swiglu(F.linear(x, weight))
    inner = weight.shape[0] // 2
    return stream(x, weight, None, choose_tiling(inner, x.shape[1], x.shape[0], gated=True), gated=True)


def _streams(x: Tensor, weight: Tensor) -> bool:
    tokens = x.shape[0]
    return 0 < tokens <= MAX_TOKENS and x.dtype in (torch.bfloat16, torch.float16) and weight.is_contiguous()


def choose_tiling(columns: int, inputs: int, tokens: int, *, gated: bool) -> Tiling:
    """Return a tiling that keeps two to three programs for each multiprocessor in flight."""
    block_n = 64
    tiles = triton.cdiv(columns, block_n)
    splits = 1
    while tiles * splits < 192 and inputs // (splits * 2) >= 512 and splits < 8:
        splits *= 2
    return Tiling(block_n, 64 if gated else 128, splits, 4, 4 if gated else 3)


def stream(x: Tensor, weight: Tensor, bias: Tensor | None, tiling: Tiling, *, gated: bool) -> Tensor:
    """Multiply by the streaming kernel with a given tiling; `gated` as in `gated_linear`."""
    tokens, inputs = x.shape
    rows, weight_inputs = weight.shape
    if weight_inputs != inputs or (gated and rows % 2):
        raise ValueError(f"x {list(x.shape)} does not go with weight {list(weight.shape)}")
    if x.stride(-1) != 1:
        x = x.contiguous()
    columns = rows // 2 if gated else rows
    block_m = max(16, triton.next_power_of_2(tokens))
    tiles = triton.cdiv(columns, tiling.block_n)
    out = torch.empty((tokens, columns), dtype=x.dtype, device=x.device)
    parts = counters = out
    if tiling.splits > 1:
        halves = 2 if gated else 1
        shape = (tiling.splits, halves, tiles, tiling.block_n, block_m)
        parts = torch.empty(shape, dtype=torch.float32, device=x.device)
        counters = _counters(x.device)
        if tiles > counters.numel():
            raise ValueError(f"{tiles} tiles are too many to be split")
    share = triton.cdiv(triton.cdiv(inputs, tiling.block_k), tiling.splits) * tiling.block_k
    _stream[(tiles, tiling.splits)](
        x,
        weight,
        out if bias is None else bias,
        out,
        parts,
        counters,
        tokens,
        columns,
        inputs,
        x.stride(0),
        share,
        SPLITS=tiling.splits,
        BIAS=bias is not None,
        GATED=gated,
        EVEN=columns % tiling.block_n == 0 and inputs % (tiling.block_k * tiling.splits) == 0 and share >= _PREFETCH,
        BLOCK_M=block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **overlap_options(x.device),
    )
    return out


@functools.cache
def _counters(device: torch.device) -> Tensor:
    """Return zeros that every kernel leaves as zeros; kernels of one stream never run at the same time."""
    return torch.zeros(4096, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["tokens"])
def _stream(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    parts_ptr,
    counters_ptr,
    tokens,
    columns,
    inputs,
    x_stride,
    share,
    SPLITS: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    release_next(OVERLAP)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    begin = split * share
    stop = tl.minimum(begin + share, inputs)
    k = begin + tl.arange(0, BLOCK_K)
    w_place = weight_ptr + n.to(tl.int64)[:, None] * inputs + k[None, :]
    x_place = x_ptr + m[None, :] * x_stride + k[:, None]
    gate_offset = columns.to(tl.int64) * inputs

    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    acc_up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if OVERLAP and EVEN:
        # The memory would idle while the kernels before this one attend and norm.
        ahead = weight_ptr + n.to(tl.int64) * inputs + begin
        prefetch_rows(ahead)
        if GATED:
            prefetch_rows(ahead + gate_offset)
    wait_for_inputs(OVERLAP)
    for start in range(begin, stop, BLOCK_K):
        if EVEN:
            w = tl.load(w_place)
            x = tl.load(x_place, mask=m[None, :] < tokens, other=0.0)
        else:
            inside = start + tl.arange(0, BLOCK_K) < stop
            w_mask = (n < columns)[:, None] & inside[None, :]
            w = tl.load(w_place, mask=w_mask, other=0.0)
            x = tl.load(x_place, mask=(m[None, :] < tokens) & inside[:, None], other=0.0)
        acc = tl.dot(w, x, acc)
        if GATED:
            if EVEN:
                up = tl.load(w_place + gate_offset)
            else:
                up = tl.load(w_place + gate_offset, mask=w_mask, other=0.0)
            acc_up = tl.dot(up, x, acc_up)
        w_place += BLOCK_K
        x_place += BLOCK_K

    if SPLITS > 1:
        tiles = tl.num_programs(0)
        halves: tl.constexpr = 2 if GATED else 1
        inner = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
        mine = parts_ptr + ((split * halves) * tiles + tile) * (BLOCK_N * BLOCK_M) + inner
        tl.store(mine, acc)
        if GATED:
            tl.store(mine + tiles * (BLOCK_N * BLOCK_M), acc_up)
        # Every thread's parts are written before the count says so.
        tl.debug_barrier()
        done = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel")
        if done < SPLITS - 1:
            return
        tl.store(counters_ptr + tile, 0)
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        acc_up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for part in range(SPLITS):
            theirs = parts_ptr + ((part * halves) * tiles + tile) * (BLOCK_N * BLOCK_M) + inner
            acc += tl.load(theirs, cache_modifier=".cg")
            if GATED:
                acc_up += tl.load(theirs + tiles * (BLOCK_N * BLOCK_M), cache_modifier=".cg")

    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < columns, other=0.0).to(tl.float32)[:, None]
    if GATED:
        acc = acc * tl.sigmoid(acc) * acc_up
    place = out_ptr + m.to(tl.int64)[:, None] * columns + n[None, :]
    tl.store(place, tl.trans(acc).to(out_ptr.dtype.element_ty), mask=(m < tokens)[:, None] & (n < columns)[None, :])
