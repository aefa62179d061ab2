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
from kernels.gpu.overlap import overlap_options, release_and_wait

_LOG2_E = 1.4426950408889634
_MAX_SPLITS = 16
_LEAST = tl.constexpr(-3.0e38)
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
    registers: int | None = None
    """Most of a thread, where that lets two programs share a multiprocessor."""


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
    if scale <= 0:
        raise ValueError(f"scale {scale} is not positive")
    if q.stride(-1) != 1:
        q = q.contiguous()
    out = torch.empty((tokens, heads, head_dim), dtype=q.dtype, device=q.device)
    width = plan.page_table.shape[1]
    longest = max((group.query for group in plan.groups), default=0)
    if not tokens or not longest:
        return out

    packed = longest * (heads // kv_heads)
    element = q.element_size()
    # Some rows may be shorter, or ask for nothing: so many of the longest have as much to do.
    pairs = triton.cdiv(tokens, longest) * kv_heads
    tile = choose_tile(packed, pairs, head_dim, element, _multiprocessors(q.device), small=scales is not None)
    programs = pairs * triton.cdiv(packed, tile.block_m)
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
    programs = rows * tiles * kv_heads
    _attend[(programs * splits,)](
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
        programs,
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
        maxnreg=tile.registers,
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


def choose_tile(
    packed: int, pairs: int, head_dim: int, element_size: int, multiprocessors: int, *, small: bool = False
) -> Tile:
    """Return a tile by what fits 227 KiB of shared memory. `pairs` are rows times KV heads; `small`: keys and values
    have 8 bits."""
    block_m = 16 if packed <= 16 else 64
    if element_size > 2:
        # float32 is for comparisons; its products do not run on the matrix units.
        return Tile(min(block_m, 32), 32, 4, 1)
    if head_dim > 128:
        return Tile(block_m, 32, 4, 2)
    if block_m == 16:
        if small:
            return Tile(16, 64, 2, 4)
        # Blocks of 4 with 8 KV heads: 97.7 and 51.2 us for 64 and 32 rows, 100.2 and 52.2 by the best of 64 keys.
        return Tile(16, 32, 4, 3, True) if pairs > multiprocessors else Tile(16, 64, 4, 3, True)
    # Measured (docs/benchmarks). Two programs share a multiprocessor, so that one multiplies while the other weighs.
    # Of twice the rows, keys and values come out of the second-level cache half as often; but a turn of such tiles, two
    # for each multiprocessor, takes as long as it does when it is full.
    if not small and packed >= _LONG:
        return Tile(128, 64, 8, 2, True, 128)
    tiles, turn = pairs * packed // 128, 2 * multiprocessors
    if not small and packed % 128 == 0 and 4 * tiles >= 3 * turn * triton.cdiv(tiles, turn):
        return Tile(128, 32, 8, 3, True, 128)
    return Tile(64, 64, 4, 3, True)


def choose_splits(programs: int, context_tiles: int, device: torch.device) -> int:
    """Return in how many parts to cut the context: as many as still run side by side."""
    bound = max(1, min(_multiprocessors(device) // max(1, programs), context_tiles, _MAX_SPLITS))
    return 1 << (bound.bit_length() - 1)


def _block_d(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 16


@triton.jit(do_not_specialize=["tokens", "tiles", "table_stride", "programs"])
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
    programs,
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
    # Heads first: the programs that run together then read whole pages. Splits last: those of a tile end together.
    split = tl.program_id(0) // programs
    number = tl.program_id(0) % programs
    kv_head = number % KV_HEADS
    row = number // KV_HEADS // tiles
    # The last tile of a row sees most: it starts first.
    tile = tiles - 1 - number // KV_HEADS % tiles
    # The plan is the step's, older than the kernel in front: it is read while that one ends.
    first = tl.load(offsets_ptr + row)
    behind = tl.load(offsets_ptr + row + 1)
    packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = first + packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    live = token < behind
    ends = tl.load(ends_ptr + token, mask=live, other=0)
    top = tl.max(ends, 0)
    share = tl.cdiv(tl.cdiv(top, BLOCK_N), SPLITS) * BLOCK_N
    begin = tl.minimum(split * share, top)
    stop = tl.minimum(begin + share, top)
    table = table_ptr + row * table_stride
    pages = _read_pages(table, begin, top, PAGE, BLOCK_N)
    # Every program waits, those without work too: kernels behind rely on this one for what stands before it.
    release_and_wait(OVERLAP)
    if first + tile * BLOCK_M // GROUP >= behind:
        return

    d = tl.arange(0, BLOCK_D)
    lane = tl.arange(0, BLOCK_N)
    q_place = token.to(tl.int64)[:, None] * token_stride + head[:, None] * head_stride + d[None, :]
    q = tl.load(q_ptr + q_place, mask=live[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    # Finite, so that a query that has seen nothing yet has a maximum to subtract.
    best = tl.full((BLOCK_M,), _LEAST, tl.float32)
    mass = tl.zeros((BLOCK_M,), tl.float32)
    mixed = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for n in range(begin, stop, BLOCK_N):
        if not AHEAD:
            pages = _read_pages(table, n, top, PAGE, BLOCK_N)
        slots = _find_slots(pages, n, kv_head, KV_HEADS, HEAD_DIM, PAGE, BLOCK_N)
        if AHEAD:
            pages = _read_pages(table, n + BLOCK_N, top, PAGE, BLOCK_N)
        # A slot behind the last visible one may hold anything, NaN included: it is not even read.
        known = n + lane < top
        k = _read_rows(k_ptr, slots, known, HEAD_DIM, BLOCK_N, BLOCK_D)
        v = _read_rows(v_ptr, slots, known, HEAD_DIM, BLOCK_N, BLOCK_D)
        if SMALL:
            k = k.to(q.dtype)
            v = v.to(q.dtype)
            k_scale = tl.load(scales_ptr + slots // HEAD_DIM, mask=known, other=0.0)
            v_scale = tl.load(scales_ptr + value_scales + slots // HEAD_DIM, mask=known, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if SMALL:
            # Scaled are the scores and the weights, [.., keys] both, rather than HEAD_DIM numbers of each key.
            score *= k_scale[None, :]
        score = tl.where((n + lane)[None, :] < ends[:, None], score, float("-inf"))
        best, mass, fade, weight = _weigh(score, best, mass, scale)
        if SMALL:
            weight *= v_scale[None, :]
        mixed = tl.dot(weight.to(v.dtype), v, mixed * fade[:, None], input_precision=PRECISION)

    pair = token.to(tl.int64) * HEADS + head
    place = pair[:, None] * HEAD_DIM + d[None, :]
    inside = live[:, None] & (d < HEAD_DIM)[None, :]
    if SPLITS == 1:
        tl.store(out_ptr + place, (mixed / mass[:, None]).to(q.dtype), mask=inside)
    else:
        pairs = tokens.to(tl.int64) * HEADS
        tl.store(stats_ptr + split * pairs + pair, best, mask=live)
        tl.store(stats_ptr + (SPLITS + split) * pairs + pair, mass, mask=live)
        if begin < stop:
            tl.store(parts_ptr + split * pairs * HEAD_DIM + place, mixed, mask=inside)


@triton.jit
def _read_pages(table, n, top, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the page of each key from n on: one number for all where they share it, a pair, or one for each."""
    if PAGE % BLOCK_N == 0:
        return tl.load(table + n // PAGE, mask=n < top, other=0)
    elif 2 * PAGE == BLOCK_N:
        one = tl.load(table + n // PAGE, mask=n < top, other=0)
        return one, tl.load(table + n // PAGE + 1, mask=n + PAGE < top, other=0)
    else:
        position = n + tl.arange(0, BLOCK_N)
        return tl.load(table + position // PAGE, mask=position < top, other=0)


@triton.jit
def _find_slots(
    pages,
    n,
    kv_head,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return where the head of each key from n on begins, [BLOCK_N] int64."""
    STRIDE: tl.constexpr = KV_HEADS * HEAD_DIM
    lane = tl.arange(0, BLOCK_N)
    if PAGE % BLOCK_N == 0:
        return (pages.to(tl.int64) * PAGE + n % PAGE) * STRIDE + (lane * STRIDE + kv_head * HEAD_DIM)
    elif 2 * PAGE == BLOCK_N:
        bases = tl.where(lane < PAGE, pages[0].to(tl.int64) * (PAGE * STRIDE), pages[1].to(tl.int64) * (PAGE * STRIDE))
        return bases + (lane % PAGE * STRIDE + kv_head * HEAD_DIM)
    else:
        return (pages.to(tl.int64) * PAGE + (n + lane) % PAGE) * STRIDE + kv_head * HEAD_DIM


@triton.jit
def _read_rows(ptr, slots, known, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return [BLOCK_N, BLOCK_D] keys or values; zeros for those that are not known."""
    d = tl.arange(0, BLOCK_D)
    known = known[:, None]
    if HEAD_DIM != BLOCK_D:
        known = known & (d < HEAD_DIM)[None, :]
    return tl.load(ptr + slots[:, None] + d[None, :], mask=known, other=0.0)


@triton.jit
def _weigh(score, best, mass, scale):
    """Return the running softmax's maximum and sum, by what it fades, and the weights of the new scores."""
    new = tl.maximum(best, tl.max(score, 1) * scale)
    weight = tl.exp2(score * scale - new[:, None])
    fade = tl.exp2(best - new)
    return new, mass * fade + tl.sum(weight, 1), fade, weight


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
    release_and_wait(OVERLAP)
    best = tl.load(stats_ptr + split * pairs + pair)
    mass = tl.load(stats_ptr + (SPLITS + split) * pairs + pair)
    weight = tl.where(mass > 0, tl.exp2(best - tl.max(best, 0)), 0.0)
    inside = (mass > 0)[:, None] & (d < HEAD_DIM)[None, :]
    part = tl.load(parts_ptr + (split[:, None] * pairs + pair) * HEAD_DIM + d[None, :], mask=inside, other=0.0)
    mixed = tl.sum(part * weight[:, None], 0) / tl.sum(mass * weight, 0)
    tl.store(out_ptr + pair * HEAD_DIM + d, mixed.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)
