"""As many at once as the steps left ask for (adaptive parallel decoding without a verifier, after dfastllm)."""

import torch
from torch import Tensor

from worker.decoding.ranking import take_best, take_highest
from worker.decoding.types import BlockView, TokenStats


def accept(stats: TokenStats, view: BlockView, max_parallel: Tensor, steps: Tensor, threshold: Tensor) -> Tensor:
    """Accept, of the masks // (steps left) most confident, the best and all with confidence >= threshold [rows].

    At most max_parallel [rows] int64, at least one. steps [rows] int64, 0 for as few as max_parallel allows; in the
    last step and behind it one step counts as left, so that what was refused is caught up with.
    """
    left = torch.where(steps > 0, steps - view.step, 1).clamp(min=1)
    share = (view.masked.sum(-1) // left).clamp(min=1).minimum(max_parallel)
    candidates = take_highest(stats.confidence, view.masked, share)
    return candidates & (stats.confidence >= threshold[:, None]) | take_best(stats.confidence, view.masked)
