"""Twins of `kernels.moe.route` and `router_logits`: a token's scores, and which experts it goes to."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.lists import Lists, enlist, zeros
from kernels.gpu.overlap import overlap_options, release_and_wait, wait_for_inputs
from kernels.moe import Router
from kernels.moe import router_logits as plain_logits


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    if x.element_size() > 2:
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
        arrivals = zeros(x.device, 256)
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
    choose(logits, router, bias, blocks, votes, ids, weights, None)
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


def choose(
    logits: Tensor,
    router: Router,
    bias: Tensor | None,
    blocks: Tensor | None,
    votes: Tensor | None,
    ids: Tensor,
    weights: Tensor,
    lists: Lists | None,
    first: int = 0,
) -> None:
    """Write ids and weights; with lists, also the pairs of each expert.

    The lists are of experts from `first` on, whose ids begin with 0 there; the id of one that lies elsewhere is -1.
    """
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
        first,
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
    # A NaN equals no maximum, and what is never found has no id. As in the reference, it is the highest of all.
    choice = tl.where(choice != choice, float("inf"), choice)
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
        enlist(ids, k, members_ptr, table_ptr, progress_ptr, counts_ptr, count, tiles, TOP_K, SHARED, BLOCK_M, BLOCK_E)
