"""WeDLM's rule (arXiv 2512.22737): accept what is certain, the farther from the text the more so."""

import torch
from torch import Tensor

from worker.decoding.ranking import take_best
from worker.decoding.types import BlockView, TokenStats


def accept(stats: TokenStats, view: BlockView, bound: Tensor, penalty: Tensor) -> Tensor:
    """Accept every mask with entropy + penalty [rows] * distance < bound [rows], and always the lowest.

    The distance is that from the first mask, in tokens.
    """
    column = torch.arange(view.masked.shape[1], device=view.masked.device)
    first = view.masked.int().argmax(-1, keepdim=True)
    score = stats.entropy + penalty[:, None] * (column - first)
    return (view.masked & (score < bound[:, None])) | take_best(-score, view.masked)
