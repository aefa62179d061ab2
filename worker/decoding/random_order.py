"""Positions in random order (LLaDA's random remasking)."""

from torch import Tensor

from worker.decoding.ranking import quota, take_highest
from worker.decoding.types import BlockView, Draw


def accept(view: BlockView, steps: Tensor, draw: Draw) -> Tensor:
    """Accept the step's quota of masks, drawn uniformly by (seed, position, step); steps [rows], 0 for one a step."""
    return take_highest(draw(view.seed[:, None], view.positions, view.step[:, None]), view.masked, quota(view, steps))
