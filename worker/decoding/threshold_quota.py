"""Confidence threshold inside a quota that carries over what it refused (Fast-dLLM's loop for Dream)."""

import torch
from torch import Tensor

from worker.decoding.ranking import take_best, take_highest
from worker.decoding.types import BlockView, TokenStats


def accept(stats: TokenStats, view: BlockView, threshold: Tensor, steps: Tensor) -> Tensor:
    """Accept, among the step's quota of most confident masks, the best and all with confidence >= threshold [rows].

    The quota is what an even schedule over `steps` [rows] would have taken by now, less what was taken: a share of the
    masks at first, plus all refusals. 0 steps stand for one position a step.
    """
    total, masked = view.undecided_at_first, view.masked.sum(-1)
    steps = torch.where(steps > 0, steps, total).clamp(min=1)
    due = torch.where(view.step + 1 < steps, total // steps * (view.step + 1), total)
    candidates = take_highest(stats.confidence, view.masked, due - (total - masked))
    sure = candidates & (stats.confidence >= threshold[:, None])
    return sure | take_best(stats.confidence, view.masked)
