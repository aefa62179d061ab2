"""Twins of `kernels.moe`: routing on the device, then products grouped by expert.

Nothing is sorted and nothing is read back: each expert collects its tokens, tiles of tokens are numbered, and a grid
sized for the worst case leaves early where there is no tile. All shapes are known before the launch, so a captured
graph serves any routing.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.gpu.overlap import overlap_options, wait_for_inputs
from kernels.moe import Router
from kernels.moe import router_logits as plain_logits


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    if x.dtype == torch.float32 or x.shape[0] < _MANY_TOKENS:
        return plain_logits(x, weight)
    return multiply_exactly(x, weight)


def multiply_exactly(x: Tensor, weight: Tensor) -> Tensor:
    """Return `router_logits` of narrow x from the matrix units: a float32 is the sum of three narrow numbers."""
    tokens, inputs = x.shape
    experts = weight.shape[0]
    if weight.shape[1] != inputs:
        raise ValueError(f"x {list(x.shape)} does not go with weight {list(weight.shape)}")
    x, weight = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, weight))
    out = torch.empty((tokens, experts), dtype=torch.float32, device=x.device)
    if tokens:
        grid = (triton.cdiv(experts, 64), triton.cdiv(tokens, 64))
        _multiply_exactly[grid](
            x, weight, out, tokens, experts, inputs, x.stride(0), weight.stride(0),
            BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=4, **overlap_options(x.device),
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["tokens"])
def _multiply_exactly(
    x_ptr,
    weight_ptr,
    out_ptr,
    tokens,
    columns,
    inputs,
    x_stride,
    weight_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # The weights are the left operand: that one may come from registers, where they are cut into three.
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    rest = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    wait_for_inputs(OVERLAP)
    for start in range(0, inputs, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = k < inputs
        x_place = x_ptr + m.to(tl.int64)[None, :] * x_stride + k[:, None]
        x = tl.load(x_place, mask=(m < tokens)[None, :] & inside[:, None], other=0.0)
        w_place = weight_ptr + n[:, None] * weight_stride + k[None, :]
        w = tl.load(w_place, mask=(n < columns)[:, None] & inside[None, :], other=0.0)
        high = w.to(x.dtype)
        left = w - high.to(tl.float32)
        middle = left.to(x.dtype)
        low = (left - middle.to(tl.float32)).to(x.dtype)
        acc = tl.dot(high, x, acc)
        rest = tl.dot(middle, x, rest)
        rest = tl.dot(low, x, rest)
    place = out_ptr + m.to(tl.int64)[:, None] * columns + n[None, :]
    tl.store(place, tl.trans(acc + rest), mask=(m < tokens)[:, None] & (n < columns)[None, :])


def route(
    logits: Tensor, router: Router, bias: Tensor | None = None, blocks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    tokens, experts = logits.shape
    if experts % router.groups:
        raise ValueError(f"{router.groups} groups do not divide {experts} experts")
    if router.capacity and blocks is None:
        raise ValueError("a router with a capacity needs the blocks of its tokens")
    logits = logits if logits.is_contiguous() else logits.contiguous()
    device = logits.device
    ids = torch.empty((tokens, router.top_k), dtype=torch.int64, device=device)
    weights = torch.empty((tokens, router.top_k), dtype=torch.float32, device=device)
    if not tokens:
        return ids, weights
    per_group = experts // router.groups
    votes = None
    shape = {
        "EXPERTS": experts,
        "GROUPS": router.groups,
        "PER_GROUP": per_group,
        "BLOCK_G": triton.next_power_of_2(router.groups),
        "BLOCK_P": triton.next_power_of_2(per_group),
        "SIGMOID": router.scoring == "sigmoid",
        "BIASED": bias is not None,
        "num_warps": 1,
        **overlap_options(device),
    }
    if router.capacity:
        votes = torch.full((tokens, experts), float("-inf"), dtype=torch.float32, device=device)
        _vote[(tokens,)](logits, logits if bias is None else bias, blocks, votes, **shape)
    _route[(tokens,)](
        logits,
        logits if bias is None else bias,
        logits if blocks is None else blocks,
        logits if votes is None else votes,
        ids,
        weights,
        router.scale,
        KEPT_GROUPS=router.kept_groups,
        TOP_K=router.top_k,
        BLOCK_K=triton.next_power_of_2(router.top_k),
        NORMALISE=router.normalise,
        CAPACITY=router.capacity,
        PADDED=blocks is not None,
        **shape,
    )
    return ids, weights


@triton.jit
def _score(
    logits_ptr,
    bias_ptr,
    token,
    EXPERTS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_P: tl.constexpr,
    SIGMOID: tl.constexpr,
    BIASED: tl.constexpr,
):
    """Return (scores, what the choice goes by, expert ids, which exist), each [BLOCK_G, BLOCK_P]."""
    group = tl.arange(0, BLOCK_G)[:, None]
    place = tl.arange(0, BLOCK_P)[None, :]
    expert = group * PER_GROUP + place
    real = (group < GROUPS) & (place < PER_GROUP)
    z = tl.load(logits_ptr + token * EXPERTS + expert, mask=real, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        score = tl.sigmoid(z)
    else:
        weight = tl.exp(z - tl.max(tl.max(z, 1), 0))
        score = weight / tl.sum(tl.sum(weight, 1), 0)
    choice = score
    if BIASED:
        choice += tl.load(bias_ptr + expert, mask=real, other=0.0)
    return score, tl.where(real, choice, float("-inf")), expert, real


@triton.jit
def _vote(
    logits_ptr,
    bias_ptr,
    blocks_ptr,
    votes_ptr,
    EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_P: tl.constexpr,
    SIGMOID: tl.constexpr,
    BIASED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    wait_for_inputs(OVERLAP)
    block = tl.load(blocks_ptr + token)
    if block < 0:
        return
    _, choice, expert, real = _score(
        logits_ptr, bias_ptr, token, EXPERTS, PER_GROUP, GROUPS, BLOCK_G, BLOCK_P, SIGMOID, BIASED
    )
    tl.atomic_max(votes_ptr + block * EXPERTS + expert, choice, mask=real, sem="relaxed")


@triton.jit
def _route(
    logits_ptr,
    bias_ptr,
    blocks_ptr,
    votes_ptr,
    ids_ptr,
    weights_ptr,
    scale,
    EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_P: tl.constexpr,
    SIGMOID: tl.constexpr,
    BIASED: tl.constexpr,
    KEPT_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORMALISE: tl.constexpr,
    CAPACITY: tl.constexpr,
    PADDED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    wait_for_inputs(OVERLAP)
    score, choice, expert, real = _score(
        logits_ptr, bias_ptr, token, EXPERTS, PER_GROUP, GROUPS, BLOCK_G, BLOCK_P, SIGMOID, BIASED
    )
    if GROUPS > 1:
        best = tl.max(choice, 1)
        first = tl.min(tl.where(choice == best[:, None], expert, EXPERTS), 1)
        second = tl.max(tl.where(expert == first[:, None], float("-inf"), choice), 1)
        number = tl.arange(0, BLOCK_G)
        worth = tl.where(number < GROUPS, best + second, float("-inf"))
        kept = number < 0
        for _ in tl.static_range(KEPT_GROUPS):
            top = tl.max(worth, 0)
            chosen = tl.min(tl.where((worth == top) & (kept == 0), number, BLOCK_G), 0)
            kept = kept | (number == chosen)
            worth = tl.where(number == chosen, float("-inf"), worth)
        choice = tl.where(kept[:, None], choice, float("-inf"))
    block = tl.zeros((), tl.int64)
    if PADDED:
        block = tl.load(blocks_ptr + token)
    if CAPACITY > 0:
        votes = tl.load(votes_ptr + tl.maximum(block, 0) * EXPERTS + expert, mask=real, other=float("-inf"))
        # The CAPACITY-th highest vote, by bisection; of equal votes those of the lowest ids still fit.
        bits = votes.to(tl.int32, bitcast=True)
        key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        low = tl.full((), -2147483648, tl.int64)
        high = tl.full((), 2147483647, tl.int64)
        while low < high:
            middle = (low + high + 1) >> 1
            enough = tl.sum(tl.sum((real & (key >= middle)).to(tl.int32), 1), 0) >= CAPACITY
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle - 1)
        above = real & (key > low)
        equal = real & (key == low)
        room = CAPACITY - tl.sum(tl.sum(above.to(tl.int32), 1), 0)
        # A capacity excludes groups, so all experts lie in one line.
        fits = equal & (tl.cumsum(equal.to(tl.int32), 1) <= room)
        choice = tl.where(above | fits, choice, float("-inf"))

    k = tl.arange(0, BLOCK_K)
    ids = tl.zeros((BLOCK_K,), tl.int32)
    weights = tl.zeros((BLOCK_K,), tl.float32)
    left = real
    for j in tl.static_range(TOP_K):
        top = tl.max(tl.max(tl.where(left, choice, float("-inf")), 1), 0)
        chosen = tl.min(tl.min(tl.where(left & (choice == top), expert, EXPERTS), 1), 0)
        mine = expert == chosen
        ids = tl.where(k == j, chosen, ids)
        weights = tl.where(k == j, tl.sum(tl.sum(tl.where(mine, score, 0.0), 1), 0), weights)
        left = left & (mine == 0)
    if NORMALISE:
        weights = weights / tl.sum(weights, 0)
    weights = weights * scale
    if PADDED:
        ids = tl.where(block < 0, -1, ids)
        weights = tl.where(block < 0, 0.0, weights)
    tl.store(ids_ptr + token * TOP_K + k, ids.to(tl.int64), mask=k < TOP_K)
    tl.store(weights_ptr + token * TOP_K + k, weights, mask=k < TOP_K)


def experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    tokens, hidden = x.shape
    count, double, width = gate_up.shape
    inner = double // 2
    top_k = ids.shape[1]
    if width != hidden or down.shape != (count, hidden, inner) or ids.shape != weights.shape:
        raise ValueError(f"x {list(x.shape)} does not go with experts {list(gate_up.shape)} and {list(down.shape)}")
    x, ids, weights, gate_up, down = (
        t if t.is_contiguous() else t.contiguous() for t in (x, ids, weights, gate_up, down)
    )
    out = torch.empty_like(x)
    if not tokens:
        return out
    device, options = x.device, overlap_options(x.device)
    pairs = tokens * top_k
    at_once = _runs_at_once(x, pairs, count, hidden, inner)
    block_m = _TOGETHER.tokens if at_once else _tile_rows(pairs, count, x.dtype)
    tiles = min(pairs, count + pairs // block_m)
    members = torch.empty((count, tokens), dtype=torch.int32, device=device)
    counts = torch.empty(count, dtype=torch.int32, device=device)
    table = torch.empty((3, tiles), dtype=torch.int32, device=device)
    progress = torch.empty(tiles + 1, dtype=torch.int32, device=device)
    many = pairs > 1024
    _collect[(count,)](
        ids, members, counts, table, progress, _arrivals(device), pairs, tokens, tiles,
        BLOCK_M=block_m, BLOCK=4096 if many else 1024, BLOCK_E=triton.next_power_of_2(count),
        num_warps=8 if many else 4, **options,
    )  # fmt: skip
    warm = torch.empty((pairs, inner), dtype=x.dtype, device=device)
    parts = torch.empty((pairs, hidden), dtype=x.dtype, device=device)
    if at_once:
        tile = _TOGETHER
        _multiply[(tiles * (inner // tile.gate + hidden // tile.down),)](
            x,
            TensorDescriptor.from_tensor(gate_up.view(-1, hidden), [tile.gate, tile.inputs]),
            TensorDescriptor.from_tensor(down.view(-1, inner), [tile.down, tile.inputs]),
            members, table, progress, weights, warm, parts, tiles,
            HIDDEN=hidden, INNER=inner, TOP_K=top_k,
            BLOCK_M=tile.tokens, BLOCK_N=tile.gate, BLOCK_D=tile.down, BLOCK_K=tile.inputs,
            num_warps=tile.warps, num_stages=tile.stages, **options,
        )  # fmt: skip
    else:
        shape = {
            "TOP_K": top_k,
            "BLOCK_M": block_m,
            "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
            **options,
        }
        block_n, block_k, warps, stages = _tile_columns(block_m, x.element_size())
        _project[(triton.cdiv(inner, block_n), tiles)](
            x, gate_up, members, table, weights, warm, tiles, hidden, inner,
            GATED=True, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, num_stages=stages, **shape,
        )  # fmt: skip
        _project[(triton.cdiv(hidden, 2 * block_n), tiles)](
            warm, down, members, table, weights, parts, tiles, inner, hidden,
            GATED=False, BLOCK_N=2 * block_n, BLOCK_K=block_k, num_warps=warps, num_stages=stages, **shape,
        )  # fmt: skip
    _combine[(tokens, triton.cdiv(hidden, 1024))](
        parts, ids, out, hidden, TOP_K=top_k, BLOCK_K=triton.next_power_of_2(top_k), BLOCK=1024, num_warps=4, **options
    )
    return out


@dataclass(frozen=True, slots=True)
class Tile:
    """How the products of many tokens are cut into programs."""

    tokens: int
    """Of an expert, all of them as a rule: then its weights are read once."""
    gate: int
    """Columns of the gate, and as many beside it, in a program of the first product."""
    down: int
    """Columns in a program of the second product."""
    inputs: int
    warps: int
    stages: int


_TOGETHER = Tile(64, 64, 128, 64, 4, 3)
_TOGETHER_FROM = 32
"""Tokens of an expert from which up both products in one launch are faster (docs/benchmarks)."""
_MANY_TOKENS = 512
"""Up to here PyTorch's float32 product of the router costs next to nothing."""


def _runs_at_once(x: Tensor, pairs: int, count: int, hidden: int, inner: int) -> bool:
    """Tell whether both products go in one launch: that needs even tiles, and Hopper's copies of whole tiles."""
    tile = _TOGETHER
    even = hidden % tile.down == 0 and hidden % tile.inputs == 0 and inner % tile.gate == 0 and inner % tile.inputs == 0
    able = x.device.type == "cpu" or overlap_options(x.device)["OVERLAP"]
    return even and able and x.element_size() == 2 and pairs >= _TOGETHER_FROM * count


@functools.cache
def _arrivals(device: torch.device) -> Tensor:
    """Return a zero that every kernel leaves as zero; kernels of one stream never run at the same time."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def _tile_rows(pairs: int, count: int, dtype: torch.dtype) -> int:
    """Return tokens in a tile: about what an expert gets, so that its weights are read once."""
    wanted = triton.next_power_of_2(max(1, pairs // count))
    return max(16, min(64 if dtype != torch.float32 else 16, wanted))


def _tile_columns(block_m: int, element_size: int) -> tuple[int, int, int, int]:
    """Return (columns, inputs, warps, stages) of a tile of the gated product; the other has twice the columns."""
    if element_size > 2:
        return 32, 32, 4, 1
    return 64, 64, 4, 4 if block_m <= 32 else 3


@triton.jit(do_not_specialize=["pairs", "tokens", "tiles"])
def _collect(
    ids_ptr,
    members_ptr,
    counts_ptr,
    table_ptr,
    progress_ptr,
    arrivals_ptr,
    pairs,
    tokens,
    tiles,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """List the (token, choice) pairs of one expert, in order of tokens; the last program numbers the tiles of all.

    Of each tile the table says its expert, how many pairs it has, and where in `members` they begin; tiles that do not
    exist belong to expert -1.
    """
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    count = 0
    wait_for_inputs(OVERLAP)
    for start in range(0, pairs, BLOCK):
        pair = start + lane
        mine = tl.load(ids_ptr + pair, mask=pair < pairs, other=-1) == expert
        rank = tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(members_ptr + expert * tokens + count + rank, pair, mask=mine)
        count += tl.sum(mine.to(tl.int32), 0)
    tl.store(counts_ptr + expert, count)
    # The count is written before its arrival says so.
    tl.debug_barrier()
    if tl.atomic_add(arrivals_ptr, 1, sem="acq_rel") < tl.num_programs(0) - 1:
        return
    tl.store(arrivals_ptr, 0)
    each = tl.arange(0, BLOCK_E)
    sizes = tl.load(counts_ptr + each, mask=each < tl.num_programs(0), other=0, cache_modifier=".cg")
    needed = (sizes + BLOCK_M - 1) // BLOCK_M
    before = tl.cumsum(needed, 0) - needed
    for place in range(0, tiles + 1, BLOCK_E):
        tl.store(progress_ptr + place + each, tl.zeros((BLOCK_E,), tl.int32), mask=place + each <= tiles)
    for tile in range(tl.sum(needed, 0), tiles, BLOCK_E):
        tl.store(table_ptr + tile + each, tl.full((BLOCK_E,), -1, tl.int32), mask=tile + each < tiles)
    for number in range(tl.max(needed, 0)):
        exists = number < needed
        row = table_ptr + before + number
        tl.store(row, each, mask=exists)
        tl.store(row + tiles, tl.minimum(sizes - number * BLOCK_M, BLOCK_M), mask=exists)
        tl.store(row + 2 * tiles, each * tokens + number * BLOCK_M, mask=exists)


@triton.jit(do_not_specialize=["tiles"])
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

    Weights are the left operand, so that they fill the 64 rows of a Hopper matrix instruction. Programs take their
    numbers as they start, so whoever waits for a first product waits for programs that run already.
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
            x_ptr, gate_up, warm_ptr, members, expert, live, part * BLOCK_N,
            HIDDEN, INNER, TOP_K, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        # Every thread's part is written before the count says so.
        tl.debug_barrier()
        tl.atomic_add(ready_ptr, 1, sem="release")
    else:
        while tl.atomic_add(ready_ptr, 0, sem="acquire") < GATES:
            pass
        _multiply_second(
            warm_ptr, down, share_ptr, parts_ptr, members, expert, live, part * BLOCK_D,
            HIDDEN, INNER, BLOCK_M, BLOCK_D, BLOCK_K,
        )  # fmt: skip


@triton.jit
def _multiply_first(
    x_ptr,
    gate_up,
    warm_ptr,
    members_ptr,
    expert,
    live,
    column,
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
    token = (pair // TOP_K).to(tl.int64)
    gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    row = expert * (2 * INNER) + column
    for start in range(0, HIDDEN, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        w_gate = gate_up.load([row, start])
        w_up = gate_up.load([row + INNER, start])
        x = tl.load(x_ptr + token[None, :] * HIDDEN + k[:, None], mask=(m < live)[None, :], other=0.0)
        gate = tl.dot(w_gate, x, gate)
        up = tl.dot(w_up, x, up)
    n = column + tl.arange(0, BLOCK_N)
    place = warm_ptr + pair.to(tl.int64)[:, None] * INNER + n[None, :]
    warm = tl.trans(gate * tl.sigmoid(gate) * up).to(warm_ptr.dtype.element_ty)
    tl.store(place, warm, mask=(m < live)[:, None])


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
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The share of each pair times its product."""
    m = tl.arange(0, BLOCK_M)
    pair = tl.load(members_ptr + m, mask=m < live, other=0)
    share = tl.load(share_ptr + pair, mask=m < live, other=0.0)
    source = pair.to(tl.int64)
    acc = tl.zeros((BLOCK_D, BLOCK_M), tl.float32)
    row = expert * HIDDEN + column
    for start in range(0, INNER, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        w = down.load([row, start])
        x = tl.load(warm_ptr + source[None, :] * INNER + k[:, None], mask=(m < live)[None, :], other=0.0)
        acc = tl.dot(w, x, acc)
    n = column + tl.arange(0, BLOCK_D)
    place = parts_ptr + source[:, None] * HIDDEN + n[None, :]
    tl.store(place, tl.trans(acc * share[None, :]).to(parts_ptr.dtype.element_ty), mask=(m < live)[:, None])


@triton.jit(do_not_specialize=["tiles"])
def _project(
    x_ptr,
    weight_ptr,
    members_ptr,
    table_ptr,
    share_ptr,
    out_ptr,
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
    source = pair // TOP_K if GATED else pair
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
        acc *= tl.load(share_ptr + pair, mask=live, other=0.0)[:, None]
    place = out_ptr + pair.to(tl.int64)[:, None] * columns + n[None, :]
    tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & (n < columns)[None, :])


@triton.jit
def _combine(
    parts_ptr,
    ids_ptr,
    out_ptr,
    hidden,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK_K)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(OVERLAP)
    # A pair without an expert has no part: what lies there was never written.
    real = (tl.load(ids_ptr + token * TOP_K + j, mask=j < TOP_K, other=-1) >= 0)[:, None] & (column < hidden)[None, :]
    part = tl.load(parts_ptr + (token * TOP_K + j[:, None]) * hidden + column[None, :], mask=real, other=0.0)
    total = tl.sum(part.to(tl.float32), 0)
    tl.store(out_ptr + token * hidden + column, total.to(out_ptr.dtype.element_ty), mask=column < hidden)
