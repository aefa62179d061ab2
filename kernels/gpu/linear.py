"""Twins of `kernels.linear`: clusters of blocks on Hopper, weight streaming for few tokens elsewhere, cuBLAS for many.

Which is used follows from the shape and the number of tokens, by the times of `tests.bench.gpu.kernels`, which stand in
docs/benchmarks/gpu.md beside PyTorch's.

Streaming: up to some 64 tokens a product is one pass over its weights, and what counts is bytes in flight. The weights
are the left operand, so that they fill the 64 rows of a Hopper matrix instruction and the tokens are its short side.
Outputs too narrow to occupy the device are cut along the inputs; the last program to finish adds the parts in their
order, so a result does not depend on who was first.
"""

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import clusters
from kernels.gpu.overlap import overlap_options, wait_for_inputs
from kernels.gpu.swiglu import swiglu
from kernels.unscaled import Unscaled

# Up to here streaming is as fast as cuBLAS or faster: where the gate is fused or the output is wide,
# and for narrow outputs, whose programs have to share a tile.
_MAX_TOKENS_WIDE = 64
_MAX_TOKENS_NARROW = 32
_WIDE_TILES = clusters.WIDE // 64

# Up to here clusters are faster than either; smaller weights and wider outputs without a gate were not timed.
_MAX_TOKENS_GATED = 2048
_MAX_TOKENS_PLAIN = 352
_MAX_TOKENS_OF_FEW_OUTPUTS = 384
_FEW_OUTPUTS = 5120
_LEAST_WEIGHTS = 2**24
_WIDEST = 2**15
"""Outputs without a gate: those of a gate that adapters stand before are some 25,000. Heads are as fast by cuBLAS."""
_MAX_TOKENS_ANYWAY = 256
_ENOUGH_WORK = 0.9
"""Of the multiprocessors in each turn."""

_FOLDED = range(1, 129)
"""Numbers of tokens for which steps of an 8B are faster with the norms between products folded in. Of 192 they were as
fast, of 256 slower (docs/benchmarks)."""


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
    tiling = _clusters(x, weight, gated=False)
    if tiling is not None:
        return clusters.multiply(x, weight, bias, tiling, gated=False)
    if not _streams(x, weight, gated=False):
        return F.linear(x, weight, bias)
    return stream(x, weight, bias, choose_tiling(weight.shape[0], x.shape[1], x.shape[0], gated=False), gated=False)


def gated_linear(x: Tensor, weight: Tensor) -> Tensor:
    tiling = _clusters(x, weight, gated=True)
    if tiling is not None:
        return clusters.multiply(x, weight, None, tiling, gated=True)
    if not _streams(x, weight, gated=True):
        return swiglu(F.linear(x, weight))
    inner = weight.shape[0] // 2
    return stream(x, weight, None, choose_tiling(inner, x.shape[1], x.shape[0], gated=True), gated=True)


def folds(x: Tensor, weight: Tensor, reader: Tensor, *, gated: bool) -> bool:
    return (
        x.dtype == torch.bfloat16
        and x.shape[0] in _FOLDED
        and _clusters(x, weight, gated=False) is not None
        and clusters.addresses(reader, gated=gated)
        and choose_clusters(x.shape[0], *reader.shape, clusters.room_of(x.device), gated=gated) is not None
    )


def unscaled_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Unscaled, Tensor]:
    values, squares, total = clusters.add(x, weight, bias, residual, norm_weight, _known(x, weight, gated=False))
    return Unscaled(values, squares, eps), total


def scaled_linear(values: Tensor, squares: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    tiling = _known(values, weight, gated=False)
    return clusters.multiply(values, weight, bias, tiling, gated=False, squares=squares, eps=eps)


def scaled_gated_linear(values: Tensor, squares: Tensor, eps: float, weight: Tensor) -> Tensor:
    tiling = _known(values, weight, gated=True)
    return clusters.multiply(values, weight, None, tiling, gated=True, squares=squares, eps=eps)


def _known(x: Tensor, weight: Tensor, *, gated: bool) -> clusters.Tiling:
    """Return the tiling of a product that `folds` has been asked about."""
    tiling = _clusters(x, weight, gated=gated)
    if tiling is None:
        raise ValueError(f"x {list(x.shape)} times weight {list(weight.shape)} does not go by clusters")
    return tiling


def _streams(x: Tensor, weight: Tensor, *, gated: bool) -> bool:
    wide = gated or weight.shape[0] >= clusters.WIDE
    limit = _MAX_TOKENS_WIDE if wide else _MAX_TOKENS_NARROW
    if gated and weight.numel() >= _LEAST_WEIGHTS and clusters.able(x.device):
        # Its outputs were too few for clusters. Half of an 8B's: cuBLAS reads 3.3 TB/s of an H200's 3.8.
        return False
    return 0 < x.shape[0] <= limit and x.dtype in (torch.bfloat16, torch.float16) and weight.is_contiguous()


def _clusters(x: Tensor, weight: Tensor, *, gated: bool) -> clusters.Tiling | None:
    if not clusters.able(x.device) or not clusters.fits(x, weight, gated=gated):
        return None
    return choose_clusters(x.shape[0], *weight.shape, clusters.room_of(x.device), gated=gated)


def choose_clusters(tokens: int, rows: int, inputs: int, room: clusters.Room, *, gated: bool) -> clusters.Tiling | None:
    """Return by which clusters to multiply; None where streaming or cuBLAS is as fast, or nothing was timed."""
    wide = not gated and rows >= clusters.WIDE
    if gated:
        least, most = 1, _MAX_TOKENS_GATED
    elif wide:
        least, most = _MAX_TOKENS_WIDE + 1, _MAX_TOKENS_GATED
    else:
        least, most = 1, _MAX_TOKENS_OF_FEW_OUTPUTS if rows <= _FEW_OUTPUTS else _MAX_TOKENS_PLAIN
    if not least <= tokens <= most or rows * inputs < _LEAST_WEIGHTS or (wide and rows > _WIDEST):
        return None
    tiling = clusters.choose(rows, inputs, tokens, room, gated=gated)
    # The copy engine is slow outside of an array: a tile that the tokens fill by half at most loses to cuBLAS.
    if gated and tiling.tokens >= 2 * max(tokens, clusters.LEAST_TOKENS):
        return None
    # Where they gain little over cuBLAS, a last turn of few tiles costs more.
    close = wide or (not gated and rows > _FEW_OUTPUTS and tokens > _MAX_TOKENS_ANYWAY)
    return None if close and clusters.share_of_turns(tiling, rows, tokens, room) < _ENOUGH_WORK else tiling


def choose_tiling(columns: int, inputs: int, tokens: int, *, gated: bool) -> Tiling:
    """Return a tiling with one to two programs for each multiprocessor, and some 100 KiB of each on the way."""
    tiles = triton.cdiv(columns, 64)
    if gated and tokens > 32:
        return Tiling(64, 64, 1, 4, 4)
    if gated or tiles >= _WIDE_TILES or inputs < 1024:
        return Tiling(64, 128, 1, 4, 3)
    return Tiling(64, 128, 2, 4, 3) if tiles >= 96 else Tiling(64, 64, 2, 4, 6)


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
        EVEN=columns % tiling.block_n == 0 and inputs % (tiling.block_k * tiling.splits) == 0,
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
