"""Masks to tokens and tokens to tokens in one step (LLaDA2.1, arXiv 2602.08676)."""

import torch
from torch import Tensor

from worker.decoding.ranking import take_highest
from worker.decoding.types import BlockView, TokenStats


def accept(
    stats: TokenStats, view: BlockView, threshold: Tensor, editing_threshold: Tensor, num_to_transfer: Tensor
) -> Tensor:
    """Return masks to fill and decided positions to revise; thresholds [rows] float32, num_to_transfer [rows] int64.

    Masks: all with confidence > threshold if they are at least num_to_transfer, else that many of the most confident.
    Decided: where the proposal differs from the token and its confidence > editing_threshold.
    """
    sure = view.masked & (stats.confidence > threshold[:, None])
    enough = sure.sum(-1) >= num_to_transfer
    filled = torch.where(enough[:, None], sure, take_highest(stats.confidence, view.masked, num_to_transfer))
    differs = stats.token != view.current
    revised = view.editable & differs & (stats.confidence > editing_threshold[:, None])
    return filled | revised
