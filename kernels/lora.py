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
    """[adapters, projections * rank, inputs]; smaller ranks are padded."""
    b: Tensor
    """[adapters, outputs, rank]"""
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
    """[tokens] int32, by place: what lies behind the adapter's own rank is not read; 0 for none."""
    scale: Tensor
    """[tokens] float32, by place."""


def assign(adapter: Tensor, scale: Tensor, ranks: Tensor, each: int = 1) -> Assignment:
    """Return the assignment of rows of `each` tokens: adapter [rows] integer, scale [rows], ranks [adapters]."""
    chosen, rows = torch.sort(adapter, stable=True)
    rank = torch.where(chosen >= 0, ranks[chosen.clamp(min=0)], 0)
    within = torch.arange(each, device=adapter.device)

    def spread(values: Tensor, dtype: torch.dtype) -> Tensor:
        return values.to(dtype)[:, None].expand(-1, each).reshape(-1)

    return Assignment(
        order=(rows[:, None] * each + within).to(torch.int32).view(-1),
        adapter=spread(chosen, torch.int32),
        rank=spread(rank, torch.int32),
        scale=spread(scale[rows], torch.float32),
    )


def lora(y: Tensor, x: Tensor, factors: Factors, assignment: Assignment) -> Tensor:
    """Return y + scale * (x a^T) b^T, each token with its own adapter and scale; y is overwritten.

    y [tokens, outputs], x [tokens, inputs]. Products are float32.
    """
    return y.copy_(_sum(y, x, factors, assignment))


def lora_swiglu(y: Tensor, x: Tensor, factors: Factors, assignment: Assignment) -> Tensor:
    """Return the gated unit [tokens, outputs / 2] (see `kernels.swiglu`) of what `lora` returns; y may be overwritten.

    The linear is a gate and what it gates, of the same size.
    """
    return _swiglu(_sum(y, x, factors, assignment)).to(y.dtype)


def _sum(y: Tensor, x: Tensor, factors: Factors, assignment: Assignment) -> Tensor:
    total = y.to(torch.float32, copy=True)
    for number in assignment.adapter.unique().tolist():
        if number < 0:
            continue
        mine = assignment.adapter == number
        tokens, rank = assignment.order[mine].long(), int(assignment.rank[mine][0])
        a, b = factors.a[number].float(), factors.b[number, :, :rank].float()
        most = factors.b.shape[2]
        low = assignment.scale[mine, None] * (x[tokens].float() @ a.T)
        first = 0
        for piece, end in enumerate(factors.ends):
            part = low[:, piece * most : piece * most + rank] @ b[first:end].T
            total[:, first:end].index_add_(0, tokens, part)
            first = end
    return total
