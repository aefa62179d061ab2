"""Sub-block decoding (Fast-dLLM v2, arXiv 2509.26328): the threshold rule inside the sub-block that is in turn.

The engine masks only the sub-block's positions; what is left is the strict comparison of the published loop.
"""

from torch import Tensor

from worker.decoding.ranking import take_best
from worker.decoding.types import BlockView, TokenStats


def accept(stats: TokenStats, view: BlockView, threshold: Tensor) -> Tensor:
    """Accept every mask with confidence > threshold [rows], and always the most confident one."""
    sure = view.masked & (stats.confidence > threshold[:, None])
    return sure | take_best(stats.confidence, view.masked)
