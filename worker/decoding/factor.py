"""A limit that falls with the number of positions taken at once (Fast-dLLM, arXiv 2505.22618, section 3.3)."""

import torch
from torch import Tensor

from worker.decoding.ranking import take_highest
from worker.decoding.types import BlockView, TokenStats


def accept(stats: TokenStats, view: BlockView, factor: Tensor) -> Tensor:
    """Accept the most confident masks before the first of rank n >= 2 with confidence < 1 - factor / (n + 1).

    factor [rows] float32. The published loop takes the very last mask too if only that one fails.
    """
    masked = view.masked.sum(-1)
    falling = stats.confidence.masked_fill(~view.masked, float("-inf")).sort(-1, descending=True).values
    rank = torch.arange(1, falling.shape[1] + 1, device=falling.device)
    limit = 1 - factor[:, None] / (rank + 1)
    passes = (falling >= limit) | (rank == 1)
    count = passes.int().cumprod(-1).sum(-1)
    count = torch.where(count >= masked - 1, masked, count)
    return take_highest(stats.confidence, view.masked, count)
