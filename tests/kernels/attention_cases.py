"""Awkward shapes for paged attention, and a naive reading of its contract in float64."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Heads:
    query: int
    kv: int
    dim: int


HEADS = [Heads(1, 1, 8), Heads(4, 4, 16), Heads(6, 2, 20), Heads(6, 3, 8), Heads(5, 1, 32), Heads(8, 2, 64)]


@dataclass(frozen=True, slots=True)
class Batch:
    """Ragged rows: row i asks for positions starts[i].. and sees up to ends[i][j]."""

    name: str
    starts: tuple[int, ...]
    ends: tuple[tuple[int, ...], ...]


def blocks(start: int, stop: int, size: int) -> tuple[int, ...]:
    return tuple((position // size + 1) * size for position in range(start, stop))


BATCHES = [
    Batch("one position", (0,), ((1,),)),
    Batch("one row deep in its context", (44,), ((48,) * 4,)),
    Batch("a prefill of whole blocks", (0,), (blocks(0, 24, 8),)),
    Batch("causal", (0, 3), (tuple(range(1, 8)), tuple(range(4, 11)))),
    Batch("equal rows, contexts of one size", (8, 12, 8), ((12,) * 4, (16,) * 4, (12,) * 4)),
    Batch("equal rows, contexts from 4 to 132", (0, 128, 64, 4), ((4,) * 4, (132,) * 4, (68,) * 4, (8,) * 4)),
    Batch("one group, contexts from 9 to 15", (8, 14, 11), ((9,), (15,), (12,))),
    Batch("fused commit beside prefill", (4, 0, 16), (blocks(4, 12, 4), blocks(0, 20, 4), blocks(16, 20, 4))),
    Batch("groups whose rows are not adjacent", (8, 0, 16, 1), ((9,), (3, 3, 3), (17,), (4, 4, 4))),
    Batch("visible ends that fall", (5,), ((9, 3, 7, 1),)),
]


def shuffled_pages(batch: Batch, page_size: int, seed: int) -> tuple[list[list[int]], int]:
    """Return page numbers for each row, in no order, and how many pages there are."""
    needs = []
    for start, ends in zip(batch.starts, batch.ends, strict=True):
        reach = max(start + len(ends), *ends)
        needs.append(-(-reach // page_size))
    total = sum(needs) + 2
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).tolist()
    pages = []
    for need in needs:
        pages.append(order[:need])
        order = order[need:]
    return pages, total


def naive_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: Batch, pages: list[list[int]], scale: float
) -> Tensor:
    """Return float64 [tokens, heads, head_dim], one query and one head at a time."""
    page_size, kv_heads = k_pages.shape[1:3]
    group = q.shape[1] // kv_heads
    out = torch.empty(q.shape, dtype=torch.float64)
    token = 0
    for row, ends in enumerate(batch.ends):
        for end in ends:
            places = [(pages[row][i // page_size], i % page_size) for i in range(end)]
            for head in range(q.shape[1]):
                keys = torch.stack([k_pages[page, at, head // group] for page, at in places]).double()
                values = torch.stack([v_pages[page, at, head // group] for page, at in places]).double()
                weights = torch.softmax(keys @ q[token, head].double() * scale, 0)
                out[token, head] = weights @ values
            token += 1
    return out
