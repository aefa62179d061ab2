"""Twin of `kernels.attention`: flash attention over pages, one kernel for every family.

The query heads that share a KV head are packed into the rows of one tile, so a block of 32 positions under a 4:1
grouping fills a tile of 128. Small batches split the context (flash decoding) and merge the parts in a second kernel.
Splits are cut on the device from the visible ends, so a captured graph serves any context.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention import AttentionPlan
from kernels.attention import attention as reference
from kernels.gpu.overlap import overlap_options, wait_for_inputs

_LOG2_E = 1.4426950408889634
_MAX_SPLITS = 16
_LONG = 1024
"""Packed rows from which up a row is a prompt's."""


@dataclass(frozen=True, slots=True)
class Tile:
    block_m: int
    """Packed rows: queries times the heads that share a KV head."""
    block_n: int
    """Keys taken in at once."""
    warps: int
    stages: int
    ahead: bool = False
    """Read page numbers a round ahead, so that keys and values have their addresses when it is time to ask for them:
    three buffers then fill while one is used, instead of one."""


def attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, plan: AttentionPlan, scale: float, scales: Tensor | None = None
) -> Tensor:
    if plan.visible_start is not None:
        # Sliding windows hide the beginning of a context, which this kernel cannot.
        return reference(q, k_pages, v_pages, plan, scale, scales)
    tokens, heads, head_dim = q.shape
    _, page_size, kv_heads, kv_dim = k_pages.shape
    if heads % kv_heads or kv_dim != head_dim or v_pages.shape != k_pages.shape:
        raise ValueError(f"queries {list(q.shape)} do not go with pages {list(k_pages.shape)}")
    if not (k_pages.is_contiguous() and v_pages.is_contiguous()):
        raise ValueError("pages must be contiguous")
    if q.stride(-1) != 1:
        q = q.contiguous()
    out = torch.empty((tokens, heads, head_dim), dtype=q.dtype, device=q.device)
    rows, width = plan.page_table.shape
    longest = max((group.query for group in plan.groups), default=0)
    if not tokens or not longest:
        return out

    packed = longest * (heads // kv_heads)
    tile = choose_tile(packed, head_dim, q.element_size())
    programs = rows * triton.cdiv(packed, tile.block_m) * kv_heads
    splits = choose_splits(programs, triton.cdiv(width * page_size, tile.block_n), q.device)
    return attend(q, k_pages, v_pages, plan, scale, longest, tile, splits, out, scales)


def attend(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    plan: AttentionPlan,
    scale: float,
    longest: int,
    tile: Tile,
    splits: int,
    out: Tensor,
    scales: Tensor | None = None,
) -> Tensor:
    """Attend with a given tile and number of splits, a power of two; fill `out` and return it."""
    tokens, heads, head_dim = q.shape
    _, page_size, kv_heads, _ = k_pages.shape
    rows = plan.page_table.shape[0]
    tiles = triton.cdiv(longest * (heads // kv_heads), tile.block_m)
    block_d = _block_d(head_dim)
    if splits == 1:
        parts = stats = out
    else:
        parts = torch.empty((splits, tokens, heads, head_dim), dtype=torch.float32, device=q.device)
        stats = torch.empty((2, splits, tokens, heads), dtype=torch.float32, device=q.device)
    options = overlap_options(q.device)
    _attend[(rows * tiles, kv_heads, splits)](
        q,
        k_pages,
        v_pages,
        out,
        parts,
        stats,
        plan.row_offsets,
        plan.visible_end,
        plan.page_table,
        q if scales is None else scales,
        scale * _LOG2_E,
        tokens,
        q.stride(0),
        q.stride(1),
        plan.page_table.stride(0),
        tiles,
        k_pages.shape[0] * page_size * kv_heads,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PAGE=page_size,
        SPLITS=splits,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=block_d,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        AHEAD=tile.ahead,
        SMALL=scales is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **options,
    )
    if splits > 1:
        _merge[(tokens, heads)](
            parts,
            stats,
            out,
            tokens,
            HEADS=heads,
            HEAD_DIM=head_dim,
            SPLITS=splits,
            BLOCK_D=block_d,
            num_warps=1,
            **options,
        )
    return out


def choose_tile(packed: int, head_dim: int, element_size: int) -> Tile:
    """Return a tile by what fits 227 KiB of shared memory."""
    block_m = 16 if packed <= 16 else 64
    if element_size > 2:
        # float32 is for comparisons; its products do not run on the matrix units.
        return Tile(min(block_m, 32), 32, 4, 1)
    if head_dim > 128:
        return Tile(block_m, 32, 4, 2)
    if block_m == 16:
        return Tile(16, 64, 2, 4)
    # Measured (docs/benchmarks): two programs of 64 rows hide each other's softmax, prompts are long enough for 128.
    return Tile(128, 64, 8, 3, True) if packed >= _LONG else Tile(64, 64, 4, 3, True)


def choose_splits(programs: int, context_tiles: int, device: torch.device) -> int:
    """Return in how many parts to cut the context: as many as still run side by side."""
    bound = max(1, min(_multiprocessors(device) // max(1, programs), context_tiles, _MAX_SPLITS))
    return 1 << (bound.bit_length() - 1)


def _block_d(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 16


@triton.jit(do_not_specialize=["tokens", "tiles", "table_stride"])
def _attend(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    parts_ptr,
    stats_ptr,
    offsets_ptr,
    ends_ptr,
    table_ptr,
    scales_ptr,
    scale,
    tokens,
    token_stride,
    head_stride,
    table_stride,
    tiles,
    value_scales,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    AHEAD: tl.constexpr,
    SMALL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    GROUP: tl.constexpr = HEADS // KV_HEADS
    row = tl.program_id(0) // tiles
    # The last tile of a row sees most: it starts first.
    tile = tiles - 1 - tl.program_id(0) % tiles
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    wait_for_inputs(OVERLAP)
    first = tl.load(offsets_ptr + row)
    behind = tl.load(offsets_ptr + row + 1)
    if first + tile * BLOCK_M // GROUP >= behind:
        return

    packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = first + packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    live = token < behind
    ends = tl.load(ends_ptr + token, mask=live, other=0)
    top = tl.max(ends, 0)
    low = tl.min(tl.where(live, ends, top), 0)
    share = tl.cdiv(tl.cdiv(top, BLOCK_N), SPLITS) * BLOCK_N
    begin = tl.minimum(split * share, top)
    stop = tl.minimum(begin + share, top)
    # Up to here every query of the tile sees every key.
    clear = tl.minimum(tl.maximum(low // BLOCK_N * BLOCK_N, begin), stop)

    d = tl.arange(0, BLOCK_D)
    q_place = token.to(tl.int64)[:, None] * token_stride + head[:, None] * head_stride + d[None, :]
    q = tl.load(q_ptr + q_place, mask=live[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    pages = table_ptr + row * table_stride
    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    mass = tl.zeros((BLOCK_M,), tl.float32)
    mixed = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    lane = tl.arange(0, BLOCK_N)
    if AHEAD:
        ahead = tl.load(pages + (begin + lane) // PAGE, mask=begin + lane < top, other=0)
    for n in range(begin, clear, BLOCK_N):
        if AHEAD:
            page = ahead
            ahead = tl.load(pages + (n + BLOCK_N + lane) // PAGE, mask=n + BLOCK_N + lane < top, other=0)
        else:
            page = tl.load(pages + (n + lane) // PAGE)
        best, mass, mixed = _take_in(
            best, mass, mixed, q, k_ptr, v_ptr, page, n, kv_head, ends, top, scale, scales_ptr, value_scales,
            KV_HEADS, HEAD_DIM, PAGE, BLOCK_N, BLOCK_D, PRECISION, SMALL, False,
        )  # fmt: skip
    for n in range(clear, stop, BLOCK_N):
        if AHEAD:
            page = ahead
            ahead = tl.load(pages + (n + BLOCK_N + lane) // PAGE, mask=n + BLOCK_N + lane < top, other=0)
        else:
            page = tl.load(pages + (n + lane) // PAGE, mask=n + lane < top, other=0)
        best, mass, mixed = _take_in(
            best, mass, mixed, q, k_ptr, v_ptr, page, n, kv_head, ends, top, scale, scales_ptr, value_scales,
            KV_HEADS, HEAD_DIM, PAGE, BLOCK_N, BLOCK_D, PRECISION, SMALL, True,
        )  # fmt: skip

    pair = token.to(tl.int64) * HEADS + head
    place = pair[:, None] * HEAD_DIM + d[None, :]
    inside = live[:, None] & (d < HEAD_DIM)[None, :]
    if SPLITS == 1:
        tl.store(out_ptr + place, (mixed / mass[:, None]).to(q.dtype), mask=inside)
    else:
        pairs = tokens.to(tl.int64) * HEADS
        tl.store(stats_ptr + split * pairs + pair, best, mask=live)
        tl.store(stats_ptr + (SPLITS + split) * pairs + pair, mass, mask=live)
        tl.store(parts_ptr + split * pairs * HEAD_DIM + place, mixed, mask=inside)


@triton.jit
def _take_in(
    best,
    mass,
    mixed,
    q,
    k_ptr,
    v_ptr,
    page,
    n,
    kv_head,
    ends,
    top,
    scale,
    scales_ptr,
    value_scales,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    SMALL: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Add BLOCK_N keys from n on to the running softmax; EDGE: some query does not see all of them."""
    position = n + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    pair = (page.to(tl.int64) * PAGE + position % PAGE) * KV_HEADS + kv_head
    slot = pair * HEAD_DIM
    k_place = k_ptr + slot[None, :] + d[:, None]
    v_place = v_ptr + slot[:, None] + d[None, :]
    if EDGE or HEAD_DIM != BLOCK_D:
        # A slot behind the last visible one may hold anything, NaN included: it is not even read.
        known = position < top
        k = tl.load(k_place, mask=known[None, :] & (d < HEAD_DIM)[:, None], other=0.0)
        v = tl.load(v_place, mask=known[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    else:
        k = tl.load(k_place)
        v = tl.load(v_place)
    if SMALL:
        # Scaled are the scores and the weights, [.., keys] both, rather than keys and values of HEAD_DIM numbers.
        k = k.to(q.dtype)
        v = v.to(q.dtype)
        if EDGE:
            k_scale = tl.load(scales_ptr + pair, mask=position < top, other=0.0)
            v_scale = tl.load(scales_ptr + value_scales + pair, mask=position < top, other=0.0)
        else:
            k_scale = tl.load(scales_ptr + pair)
            v_scale = tl.load(scales_ptr + value_scales + pair)
    score = tl.dot(q, k, input_precision=PRECISION) * scale
    if SMALL:
        score *= k_scale[None, :]
    if EDGE:
        score = tl.where(position[None, :] < ends[:, None], score, float("-inf"))
    new = tl.maximum(best, tl.max(score, 1))
    if EDGE:
        # A query that has seen nothing yet has no finite maximum to subtract.
        base = tl.where(new == float("-inf"), 0.0, new)
    else:
        base = new
    weight = tl.exp2(score - base[:, None])
    fade = tl.exp2(best - base)
    mass = mass * fade + tl.sum(weight, 1)
    mixed = mixed * fade[:, None]
    if SMALL:
        weight *= v_scale[None, :]
    mixed = tl.dot(weight.to(v.dtype), v, mixed, input_precision=PRECISION)
    return new, mass, mixed


@triton.jit(do_not_specialize=["tokens"])
def _merge(
    parts_ptr,
    stats_ptr,
    out_ptr,
    tokens,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    pairs = tokens.to(tl.int64) * HEADS
    split = tl.arange(0, SPLITS)
    d = tl.arange(0, BLOCK_D)
    wait_for_inputs(OVERLAP)
    best = tl.load(stats_ptr + split * pairs + pair)
    mass = tl.load(stats_ptr + (SPLITS + split) * pairs + pair)
    weight = tl.where(mass > 0, tl.exp2(best - tl.max(best, 0)), 0.0)
    inside = (mass > 0)[:, None] & (d < HEAD_DIM)[None, :]
    part = tl.load(parts_ptr + (split[:, None] * pairs + pair) * HEAD_DIM + d[None, :], mask=inside, other=0.0)
    mixed = tl.sum(part * weight[:, None], 0) / tl.sum(mass * weight, 0)
    tl.store(out_ptr + pair * HEAD_DIM + d, mixed.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)
