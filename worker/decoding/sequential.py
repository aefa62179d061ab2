"""Left to right (SDAR)."""

import torch
from torch import Tensor

from worker.decoding.ranking import quota
from worker.decoding.types import BlockView


def accept(view: BlockView, steps: Tensor) -> Tensor:
    """Accept the first mask and the masks among the quota - 1 positions behind it; steps [rows], 0 for one a step."""
    first = view.masked.int().argmax(-1)
    position = torch.arange(view.masked.shape[1], device=view.masked.device)
    window = (position >= first[:, None]) & (position < (first + quota(view, steps))[:, None])
    return view.masked & window
