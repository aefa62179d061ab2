"""The tokens of each expert, collected on the device: nothing is sorted and nothing is read back.

Whoever chooses a token's experts adds it to their lists; the last to do so numbers tiles of tokens. A grid sized for
the worst case leaves early where there is no tile, so that all shapes are known before the launch and a captured graph
serves any routing.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.overlap import overlap_options, release_and_wait


@dataclass(frozen=True, slots=True)
class Lists:
    """The pairs (token, choice) of each expert, in no order, and the tiles that they are cut into.

    A pair's number is token * top_k + choice; those of a shared expert come behind all these, one for each token.
    """

    count: int
    """Experts that lie here, without a shared one."""
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


def make_lists(tokens: int, top_k: int, count: int, block_m: int, device: torch.device, *, shared: bool) -> Lists:
    """Return room for the lists of some tokens."""
    pairs = tokens * top_k
    tiles = min(pairs, count + pairs // block_m) + (triton.cdiv(tokens, block_m) if shared else 0)
    return Lists(
        count=count,
        shared=shared,
        rows=pairs + tokens * shared,
        block_m=block_m,
        tiles=tiles,
        members=torch.empty((count + shared, tokens), dtype=torch.int32, device=device),
        table=torch.empty((3, tiles), dtype=torch.int32, device=device),
        progress=torch.empty(1 + tiles, dtype=torch.int32, device=device),
        counts=zeros(device, 1 + count),
    )


@functools.cache
def zeros(device: torch.device, count: int) -> Tensor:
    """Return zeros that every kernel leaves as zeros; kernels of one stream never run at the same time."""
    return torch.zeros(count, dtype=torch.int32, device=device)


def collect(ids: Tensor, lists: Lists) -> None:
    """Make the lists of ids [tokens, top_k] that are given."""
    tokens, top_k = ids.shape
    _collect[(tokens,)](
        ids, lists.members, lists.table, lists.progress, lists.counts, lists.count, lists.tiles,
        TOP_K=top_k, BLOCK_K=max(32, triton.next_power_of_2(top_k)), SHARED=lists.shared, BLOCK_M=lists.block_m,
        BLOCK_E=triton.next_power_of_2(lists.count), num_warps=1, **overlap_options(ids.device),
    )  # fmt: skip


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
    k = tl.arange(0, BLOCK_K)
    release_and_wait(OVERLAP)
    ids = tl.load(ids_ptr + tl.program_id(0).to(tl.int64) * TOP_K + k, mask=k < TOP_K, other=-1).to(tl.int32)
    enlist(ids, k, members_ptr, table_ptr, progress_ptr, counts_ptr, count, tiles, TOP_K, SHARED, BLOCK_M, BLOCK_E)


@triton.jit
def enlist(
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
