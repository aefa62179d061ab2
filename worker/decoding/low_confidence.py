"""Quotas by confidence, fixed or overtaken by a threshold (SDAR, LLaDA's low-confidence remasking, JetEngine)."""

import torch
from torch import Tensor

from worker.decoding.ranking import quota, take_highest, take_leftmost
from worker.decoding.types import BlockView, TokenStats


def accept_static(stats: TokenStats, view: BlockView, steps: Tensor) -> Tensor:
    """Accept the step's quota of most confident masks; steps [rows] int64, 0 for one position a step."""
    return take_highest(stats.confidence, view.masked, quota(view, steps))


def accept_dynamic(stats: TokenStats, view: BlockView, threshold: Tensor, steps: Tensor, leftmost: Tensor) -> Tensor:
    """Accept all masks with confidence > threshold if they fill the step's quota; else exactly the quota.

    threshold [rows] float32, steps as above; leftmost [rows] bool fills the quota from the left (JetEngine) instead of
    by confidence (SDAR).
    """
    count = quota(view, steps)
    sure = view.masked & (stats.confidence > threshold[:, None])
    enough = sure.sum(-1) >= count
    fallback = torch.where(
        leftmost[:, None], take_leftmost(view.masked, count), take_highest(stats.confidence, view.masked, count)
    )
    return torch.where(enough[:, None], sure, fallback)
