"""Entropy budget a step (EB-sampler, arXiv 2505.24857, in JetEngine's reading)."""

from torch import Tensor

from worker.decoding.ranking import take_highest
from worker.decoding.types import BlockView, TokenStats


def accept(stats: TokenStats, view: BlockView, bound: Tensor) -> Tensor:
    """Accept masks by rising entropy while the running sum, their own included, is < bound [rows]; at least one."""
    rising = stats.entropy.masked_fill(~view.masked, float("inf")).sort(-1).values
    count = (rising.cumsum(-1) < bound[:, None]).sum(-1).clamp(min=1)
    return take_highest(-stats.entropy, view.masked, count)
