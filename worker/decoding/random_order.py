"""Positions in random order (LLaDA's random remasking)."""

import torch
from torch import Tensor

from kernels.noise import POSITION_LANE, uniform
from worker.decoding.ranking import quota, take_highest
from worker.decoding.types import BlockView


def accept(view: BlockView, steps: Tensor) -> Tensor:
    """Accept the step's quota of masks, drawn uniformly by (seed, position, step); steps [rows], 0 for one a step."""
    position = view.start[:, None] + torch.arange(view.masked.shape[1], device=view.masked.device)
    lane = torch.tensor(POSITION_LANE, device=view.masked.device)
    score = uniform(view.seed[:, None], position, view.step[:, None], lane)
    return take_highest(score, view.masked, quota(view, steps))
