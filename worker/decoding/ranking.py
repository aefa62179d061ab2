"""Orders and quotas that strategies share."""

import torch
from torch import Tensor

from worker.decoding.types import BlockView


def quota(view: BlockView, steps: Tensor) -> Tensor:
    """Return how many positions each row's step should take: [rows] int64, at least 1.

    The block's length (not the number of its masks) is split evenly over `steps` [rows]; the first steps take one more
    where it does not divide. 0 steps stand for one position a step.
    """
    steps = torch.where(steps > 0, steps, view.length)
    share = view.length // steps + (view.step < view.length % steps)
    return share.clamp(min=1)


def take_highest(score: Tensor, masked: Tensor, count: Tensor) -> Tensor:
    """Return [rows, block] bool: the `count` [rows] masked positions of highest score, the leftmost among equals."""
    order = score.masked_fill(~masked, float("-inf")).sort(stable=True, dim=-1, descending=True).indices
    places = torch.arange(score.shape[1], device=score.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(1, order, places)
    # A masked position may score -inf as well; then rank alone would let an unmasked one through.
    return (rank < count[:, None]) & masked


def take_best(score: Tensor, masked: Tensor) -> Tensor:
    """Return [rows, block] bool: each row's masked position of highest score, the leftmost among equals."""
    best = score.masked_fill(~masked, float("-inf")).argmax(-1, keepdim=True)
    return torch.zeros_like(masked).scatter_(1, best, True) & masked


def take_leftmost(masked: Tensor, count: Tensor) -> Tensor:
    """Return [rows, block] bool: the first `count` [rows] masked positions."""
    return masked & (masked.cumsum(-1) <= count[:, None])
