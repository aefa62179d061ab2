"""Several blocks at once (D2F, arXiv 2508.09192; Diffulex): each is decided by the rule below, as if it were alone."""

import torch
from torch import Tensor

from worker.decoding.types import BlockView, TokenStats


def accept(stats: TokenStats, view: BlockView, tau_acc: Tensor, tau_semi: Tensor, filler: Tensor) -> Tensor:
    """Accept every mask with confidence > tau_acc [rows] float32, and the best of some blocks where there is none.

    A row's columns are blocks of `view.length`. The best is accepted where the block is fully activated: the first one,
    and each behind a block of which at least tau_semi [rows] float64 is decided. Masks of `filler` [rows, block] bool
    take no turn while their block has others.
    """
    masked = view.masked
    column = torch.arange(masked.shape[1], device=masked.device)
    block = column // view.length[:, None]

    def count(marked: Tensor) -> Tensor:
        """Return [rows, blocks + 1]: how many of each block are marked; the first column stands before all blocks."""
        zeros = torch.zeros((masked.shape[0], masked.shape[1] + 1), dtype=torch.int64, device=masked.device)
        return zeros.scatter_add(1, block + 1, marked.long())

    open_ = count(masked)
    # Before the first block nothing is open, so that it is always active.
    active = (view.length[:, None] - open_ >= tau_semi[:, None] * view.length[:, None]).gather(1, block)
    others = masked & ~filler
    turn = torch.where(count(others).gather(1, block + 1) > 0, others, masked)
    sure = turn & (stats.confidence > tau_acc[:, None])
    helpless = active & (count(sure).gather(1, block + 1) == 0)
    return sure | (_best(stats.confidence, turn, block) & helpless)


def _best(score: Tensor, turn: Tensor, block: Tensor) -> Tensor:
    """Return [rows, block] bool: each block's highest score among those of `turn`, the leftmost of equal ones."""
    score = score.masked_fill(~turn, float("-inf"))
    highest = torch.full_like(score, float("-inf")).scatter_reduce(1, block, score, "amax")
    column = torch.arange(score.shape[1], device=score.device).expand_as(block)
    reached = turn & (score == highest.gather(1, block))
    end = score.shape[1]
    first = torch.full_like(block, end).scatter_reduce(1, block, torch.where(reached, column, end), "amin")
    return reached & (column == first.gather(1, block))
