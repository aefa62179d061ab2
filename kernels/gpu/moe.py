"""Twins of `kernels.moe.experts` and `mix`: products grouped by expert, over the lists of `kernels.gpu.lists`.

Weights of 8 bits are widened to the tokens' dtype on their way to the product, which loses nothing.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.fp8 import BLOCK
from kernels.gpu.lists import Lists, collect, make_lists
from kernels.gpu.overlap import overlap_options, release_and_wait, wait_for_inputs
from kernels.gpu.router import choose
from kernels.moe import Experts, Router


def experts(x: Tensor, ids: Tensor, weights: Tensor, stack: Experts) -> Tensor:
    return multiply(x, ids, weights, stack, _fit_together(x, ids.numel(), stack))


def multiply(x: Tensor, ids: Tensor, weights: Tensor, stack: Experts, tile: "Tile | None") -> Tensor:
    """Do what `experts` does, both products in one launch by the tile; None: in two."""
    tokens, top_k = ids.shape
    if ids.shape != weights.shape:
        raise ValueError(f"ids {list(ids.shape)} do not go with weights {list(weights.shape)}")
    _check(x, stack)
    if not tokens:
        return torch.empty_like(x)
    ids, weights = (t if t.is_contiguous() else t.contiguous() for t in (ids, weights))
    lists = _make_lists(x, top_k, stack, tokens * top_k, tile)
    collect(ids, lists)
    return _multiply_all(x, ids, weights, stack, lists, tile)


def mix(
    x: Tensor, logits: Tensor, router: Router, stack: Experts, bias: Tensor | None = None, *, first: int = 0
) -> Tensor:
    tokens, everywhere = logits.shape
    if router.capacity:
        raise ValueError("a router with a capacity needs the blocks of its tokens")
    _check(x, stack)
    if not tokens:
        return torch.empty_like(x)
    logits = logits if logits.is_contiguous() else logits.contiguous()
    ids = torch.empty((tokens, router.top_k), dtype=torch.int32, device=x.device)
    weights = torch.empty((tokens, router.top_k), dtype=torch.float32, device=x.device)
    # What comes here if all are chosen alike.
    pairs = ids.numel() * stack.count // everywhere
    tile = _fit_together(x, pairs, stack)
    lists = _make_lists(x, router.top_k, stack, pairs, tile)
    choose(logits, router, bias, None, None, ids, weights, lists, first)
    return _multiply_all(x, ids, weights, stack, lists, tile)


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


def _check(x: Tensor, stack: Experts) -> None:
    """Raise `ValueError` for shapes that do not go together."""
    gate_up, down = stack.gate_up, stack.down
    count, double, width = gate_up.shape
    if x.dim() != 2 or width != x.shape[1] or down.shape != (count, width, double // 2):
        raise ValueError(f"x {list(x.shape)} does not go with experts {list(gate_up.shape)} and {list(down.shape)}")
    for weight, scale in ((gate_up, stack.gate_up_scale), (down, stack.down_scale)):
        outputs, inputs = weight.shape[1:]
        blocks = triton.cdiv(outputs, BLOCK), triton.cdiv(inputs, BLOCK)
        if scale is not None and scale.shape not in ((count, outputs), (count, *blocks)):
            raise ValueError(f"scales {list(scale.shape)} do not go with experts {list(weight.shape)}")


def _make_lists(x: Tensor, top_k: int, stack: Experts, pairs: int, tile: Tile | None) -> Lists:
    """Return room for the lists of the tokens of x, of which so many pairs are thought to come here."""
    block_m = tile.tokens if tile else _tile_rows(pairs, stack.count, x.dtype)
    return make_lists(len(x), top_k, stack.count, block_m, x.device, shared=stack.shared)


def _multiply_all(x: Tensor, ids: Tensor, weights: Tensor, stack: Experts, lists: Lists, tile: Tile | None) -> Tensor:
    """Multiply by the experts' weights, and add up what each token gets."""
    tokens, hidden = x.shape
    inner, top_k = stack.down.shape[2], ids.shape[1]
    x, gate_up, down = (t if t.is_contiguous() else t.contiguous() for t in (x, stack.gate_up, stack.down))
    # Where there are no scales, any pointer stands for them.
    gate_up_scale, down_scale = (x if t is None else t.contiguous() for t in (stack.gate_up_scale, stack.down_scale))
    sides = _side(stack.gate_up_scale), _side(stack.down_scale)
    options, pairs, tiles = overlap_options(x.device), tokens * top_k, lists.tiles
    warm = torch.empty((lists.rows, inner), dtype=x.dtype, device=x.device)
    parts = torch.empty((lists.rows, hidden), dtype=x.dtype, device=x.device)
    if tile is not None:
        _multiply[(tiles * (inner // tile.gate + hidden // tile.down),)](
            x,
            TensorDescriptor.from_tensor(gate_up.view(-1, hidden), [tile.gate, tile.inputs]),
            TensorDescriptor.from_tensor(down.view(-1, inner), [tile.down, tile.inputs]),
            gate_up_scale, down_scale,
            lists.members, lists.table, lists.progress, weights, warm, parts, pairs, tiles,
            HIDDEN=hidden, INNER=inner, TOP_K=top_k, SIDE=sides[0],
            BLOCK_M=tile.tokens, BLOCK_N=tile.gate, BLOCK_D=tile.down, BLOCK_K=tile.inputs,
            num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers, **options,
        )  # fmt: skip
    else:
        block_n, block_k, warps, stages = _tile_columns(lists.block_m, x.element_size())
        shape = {
            "TOP_K": top_k,
            "BLOCK_M": lists.block_m,
            "BLOCK_K": block_k,
            "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
            "num_warps": warps,
            "num_stages": stages,
            **options,
        }
        _project[(triton.cdiv(inner, block_n), tiles)](
            x, gate_up, gate_up_scale, lists.members, lists.table, weights, warm, pairs, tiles, hidden, inner,
            GATED=True, SIDE=sides[0], BLOCK_N=block_n, **shape,
        )  # fmt: skip
        _project[(triton.cdiv(hidden, 2 * block_n), tiles)](
            warm, down, down_scale, lists.members, lists.table, weights, parts, pairs, tiles, inner, hidden,
            GATED=False, SIDE=sides[1], BLOCK_N=2 * block_n, **shape,
        )  # fmt: skip
    out = torch.empty_like(x)
    _combine[(tokens, triton.cdiv(hidden, 1024))](
        parts, ids, out, hidden, pairs,
        TOP_K=top_k, BLOCK_K=triton.next_power_of_2(top_k), BLOCK=1024, SHARED=lists.shared, num_warps=4, **options,
    )  # fmt: skip
    return out


def _side(scale: Tensor | None) -> int:
    """Return how many outputs have a scale together: 1, or those of a block; 0: there are none."""
    if scale is None:
        return 0
    return BLOCK if scale.dim() == 3 else 1


def _choose_tile(pairs: int, count: int, element_size: int = 2, *, blocks: bool = False) -> Tile:
    """Return a tile that holds the tokens of most experts, by the times in docs/benchmarks."""
    if element_size == 1:
        return _choose_small(pairs, count, blocks=blocks)
    if pairs <= 4 * count:
        return Tile(16, 64, 128, 64, 4, 5)
    if pairs <= 16 * count:
        return Tile(32, 64, 128, 64, 4, 5)
    if pairs <= 64 * count:
        return Tile(64, 64, 128, 64, 4, 3)
    # Two programs a multiprocessor. Weights then pass through the second-level cache once, not twice for most experts.
    return Tile(128, 64, 128, 64, 8, 3, registers=128)


def _choose_small(pairs: int, count: int, *, blocks: bool) -> Tile:
    """Return the tile for weights of one byte: they take half the memory of a stage, and registers on their way; sums
    of `blocks` take more of these."""
    if pairs <= 8 * count:
        return Tile(16, 64, 128, 128, 4, 3) if blocks else Tile(16, 64, 128, 64, 4, 5)
    if pairs <= (32 if blocks else 16) * count:
        return Tile(32, 64, 128, 64, 4, 4)
    return Tile(64, 64, 128, 64, 4, 3 if blocks else 4)


def _fit_together(x: Tensor, pairs: int, stack: Experts) -> Tile | None:
    """Return how both products go in one launch; that needs even tiles, and Hopper's copies of whole tiles."""
    blocks = _side(stack.gate_up_scale) == BLOCK
    tile = _choose_tile(pairs, stack.count, stack.gate_up.element_size(), blocks=blocks)
    able = x.device.type == "cpu" or overlap_options(x.device)["OVERLAP"]
    return tile if able and x.element_size() == 2 and _is_even(stack, tile) else None


def _is_even(stack: Experts, tile: Tile) -> bool:
    """Tell whether tiles fill the weights, each within a row of blocks where these have scales of their own."""
    _, hidden, inner = stack.down.shape
    even = hidden % tile.down == 0 and hidden % tile.inputs == 0 and inner % tile.gate == 0 and inner % tile.inputs == 0
    sides = _side(stack.gate_up_scale), _side(stack.down_scale)
    within = all(BLOCK % width == 0 for width in (tile.gate, tile.down, tile.inputs))
    return even and sides[0] == sides[1] and (within or sides[0] != BLOCK)


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
    gate_up_scale_ptr,
    down_scale_ptr,
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
    SIDE: tl.constexpr,
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
            x_ptr, gate_up, gate_up_scale_ptr, warm_ptr, members, expert, live, part * BLOCK_N, pairs,
            HIDDEN, INNER, TOP_K, SIDE, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        # Every thread's part is written before the count says so.
        tl.debug_barrier()
        tl.atomic_add(ready_ptr, 1, sem="release")
    else:
        while tl.atomic_add(ready_ptr, 0, sem="acquire") < GATES:
            pass
        _multiply_second(
            warm_ptr, down, down_scale_ptr, share_ptr, parts_ptr, members, expert, live, part * BLOCK_D, pairs,
            HIDDEN, INNER, SIDE, BLOCK_M, BLOCK_D, BLOCK_K,
        )  # fmt: skip


@triton.jit
def _token_of(pair, pairs, TOP_K: tl.constexpr):
    """Return the token of a pair; those of the shared expert lie behind all others."""
    return tl.where(pair < pairs, pair // TOP_K, pair - pairs)


@triton.jit
def _multiply_first(
    x_ptr,
    gate_up,
    scale_ptr,
    warm_ptr,
    members_ptr,
    expert,
    live,
    column,
    pairs,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    SIDE: tl.constexpr,
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
    gate_scale = _scale_of(scale_ptr, expert, column, 2 * INNER, HIDDEN, SIDE, BLOCK_N)
    up_scale = _scale_of(scale_ptr, expert, column + INNER, 2 * INNER, HIDDEN, SIDE, BLOCK_N)
    for start in range(0, HIDDEN, BLOCK_K):
        w_gate = gate_up.load([row, start])
        w_up = gate_up.load([row + INNER, start])
        x = _columns_of(x_ptr, token, m < live, start, HIDDEN, BLOCK_K)
        gate = _add_product(gate, w_gate, x, gate_scale, start, SIDE)
        up = _add_product(up, w_up, x, up_scale, start, SIDE)
    if SIDE == 1:
        gate *= gate_scale[:, None]
        up *= up_scale[:, None]
    _keep(warm_ptr + column, gate * tl.sigmoid(gate) * up, pair, m < live, INNER, BLOCK_N)


@triton.jit
def _multiply_second(
    warm_ptr,
    down,
    scale_ptr,
    share_ptr,
    parts_ptr,
    members_ptr,
    expert,
    live,
    column,
    pairs,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    SIDE: tl.constexpr,
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
    scale = _scale_of(scale_ptr, expert, column, HIDDEN, INNER, SIDE, BLOCK_D)
    for start in range(0, INNER, BLOCK_K):
        w = down.load([row, start])
        x = _columns_of(warm_ptr, pair, m < live, start, INNER, BLOCK_K)
        acc = _add_product(acc, w, x, scale, start, SIDE)
    if SIDE == 1:
        acc *= scale[:, None]
    _keep(parts_ptr + column, acc * share[None, :], pair, m < live, HIDDEN, BLOCK_D)


@triton.jit
def _scale_of(
    scale_ptr, expert, row, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, SIDE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return the scales [BLOCK_N] of an expert's rows from `row` on; of blocks, where those of their row begin."""
    if SIDE == 0:
        return scale_ptr
    elif SIDE == 1:
        return tl.load(scale_ptr + expert * OUTPUTS + row + tl.arange(0, BLOCK_N))
    else:
        down: tl.constexpr = (OUTPUTS + SIDE - 1) // SIDE
        across: tl.constexpr = (INPUTS + SIDE - 1) // SIDE
        return scale_ptr + (expert * down + row // SIDE) * across


@triton.jit
def _add_product(acc, w, x, scale, start, SIDE: tl.constexpr):
    """Return acc plus w x; for blocks w stands for itself times their scale, from input `start` on."""
    if SIDE <= 1:
        return tl.dot(_widen(w, x.dtype), x, acc)
    else:
        factor = tl.load(scale + start // SIDE)
        return acc + tl.dot(_widen(w, x.dtype), x) * factor


@triton.jit
def _widen(w, dtype: tl.constexpr):
    """Return e4m3 as the tokens' dtype, or what is that already.

    Two numbers at once: sign, exponent and fraction go where a bfloat16 has them, and 2**120 makes up for the exponent,
    also of numbers below the least normal one. The conversion of the instruction set is a quarter as fast. The pattern
    of a NaN becomes 480; none is there, for scales of what is not finite are not finite.
    """
    if w.dtype == tl.float8e4nv and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 top, low, factor;
            prmt.b32 top, $1, 0, 0x1404;
            shr.u32 low, top, 4;
            and.b32 low, low, 0x07f007f0;
            lop3.b32 top, top, 0x80008000, low, 0xea;
            mov.b32 factor, 0x7b807b80;
            mul.rn.bf16x2 $0, top, factor;
            }
            """,
            "=r,r",
            [w],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        return w.to(dtype)


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
    scale_ptr,
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
    SIDE: tl.constexpr,
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
    outputs = columns * (2 if GATED else 1)
    weight = weight_ptr + expert.to(tl.int64) * (inputs * outputs)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, inputs, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = k < inputs
        x_place = x_ptr + source.to(tl.int64)[:, None] * inputs + k[None, :]
        x = tl.load(x_place, mask=live[:, None] & inside[None, :], other=0.0)
        known = (n < columns)[None, :] & inside[:, None]
        w_place = weight + n[None, :] * inputs + k[:, None]
        w = tl.load(w_place, mask=known, other=0.0).to(x.dtype)
        if SIDE <= 1:
            acc = tl.dot(x, w, acc, input_precision=PRECISION)
        else:
            # Of the expert's rows of blocks; a tile may reach over two of them.
            across = (inputs + SIDE - 1) // SIDE
            s_place = scale_ptr + expert * ((outputs + SIDE - 1) // SIDE * across) + start // SIDE
            scale = tl.load(s_place + n // SIDE * across, mask=n < columns, other=0.0)
            acc += tl.dot(x, w, input_precision=PRECISION) * scale[None, :]
        if GATED:
            up = tl.load(w_place + columns * inputs, mask=known, other=0.0).to(x.dtype)
            if SIDE <= 1:
                acc_up = tl.dot(x, up, acc_up, input_precision=PRECISION)
            else:
                scale = tl.load(s_place + (columns + n) // SIDE * across, mask=n < columns, other=0.0)
                acc_up += tl.dot(x, up, input_precision=PRECISION) * scale[None, :]
    if SIDE == 1:
        scale = scale_ptr + expert * outputs + n
        acc *= tl.load(scale, mask=n < columns, other=0.0)[None, :]
        if GATED:
            acc_up *= tl.load(scale + columns, mask=n < columns, other=0.0)[None, :]
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
