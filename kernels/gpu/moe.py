"""Twins of `kernels.moe.experts` and `mix`: products grouped by expert, over the lists of `kernels.gpu.lists`."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.gpu.lists import Lists, collect, make_lists
from kernels.gpu.overlap import overlap_options, release_and_wait, wait_for_inputs
from kernels.gpu.router import choose
from kernels.moe import Router


def experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *, shared: bool = False) -> Tensor:
    tokens, top_k = ids.shape
    if ids.shape != weights.shape:
        raise ValueError(f"ids {list(ids.shape)} do not go with weights {list(weights.shape)}")
    if not tokens:
        return torch.empty_like(x)
    ids, weights = (t if t.is_contiguous() else t.contiguous() for t in (ids, weights))
    layout = _lay_out(x, top_k, gate_up, down, shared=shared)
    collect(ids, layout.lists)
    return _multiply_all(x, ids, weights, gate_up, down, layout)


def mix(
    x: Tensor,
    logits: Tensor,
    router: Router,
    gate_up: Tensor,
    down: Tensor,
    bias: Tensor | None = None,
    *,
    first: int = 0,
    shared: bool = False,
) -> Tensor:
    tokens = len(logits)
    if router.capacity:
        raise ValueError("a router with a capacity needs the blocks of its tokens")
    if not tokens:
        return torch.empty_like(x)
    logits = logits if logits.is_contiguous() else logits.contiguous()
    ids = torch.empty((tokens, router.top_k), dtype=torch.int32, device=x.device)
    weights = torch.empty((tokens, router.top_k), dtype=torch.float32, device=x.device)
    layout = _lay_out(x, router.top_k, gate_up, down, shared=shared, everywhere=logits.shape[1])
    choose(logits, router, bias, None, None, ids, weights, layout.lists, first)
    return _multiply_all(x, ids, weights, gate_up, down, layout)


@dataclass(frozen=True, slots=True)
class Tile:
    """How the products of many tokens are cut into programs."""

    tokens: int
    """Of an expert, all of them as a rule."""
    gate: int
    """Columns of the gate, and as many beside it, in a program of the first product."""
    down: int
    """Columns in a program of the second product."""
    inputs: int
    warps: int
    stages: int
    registers: int | None = None
    """The most that a thread may have; None: as the compiler likes."""


@dataclass(frozen=True, slots=True)
class _Layout:
    lists: Lists
    together: Tile | None
    """How both products go in one launch, if they do."""


def _lay_out(
    x: Tensor, top_k: int, gate_up: Tensor, down: Tensor, *, shared: bool, everywhere: int | None = None
) -> _Layout:
    """Return room for the lists of the tokens of x.

    `everywhere` are the experts that tokens choose from, None: those that lie here. Raises `ValueError` for shapes that
    do not go together.
    """
    tokens, hidden = x.shape
    stacked, double, width = gate_up.shape
    if width != hidden or down.shape != (stacked, hidden, double // 2):
        raise ValueError(f"x {list(x.shape)} does not go with experts {list(gate_up.shape)} and {list(down.shape)}")
    count = stacked - shared
    # What comes here if all are chosen alike.
    pairs = tokens * top_k * count // (everywhere or count)
    together = _fit_together(x, pairs, down, count)
    block_m = together.tokens if together else _tile_rows(pairs, count, x.dtype)
    return _Layout(make_lists(tokens, top_k, count, block_m, x.device, shared=shared), together)


def _multiply_all(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, layout: _Layout) -> Tensor:
    """Multiply by the experts' weights, and add up what each token gets."""
    tokens, hidden = x.shape
    lists, tile = layout.lists, layout.together
    inner, top_k = down.shape[2], ids.shape[1]
    x, gate_up, down = (t if t.is_contiguous() else t.contiguous() for t in (x, gate_up, down))
    options, pairs, tiles = overlap_options(x.device), tokens * top_k, lists.tiles
    warm = torch.empty((lists.rows, inner), dtype=x.dtype, device=x.device)
    parts = torch.empty((lists.rows, hidden), dtype=x.dtype, device=x.device)
    if tile is not None:
        _multiply[(tiles * (inner // tile.gate + hidden // tile.down),)](
            x,
            TensorDescriptor.from_tensor(gate_up.view(-1, hidden), [tile.gate, tile.inputs]),
            TensorDescriptor.from_tensor(down.view(-1, inner), [tile.down, tile.inputs]),
            lists.members, lists.table, lists.progress, weights, warm, parts, pairs, tiles,
            HIDDEN=hidden, INNER=inner, TOP_K=top_k,
            BLOCK_M=tile.tokens, BLOCK_N=tile.gate, BLOCK_D=tile.down, BLOCK_K=tile.inputs,
            num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers, **options,
        )  # fmt: skip
    else:
        shape = {
            "TOP_K": top_k,
            "BLOCK_M": lists.block_m,
            "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
            **options,
        }
        block_n, block_k, warps, stages = _tile_columns(lists.block_m, x.element_size())
        _project[(triton.cdiv(inner, block_n), tiles)](
            x, gate_up, lists.members, lists.table, weights, warm, pairs, tiles, hidden, inner,
            GATED=True, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, num_stages=stages, **shape,
        )  # fmt: skip
        _project[(triton.cdiv(hidden, 2 * block_n), tiles)](
            warm, down, lists.members, lists.table, weights, parts, pairs, tiles, inner, hidden,
            GATED=False, BLOCK_N=2 * block_n, BLOCK_K=block_k, num_warps=warps, num_stages=stages, **shape,
        )  # fmt: skip
    out = torch.empty_like(x)
    _combine[(tokens, triton.cdiv(hidden, 1024))](
        parts, ids, out, hidden, pairs,
        TOP_K=top_k, BLOCK_K=triton.next_power_of_2(top_k), BLOCK=1024, SHARED=lists.shared, num_warps=4, **options,
    )  # fmt: skip
    return out


def _choose_tile(pairs: int, count: int) -> Tile:
    """Return a tile that holds the tokens of most experts, by the times in docs/benchmarks."""
    if pairs <= 4 * count:
        return Tile(16, 64, 128, 64, 4, 5)
    if pairs <= 16 * count:
        return Tile(32, 64, 128, 64, 4, 5)
    if pairs <= 64 * count:
        return Tile(64, 64, 128, 64, 4, 3)
    # Two programs a multiprocessor. Weights then pass through the second-level cache once, not twice for most experts.
    return Tile(128, 64, 128, 64, 8, 3, registers=128)


def _fit_together(x: Tensor, pairs: int, down: Tensor, count: int) -> Tile | None:
    """Return how both products go in one launch; that needs even tiles, and Hopper's copies of whole tiles."""
    _, hidden, inner = down.shape
    tile = _choose_tile(pairs, count)
    even = hidden % tile.down == 0 and hidden % tile.inputs == 0 and inner % tile.gate == 0 and inner % tile.inputs == 0
    able = x.device.type == "cpu" or overlap_options(x.device)["OVERLAP"]
    return tile if even and able and x.element_size() == 2 else None


def _tile_rows(pairs: int, count: int, dtype: torch.dtype) -> int:
    """Return tokens in a tile: about what an expert gets, so that its weights are read once."""
    wanted = triton.next_power_of_2(max(1, pairs // count))
    return max(16, min(64 if dtype != torch.float32 else 16, wanted))


def _tile_columns(block_m: int, element_size: int) -> tuple[int, int, int, int]:
    """Return (columns, inputs, warps, stages) of a tile of the gated product; the other has twice the columns."""
    if element_size > 2:
        return 32, 32, 4, 1
    return 64, 64, 4, 4 if block_m <= 32 else 3


@triton.jit(do_not_specialize=["pairs", "tiles"])
def _multiply(
    x_ptr,
    gate_up,
    down,
    members_ptr,
    table_ptr,
    progress_ptr,
    share_ptr,
    warm_ptr,
    parts_ptr,
    pairs,
    tiles,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program's part of a tile's first product, or of its second one: those of all tiles come after all first ones.

    Weights are the left operand, so that they fill the 64 rows of a Hopper matrix instruction; a tile's tokens are its
    short side. Programs take their numbers as they start, so whoever waits for a first product waits for programs that
    run already.
    """
    wait_for_inputs(OVERLAP)
    GATES: tl.constexpr = INNER // BLOCK_N
    DOWNS: tl.constexpr = HIDDEN // BLOCK_D
    number = tl.atomic_add(progress_ptr, 1, sem="relaxed")
    first = number < tiles * GATES
    number = tl.where(first, number, number - tiles * GATES)
    tile = tl.where(first, number // GATES, number // DOWNS)
    part = tl.where(first, number % GATES, number % DOWNS)
    expert = tl.load(table_ptr + tile)
    live = tl.load(table_ptr + tiles + tile)
    members = members_ptr + tl.load(table_ptr + 2 * tiles + tile, mask=expert >= 0, other=0)
    if expert < 0:
        return
    ready_ptr = progress_ptr + 1 + tile
    if first:
        _multiply_first(
            x_ptr, gate_up, warm_ptr, members, expert, live, part * BLOCK_N, pairs,
            HIDDEN, INNER, TOP_K, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        # Every thread's part is written before the count says so.
        tl.debug_barrier()
        tl.atomic_add(ready_ptr, 1, sem="release")
    else:
        while tl.atomic_add(ready_ptr, 0, sem="acquire") < GATES:
            pass
        _multiply_second(
            warm_ptr, down, share_ptr, parts_ptr, members, expert, live, part * BLOCK_D, pairs,
            HIDDEN, INNER, BLOCK_M, BLOCK_D, BLOCK_K,
        )  # fmt: skip


@triton.jit
def _token_of(pair, pairs, TOP_K: tl.constexpr):
    """Return the token of a pair; those of the shared expert lie behind all others."""
    return tl.where(pair < pairs, pair // TOP_K, pair - pairs)


@triton.jit
def _multiply_first(
    x_ptr,
    gate_up,
    warm_ptr,
    members_ptr,
    expert,
    live,
    column,
    pairs,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Swiglu of the tokens' rows."""
    m = tl.arange(0, BLOCK_M)
    pair = tl.load(members_ptr + m, mask=m < live, other=0)
    token = _token_of(pair, pairs, TOP_K)
    gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    row = expert * (2 * INNER) + column
    for start in range(0, HIDDEN, BLOCK_K):
        w_gate = gate_up.load([row, start])
        w_up = gate_up.load([row + INNER, start])
        x = _columns_of(x_ptr, token, m < live, start, HIDDEN, BLOCK_K)
        gate = tl.dot(w_gate, x, gate)
        up = tl.dot(w_up, x, up)
    _keep(warm_ptr + column, gate * tl.sigmoid(gate) * up, pair, m < live, INNER, BLOCK_N)


@triton.jit
def _multiply_second(
    warm_ptr,
    down,
    share_ptr,
    parts_ptr,
    members_ptr,
    expert,
    live,
    column,
    pairs,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The share of each pair times its product."""
    m = tl.arange(0, BLOCK_M)
    pair = tl.load(members_ptr + m, mask=m < live, other=0)
    share = tl.load(share_ptr + pair, mask=(m < live) & (pair < pairs), other=1.0)
    acc = tl.zeros((BLOCK_D, BLOCK_M), tl.float32)
    row = expert * HIDDEN + column
    for start in range(0, INNER, BLOCK_K):
        w = down.load([row, start])
        acc = tl.dot(w, _columns_of(warm_ptr, pair, m < live, start, INNER, BLOCK_K), acc)
    _keep(parts_ptr + column, acc * share[None, :], pair, m < live, HIDDEN, BLOCK_D)


@triton.jit
def _columns_of(x_ptr, row, inside, start, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return x [BLOCK_K, rows] from column `start` on, zeros for rows that are not inside."""
    k = start + tl.arange(0, BLOCK_K)
    return tl.load(x_ptr + row.to(tl.int64)[None, :] * WIDTH + k[:, None], mask=inside[None, :], other=0.0)


@triton.jit
def _keep(out_ptr, values, row, inside, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store values [BLOCK_N, rows] as the beginnings of rows."""
    place = out_ptr + row.to(tl.int64)[:, None] * WIDTH + tl.arange(0, BLOCK_N)[None, :]
    tl.store(place, tl.trans(values).to(out_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=["pairs", "tiles"])
def _project(
    x_ptr,
    weight_ptr,
    members_ptr,
    table_ptr,
    share_ptr,
    out_ptr,
    pairs,
    tiles,
    inputs,
    columns,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One tile of an expert's product: swiglu of x if GATED, else the share of each pair times its product."""
    wait_for_inputs(OVERLAP)
    tile = tl.program_id(1)
    expert = tl.load(table_ptr + tile)
    if expert < 0:
        return
    m = tl.arange(0, BLOCK_M)
    live = m < tl.load(table_ptr + tiles + tile)
    pair = tl.load(members_ptr + tl.load(table_ptr + 2 * tiles + tile) + m, mask=live, other=0)
    # The first product reads a token's row, the second the pair's own.
    source = _token_of(pair, pairs, TOP_K) if GATED else pair
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight = weight_ptr + expert.to(tl.int64) * (inputs * columns * (2 if GATED else 1))
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, inputs, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = k < inputs
        x_place = x_ptr + source.to(tl.int64)[:, None] * inputs + k[None, :]
        x = tl.load(x_place, mask=live[:, None] & inside[None, :], other=0.0)
        known = (n < columns)[None, :] & inside[:, None]
        w_place = weight + n[None, :] * inputs + k[:, None]
        w = tl.load(w_place, mask=known, other=0.0)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
        if GATED:
            up = tl.load(w_place + columns * inputs, mask=known, other=0.0)
            acc_up = tl.dot(x, up, acc_up, input_precision=PRECISION)
    if GATED:
        acc = acc * tl.sigmoid(acc) * acc_up
    else:
        acc *= tl.load(share_ptr + pair, mask=live & (pair < pairs), other=1.0)[:, None]
    place = out_ptr + pair.to(tl.int64)[:, None] * columns + n[None, :]
    tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & (n < columns)[None, :])


@triton.jit(do_not_specialize=["pairs"])
def _combine(
    parts_ptr,
    ids_ptr,
    out_ptr,
    hidden,
    pairs,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK_K)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    release_and_wait(OVERLAP)
    # A pair without an expert has no part: what lies there was never written.
    real = (tl.load(ids_ptr + token * TOP_K + j, mask=j < TOP_K, other=-1) >= 0)[:, None] & (column < hidden)[None, :]
    part = tl.load(parts_ptr + (token * TOP_K + j[:, None]) * hidden + column[None, :], mask=real, other=0.0)
    total = tl.sum(part.to(tl.float32), 0)
    if SHARED:
        total += tl.load(parts_ptr + (pairs + token) * hidden + column, mask=column < hidden, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * hidden + column, total.to(out_ptr.dtype.element_ty), mask=column < hidden)
