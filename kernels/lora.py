"""Low-rank adapters (arXiv 2106.09685), a different one for each token of a batch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.swiglu import swiglu as _swiglu


@dataclass(frozen=True, slots=True)
class Factors:
    """The adapters of one linear side by side.

    The linear may be several projections stacked by rows. Each has its own factor a, in order below each other, and its
    factor b in its own rows.
    """

    a: Tensor
    """[adapters, projections * rank, inputs], finite"""
    b: Tensor
    """[adapters, outputs, rank]; smaller ranks are padded with zeros."""
    ends: tuple[int, ...]
    """Row behind the last of each projection; at most three."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Which adapter each token has; tokens of the same one stand together, so that its factors are read once."""

    order: Tensor
    """[tokens] int32: a token in each place."""
    adapter: Tensor
    """[tokens] int32, by place; -1 for none."""
    rank: Tensor
    """[tokens] int32, by place: what lies behind the adapter's own rank need not be read; 0 for none."""
    scale: Tensor
    """[tokens] float32, by place."""


def assign(adapter: Tensor, scale: Tensor, ranks: Tensor, each: int = 1) -> Assignment:
    """Return the assignment of rows of `each` tokens: adapter [rows] integer, scale [rows], ranks [adapters]."""
    chosen, rows = torch.sort(adapter, stable=True)
    rank = torch.where(chosen >= 0, ranks[chosen.clamp(min=0)], 0)
    within = torch.arange(each, device=adapter.device)

    def spread(values: Tensor, dtype: torch.dtype) -> Tensor:
        # A single row would stay a view that has one value in memory.
        return values.to(dtype)[:, None].expand(-1, each).reshape(-1).contiguous()

    return Assignment(
        order=(rows[:, None] * each + within).to(torch.int32).view(-1),
        adapter=spread(chosen, torch.int32),
        rank=spread(rank, torch.int32),
        scale=spread(scale[rows], torch.float32),
    )


def lora(y: Tensor, low: Tensor, factors: Factors, assignment: Assignment) -> Tensor:
    """Return y + scale * low b^T, each token with its own adapter and scale.

    y [tokens, outputs] is what the linear makes of x, low [tokens, adapters * projections * rank] is x a^T for all
    adapters. Products are summed in float32.
    """
    return _sum(y, low, factors, assignment).to(y.dtype)


def lora_swiglu(y: Tensor, low: Tensor, factors: Factors, assignment: Assignment) -> Tensor:
    """Return the gated unit [tokens, outputs / 2] (see `kernels.swiglu`) of what `lora` returns.

    The linear is a gate and what it gates, of the same size.
    """
    return _swiglu(_sum(y, low, factors, assignment)).to(y.dtype)


def _sum(y: Tensor, low: Tensor, factors: Factors, assignment: Assignment) -> Tensor:
    total = y.to(torch.float32, copy=True)
    most, low = factors.b.shape[2], low.unflatten(1, factors.a.shape[:2])
    for number in assignment.adapter.unique().tolist():
        if number < 0:
            continue
        mine = assignment.adapter == number
        tokens, rank = assignment.order[mine].long(), int(assignment.rank[mine][0])
        own, b = low[tokens, number].float(), factors.b[number, :, :rank].float()
        own = own * assignment.scale[mine, None]
        first = 0
        for piece, end in enumerate(factors.ends):
            part = own[:, piece * most : piece * most + rank] @ b[first:end].T
            total[:, first:end].index_add_(0, tokens, part)
            first = end
    return total
