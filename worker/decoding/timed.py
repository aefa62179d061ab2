"""Shares by a schedule of time (Dream, arXiv 2508.15487): masks thin out as time falls from 1 to eps."""

import torch
from torch import Tensor

from worker.decoding.ranking import take_highest
from worker.decoding.types import BlockView, Draw


def accept_best(score: Tensor, view: BlockView, steps: Tensor, eps: Tensor) -> Tensor:
    """Accept the step's share of the masks, rounded down, by falling score [rows, block]; all in the last step.

    steps [rows] int64, 0 for as many as there were masks; eps [rows] float32.
    """
    share, last = step_share(view, steps, eps)
    masked = view.masked.sum(-1)
    return take_highest(score, view.masked, torch.where(last, masked, (masked * share).long()))


def accept_drawn(view: BlockView, steps: Tensor, eps: Tensor, draw: Draw) -> Tensor:
    """Accept each mask with the probability of the step's share; all in the last step."""
    share, last = step_share(view, steps, eps)
    drawn = draw(view.seed[:, None], view.positions, view.step[:, None])
    return view.masked & ((drawn < share[:, None]) | last[:, None])


def step_share(view: BlockView, steps: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
    """Return the share 1 - s / t of the step from time t to s, [rows] float32, and which rows are in their last."""
    steps = torch.where(steps > 0, steps, view.undecided_at_first).clamp(min=1)
    t, s = (_time(view.step + ahead, steps, eps) for ahead in (0, 1))
    return 1 - s / t, view.step >= steps - 1


def _time(index: Tensor, steps: Tensor, eps: Tensor) -> Tensor:
    """Return point `index` of a linspace from 1 to eps, as PyTorch rounds it: each half from its own end."""
    width = (eps - 1) / steps
    return torch.where(index < (steps + 1) // 2, 1 + width * index, eps - width * (steps - index))
