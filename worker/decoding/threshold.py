"""Confidence threshold (Fast-dLLM, arXiv 2505.22618)."""

from torch import Tensor

from worker.decoding.ranking import take_best
from worker.decoding.types import BlockView, TokenStats


def accept(stats: TokenStats, view: BlockView, threshold: Tensor) -> Tensor:
    """Accept every mask with confidence >= threshold [rows], and always the most confident one."""
    sure = view.masked & (stats.confidence >= threshold[:, None])
    return sure | take_best(stats.confidence, view.masked)
