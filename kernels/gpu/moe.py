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

from kernels.gpu.overlap import overlap_options, release_and_wait, wait_for_inputs
from kernels.moe import Router
from kernels.moe import router_logits as plain_logits


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    if x.dtype == torch.float32:
        return plain_logits(x, weight)
    return multiply_exactly(x, weight)


def multiply_exactly(x: Tensor, weight: Tensor) -> Tensor:
    """Return `router_logits` of narrow x from the matrix units: a float32 is the sum of three narrow numbers.

    The units add up with less care than a float32 sum does, so each short stretch of the inputs gets a sum of its own.
    """
    tokens, inputs = x.shape
    experts = weight.shape[0]
    if weight.shape[1] != inputs:
        raise ValueError(f"x {list(x.shape)} does not go with weight {list(weight.shape)}")
    x, weight = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, weight))
    out = torch.empty((tokens, experts), dtype=torch.float32, device=x.device)
    if not tokens:
        return out
    block_m = 32 if tokens <= 64 else 64 if tokens <= 1024 else 128
    tiles = triton.cdiv(tokens, block_m) * triton.cdiv(experts, 64)
    # Some two programs for each multiprocessor, each with a stretch of the inputs.
    splits = max(1, min(256 // tiles, inputs // 128))
    share = triton.cdiv(triton.cdiv(inputs, splits), 64) * 64
    splits = triton.cdiv(inputs, share)
    parts, arrivals = out, out
    if splits > 1:
        parts = torch.empty((splits, tokens, experts), dtype=torch.float32, device=x.device)
        arrivals = _zeros(x.device, 256)
    _multiply_exactly[(triton.cdiv(experts, 64), triton.cdiv(tokens, block_m), splits)](
        x, weight, out, parts, arrivals, tokens, experts, inputs, x.stride(0), weight.stride(0), share,
        SPLITS=splits, BLOCK_M=block_m, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=3 if block_m > 64 else 4,
        **overlap_options(x.device),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["tokens"])
def _multiply_exactly(
    x_ptr,
    weight_ptr,
    out_ptr,
    parts_ptr,
    arrivals_ptr,
    tokens,
    columns,
    inputs,
    x_stride,
    weight_stride,
    share,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # The weights are the left operand: that one may come from registers, where they are cut into three.
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    begin = split * share
    stop = tl.minimum(begin + share, inputs)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    wait_for_inputs(OVERLAP)
    for start in range(begin, stop, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = k < stop
        x_place = x_ptr + m.to(tl.int64)[None, :] * x_stride + k[:, None]
        x = tl.load(x_place, mask=(m < tokens)[None, :] & inside[:, None], other=0.0)
        w_place = weight_ptr + n[:, None] * weight_stride + k[None, :]
        w = tl.load(w_place, mask=(n < columns)[:, None] & inside[None, :], other=0.0)
        high = w.to(x.dtype)
        left = w - high.to(tl.float32)
        middle = left.to(x.dtype)
        low = (left - middle.to(tl.float32)).to(x.dtype)
        part = tl.dot(low, x)
        part = tl.dot(middle, x, part)
        acc += tl.dot(high, x, part)
    place = m.to(tl.int64)[:, None] * columns + n[None, :]
    known = (m < tokens)[:, None] & (n < columns)[None, :]
    acc = tl.trans(acc)
    if SPLITS > 1:
        plane = tokens.to(tl.int64) * columns
        tl.store(parts_ptr + split * plane + place, acc, mask=known)
        # Every thread's part is written before the count says so. Whoever is last adds them, in their order.
        tl.debug_barrier()
        arrived = arrivals_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(arrived, 1, sem="acq_rel") < SPLITS - 1:
            return
        tl.store(arrived, 0)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for number in range(SPLITS):
            acc += tl.load(parts_ptr + number * plane + place, mask=known, other=0.0, cache_modifier=".cg")
    tl.store(out_ptr + place, acc, mask=known)


@functools.cache
def _zeros(device: torch.device, count: int) -> Tensor:
    """Return zeros that every kernel leaves as zeros; kernels of one stream never run at the same time."""
    return torch.zeros(count, dtype=torch.int32, device=device)


def route(
    logits: Tensor, router: Router, bias: Tensor | None = None, blocks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    tokens, experts = logits.shape
    if router.capacity and blocks is None:
        raise ValueError("a router with a capacity needs the blocks of its tokens")
    logits = logits if logits.is_contiguous() else logits.contiguous()
    ids = torch.empty((tokens, router.top_k), dtype=torch.int64, device=logits.device)
    weights = torch.empty((tokens, router.top_k), dtype=torch.float32, device=logits.device)
    if not tokens:
        return ids, weights
    votes = None
    if router.capacity:
        votes = torch.full((tokens, experts), float("-inf"), dtype=torch.float32, device=logits.device)
        _vote[(tokens,)](logits, logits if bias is None else bias, blocks, votes, **_rule(logits, router, bias))
    _choose(logits, router, bias, blocks, votes, ids, weights, None)
    return ids, weights


def _rule(logits: Tensor, router: Router, bias: Tensor | None) -> dict[str, object]:
    """Return the launch options of a router's kernels."""
    experts = logits.shape[1]
    if experts % router.groups:
        raise ValueError(f"{router.groups} groups do not divide {experts} experts")
    return {
        "EXPERTS": experts,
        "GROUPS": router.groups,
        "PER_GROUP": experts // router.groups,
        "BLOCK_G": triton.next_power_of_2(router.groups),
        "BLOCK_P": triton.next_power_of_2(experts // router.groups),
        "SIGMOID": router.scoring == "sigmoid",
        "BIASED": bias is not None,
        "num_warps": 1,
        **overlap_options(logits.device),
    }


def _choose(
    logits: Tensor,
    router: Router,
    bias: Tensor | None,
    blocks: Tensor | None,
    votes: Tensor | None,
    ids: Tensor,
    weights: Tensor,
    lists: "_Lists | None",
) -> None:
    """Write ids and weights; with lists, also the pairs of each expert, and -1 for what is not among them."""
    none = ids
    _route[(len(ids),)](
        logits,
        logits if bias is None else bias,
        logits if blocks is None else blocks,
        logits if votes is None else votes,
        ids,
        weights,
        none if lists is None else lists.members,
        none if lists is None else lists.table,
        none if lists is None else lists.progress,
        none if lists is None else lists.counts,
        router.scale,
        0 if lists is None else lists.first,
        0 if lists is None else lists.count,
        0 if lists is None else lists.tiles,
        KEPT_GROUPS=router.kept_groups,
        TOP_K=router.top_k,
        # As many as a warp has threads: then each counts for itself.
        BLOCK_K=max(32, triton.next_power_of_2(router.top_k)),
        NORMALISE=router.normalise,
        CAPACITY=router.capacity,
        PADDED=blocks is not None,
        LISTS=lists is not None,
        SHARED=lists is not None and lists.shared,
        BLOCK_M=1 if lists is None else lists.block_m,
        BLOCK_E=1 if lists is None else triton.next_power_of_2(lists.count),
        **_rule(logits, router, bias),
    )


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


@triton.jit(do_not_specialize=["first", "count", "tiles"])
def _route(
    logits_ptr,
    bias_ptr,
    blocks_ptr,
    votes_ptr,
    ids_ptr,
    weights_ptr,
    members_ptr,
    table_ptr,
    progress_ptr,
    counts_ptr,
    scale,
    first,
    count,
    tiles,
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
    LISTS: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    release_and_wait(OVERLAP)
    score, choice, expert, real = _score(
        logits_ptr, bias_ptr, token, EXPERTS, PER_GROUP, GROUPS, BLOCK_G, BLOCK_P, SIGMOID, BIASED
    )
    if GROUPS > 1:
        best = tl.max(choice, 1)
        leader = tl.min(tl.where(choice == best[:, None], expert, EXPERTS), 1)
        second = tl.max(tl.where(expert == leader[:, None], float("-inf"), choice), 1)
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
    if LISTS:
        ids = tl.where((ids >= first) & (ids < first + count), ids - first, -1)
    tl.store(ids_ptr + token * TOP_K + k, ids.to(ids_ptr.dtype.element_ty), mask=k < TOP_K)
    tl.store(weights_ptr + token * TOP_K + k, weights, mask=k < TOP_K)
    if LISTS:
        _enlist(ids, k, members_ptr, table_ptr, progress_ptr, counts_ptr, count, tiles, TOP_K, SHARED, BLOCK_M, BLOCK_E)


def experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *, shared: bool = False) -> Tensor:
    tokens, top_k = ids.shape
    if ids.shape != weights.shape:
        raise ValueError(f"ids {list(ids.shape)} do not go with weights {list(weights.shape)}")
    if not tokens:
        return torch.empty_like(x)
    ids, weights = (t if t.is_contiguous() else t.contiguous() for t in (ids, weights))
    lists = _make_lists(x, top_k, gate_up, down, shared=shared)
    _collect[(tokens,)](
        ids, lists.members, lists.table, lists.progress, lists.counts, lists.count, lists.tiles,
        TOP_K=top_k, BLOCK_K=max(32, triton.next_power_of_2(top_k)), SHARED=shared, BLOCK_M=lists.block_m,
        BLOCK_E=triton.next_power_of_2(lists.count), num_warps=1, **overlap_options(x.device),
    )  # fmt: skip
    return _mix(x, ids, weights, gate_up, down, lists)


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
    lists = _make_lists(x, router.top_k, gate_up, down, shared=shared, first=first)
    _choose(logits, router, bias, None, None, ids, weights, lists)
    return _mix(x, ids, weights, gate_up, down, lists)


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


@dataclass(frozen=True, slots=True)
class _Lists:
    """The pairs (token, choice) of each expert, in no order, and the tiles that they are cut into.

    A pair's number is token * top_k + choice; those of a shared expert come behind all these, one for each token.
    """

    first: int
    """Number of the first expert that lies here."""
    count: int
    """How many do, without a shared one."""
    shared: bool
    rows: int
    """Pairs, those of a shared expert included."""
    block_m: int
    """Pairs in a tile."""
    tiles: int
    """The most that there can be."""
    members: Tensor
    """[experts, tokens] int32: each one's pairs."""
    table: Tensor
    """[3, tiles] int32: a tile's expert, how many pairs it has, and where in `members` they begin; tiles that do not
    exist belong to expert -1."""
    progress: Tensor
    """[1 + tiles] int32 zeros: programs that have begun, and those that have finished a tile's first product."""
    counts: Tensor
    """[1 + experts] int32 zeros, which are zeros again when the lists are made."""
    together: Tile | None
    """How both products go in one launch, if they do."""


def _make_lists(x: Tensor, top_k: int, gate_up: Tensor, down: Tensor, *, shared: bool, first: int = 0) -> _Lists:
    """Return room for the lists of some tokens. Raises `ValueError` for shapes that do not go together."""
    tokens, hidden = x.shape
    stacked, double, width = gate_up.shape
    inner = double // 2
    if width != hidden or down.shape != (stacked, hidden, inner):
        raise ValueError(f"x {list(x.shape)} does not go with experts {list(gate_up.shape)} and {list(down.shape)}")
    count, pairs = stacked - shared, tokens * top_k
    together = _fit_together(x, pairs, down, count)
    block_m = together.tokens if together else _tile_rows(pairs, count, x.dtype)
    tiles = min(pairs, count + pairs // block_m) + (triton.cdiv(tokens, block_m) if shared else 0)
    return _Lists(
        first=first,
        count=count,
        shared=shared,
        rows=pairs + tokens * shared,
        block_m=block_m,
        tiles=tiles,
        members=torch.empty((stacked, tokens), dtype=torch.int32, device=x.device),
        table=torch.empty((3, tiles), dtype=torch.int32, device=x.device),
        progress=torch.empty(1 + tiles, dtype=torch.int32, device=x.device),
        counts=_zeros(x.device, 1 + count),
        together=together,
    )


def _mix(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, lists: _Lists) -> Tensor:
    """Multiply by the experts' weights, and add up what each token gets."""
    tokens, hidden = x.shape
    inner, top_k = down.shape[2], ids.shape[1]
    x, gate_up, down = (t if t.is_contiguous() else t.contiguous() for t in (x, gate_up, down))
    options, pairs, tiles = overlap_options(x.device), tokens * top_k, lists.tiles
    warm = torch.empty((lists.rows, inner), dtype=x.dtype, device=x.device)
    parts = torch.empty((lists.rows, hidden), dtype=x.dtype, device=x.device)
    tile = lists.together
    if tile is not None:
        piece = 1 << (tile.tokens.bit_length() - 1)
        _multiply[(tiles * (inner // tile.gate + hidden // tile.down),)](
            x,
            TensorDescriptor.from_tensor(gate_up.view(-1, hidden), [tile.gate, tile.inputs]),
            TensorDescriptor.from_tensor(down.view(-1, inner), [tile.down, tile.inputs]),
            lists.members, lists.table, lists.progress, weights, warm, parts, pairs, tiles,
            HIDDEN=hidden, INNER=inner, TOP_K=top_k,
            BLOCK_M=piece, REST=tile.tokens - piece, BLOCK_N=tile.gate, BLOCK_D=tile.down, BLOCK_K=tile.inputs,
            num_warps=tile.warps, num_stages=tile.stages, **options,
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


_TOGETHER_FROM = 32
"""Tokens of an expert from which up both products in one launch are faster (docs/benchmarks)."""


def _choose_tile(pairs: int, count: int) -> Tile:
    """Return a tile for both products in one launch."""
    return Tile(64, 64, 128, 64, 4, 3)


def _fit_together(x: Tensor, pairs: int, down: Tensor, count: int) -> Tile | None:
    """Return how both products go in one launch; that needs even tiles, and Hopper's copies of whole tiles."""
    _, hidden, inner = down.shape
    tile = _choose_tile(pairs, count)
    even = hidden % tile.down == 0 and hidden % tile.inputs == 0 and inner % tile.gate == 0 and inner % tile.inputs == 0
    able = x.device.type == "cpu" or overlap_options(x.device)["OVERLAP"]
    return tile if even and able and x.element_size() == 2 and pairs >= _TOGETHER_FROM * count else None


def _tile_rows(pairs: int, count: int, dtype: torch.dtype) -> int:
    """Return tokens in a tile: about what an expert gets, so that its weights are read once."""
    wanted = triton.next_power_of_2(max(1, pairs // count))
    return max(16, min(64 if dtype != torch.float32 else 16, wanted))


def _tile_columns(block_m: int, element_size: int) -> tuple[int, int, int, int]:
    """Return (columns, inputs, warps, stages) of a tile of the gated product; the other has twice the columns."""
    if element_size > 2:
        return 32, 32, 4, 1
    return 64, 64, 4, 4 if block_m <= 32 else 3


@triton.jit(do_not_specialize=["count", "tiles"])
def _collect(
    ids_ptr,
    members_ptr,
    table_ptr,
    progress_ptr,
    counts_ptr,
    count,
    tiles,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Make the lists of ids that are given."""
    k = tl.arange(0, BLOCK_K)
    release_and_wait(OVERLAP)
    ids = tl.load(ids_ptr + tl.program_id(0).to(tl.int64) * TOP_K + k, mask=k < TOP_K, other=-1).to(tl.int32)
    _enlist(ids, k, members_ptr, table_ptr, progress_ptr, counts_ptr, count, tiles, TOP_K, SHARED, BLOCK_M, BLOCK_E)


@triton.jit
def _enlist(
    ids,
    k,
    members_ptr,
    table_ptr,
    progress_ptr,
    counts_ptr,
    count,
    tiles,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Add the pairs of this program's token to the lists of its experts; the last program numbers the tiles of all.

    In what order pairs stand in a list depends on who was first; what a pair gets does not depend on its place.
    """
    token = tl.program_id(0)
    tokens = tl.num_programs(0)
    pairs = tokens * TOP_K
    mine = (k < TOP_K) & (ids >= 0)
    place = tl.atomic_add(counts_ptr + 1 + ids, 1, mask=mine, sem="relaxed")
    tl.store(members_ptr + ids * tokens + place, token * TOP_K + k, mask=mine)
    if SHARED:
        tl.store(members_ptr + count * tokens + token, pairs + token)
    # What this program counted stands there before its arrival says so.
    tl.debug_barrier()
    if tl.atomic_add(counts_ptr, 1, sem="acq_rel") == tokens - 1:
        each = tl.arange(0, BLOCK_E)
        sizes = tl.load(counts_ptr + 1 + each, mask=each < count, other=0, cache_modifier=".cg")
        tl.store(counts_ptr + 1 + each, tl.zeros((BLOCK_E,), tl.int32), mask=each < count)
        tl.store(counts_ptr, 0)
        # A shared expert's tiles come first: theirs is the longest work, and their weights are read once.
        everyone = 0
        if SHARED:
            everyone = (tokens + BLOCK_M - 1) // BLOCK_M
            for start in range(0, everyone, BLOCK_E):
                tile = start + each
                row = table_ptr + tile
                tl.store(row, tl.zeros((BLOCK_E,), tl.int32) + count, mask=tile < everyone)
                tl.store(row + tiles, tl.minimum(tokens - tile * BLOCK_M, BLOCK_M), mask=tile < everyone)
                tl.store(row + 2 * tiles, count * tokens + tile * BLOCK_M, mask=tile < everyone)
        needed = (sizes + BLOCK_M - 1) // BLOCK_M
        before = everyone + tl.cumsum(needed, 0) - needed
        for start in range(0, tiles + 1, BLOCK_E):
            tl.store(progress_ptr + start + each, tl.zeros((BLOCK_E,), tl.int32), mask=start + each <= tiles)
        for tile in range(everyone + tl.sum(needed, 0), tiles, BLOCK_E):
            tl.store(table_ptr + tile + each, tl.full((BLOCK_E,), -1, tl.int32), mask=tile + each < tiles)
        for number in range(tl.max(needed, 0)):
            exists = number < needed
            row = table_ptr + before + number
            tl.store(row, each, mask=exists)
            tl.store(row + tiles, tl.minimum(sizes - number * BLOCK_M, BLOCK_M), mask=exists)
            tl.store(row + 2 * tiles, each * tokens + number * BLOCK_M, mask=exists)


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
    REST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program's part of a tile's first product, or of its second one: those of all tiles come after all first ones.

    Weights are the left operand, so that they fill the 64 rows of a Hopper matrix instruction; a tile's tokens are its
    short side, in two pieces where their number is no power of two. Programs take their numbers as they start, so
    whoever waits for a first product waits for programs that run already.
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
            HIDDEN, INNER, TOP_K, BLOCK_M, REST, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        # Every thread's part is written before the count says so.
        tl.debug_barrier()
        tl.atomic_add(ready_ptr, 1, sem="release")
    else:
        while tl.atomic_add(ready_ptr, 0, sem="acquire") < GATES:
            pass
        _multiply_second(
            warm_ptr, down, share_ptr, parts_ptr, members, expert, live, part * BLOCK_D, pairs,
            HIDDEN, INNER, BLOCK_M, REST, BLOCK_D, BLOCK_K,
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
    REST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Swiglu of the tokens' rows."""
    pair, inside = _pairs_of(members_ptr, live, 0, BLOCK_M)
    token = _token_of(pair, pairs, TOP_K)
    gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if REST:
        pair_rest, inside_rest = _pairs_of(members_ptr, live, BLOCK_M, REST)
        token_rest = _token_of(pair_rest, pairs, TOP_K)
        gate_rest = tl.zeros((BLOCK_N, REST), tl.float32)
        up_rest = tl.zeros((BLOCK_N, REST), tl.float32)
    row = expert * (2 * INNER) + column
    for start in range(0, HIDDEN, BLOCK_K):
        w_gate = gate_up.load([row, start])
        w_up = gate_up.load([row + INNER, start])
        x = _columns_of(x_ptr, token, inside, start, HIDDEN, BLOCK_K)
        gate = tl.dot(w_gate, x, gate)
        up = tl.dot(w_up, x, up)
        if REST:
            x = _columns_of(x_ptr, token_rest, inside_rest, start, HIDDEN, BLOCK_K)
            gate_rest = tl.dot(w_gate, x, gate_rest)
            up_rest = tl.dot(w_up, x, up_rest)
    _keep(warm_ptr + column, gate * tl.sigmoid(gate) * up, pair, inside, INNER, BLOCK_N)
    if REST:
        warm = gate_rest * tl.sigmoid(gate_rest) * up_rest
        _keep(warm_ptr + column, warm, pair_rest, inside_rest, INNER, BLOCK_N)


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
    REST: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The share of each pair times its product."""
    pair, inside = _pairs_of(members_ptr, live, 0, BLOCK_M)
    share = tl.load(share_ptr + pair, mask=inside & (pair < pairs), other=1.0)
    acc = tl.zeros((BLOCK_D, BLOCK_M), tl.float32)
    if REST:
        pair_rest, inside_rest = _pairs_of(members_ptr, live, BLOCK_M, REST)
        share_rest = tl.load(share_ptr + pair_rest, mask=inside_rest & (pair_rest < pairs), other=1.0)
        acc_rest = tl.zeros((BLOCK_D, REST), tl.float32)
    row = expert * HIDDEN + column
    for start in range(0, INNER, BLOCK_K):
        w = down.load([row, start])
        acc = tl.dot(w, _columns_of(warm_ptr, pair, inside, start, INNER, BLOCK_K), acc)
        if REST:
            acc_rest = tl.dot(w, _columns_of(warm_ptr, pair_rest, inside_rest, start, INNER, BLOCK_K), acc_rest)
    _keep(parts_ptr + column, acc * share[None, :], pair, inside, HIDDEN, BLOCK_D)
    if REST:
        _keep(parts_ptr + column, acc_rest * share_rest[None, :], pair_rest, inside_rest, HIDDEN, BLOCK_D)


@triton.jit
def _pairs_of(members_ptr, live, begin, COUNT: tl.constexpr):
    """Return the numbers of a tile's pairs from `begin` on, and which of them exist."""
    m = begin + tl.arange(0, COUNT)
    return tl.load(members_ptr + m, mask=m < live, other=0), m < live


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
