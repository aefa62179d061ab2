"""Vocabulary of the strategies: what they see and what they answer.

All tensors are [rows, block], rows padded to the longest block of the step; padding is never masked.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.noise import POSITION_LANE, uniform

Draw = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(seed, position, step) to float32 numbers in (0, 1) of their broadcast shape: the same for the same three."""


def draw_position(seed: Tensor, position: Tensor, step: Tensor) -> Tensor:
    """Draw one number for each position; seed, position and step are int64 and broadcast."""
    return uniform(seed, position, step, torch.full((), POSITION_LANE, device=seed.device))


@dataclass(frozen=True, slots=True)
class TokenStats:
    """One pass over the logits of the wanted positions; zeros elsewhere."""

    token: Tensor
    """[rows, block] int64: the proposal (argmax, or the seeded sample)."""
    confidence: Tensor
    """[rows, block] float32: probability of the proposal."""
    entropy: Tensor
    """[rows, block] float32: entropy in nats of the distribution that `Decoding.confidence` names, unfiltered."""
    margin: Tensor
    """[rows, block] float32: best minus second-best probability."""


@dataclass(frozen=True, slots=True)
class BlockView:
    """The canvases of the rows."""

    masked: Tensor
    """[rows, block] bool: undecided and wanted."""
    step: Tensor
    """[rows] int64: denoise steps already spent in the block."""
    length: Tensor
    """[rows] int64: block length of the row."""
    seed: Tensor
    """[rows] int64: the request's seed."""
    start: Tensor
    """[rows] int64: absolute position of the block's first token."""
    editable: Tensor
    """[rows, block] bool: decided, and the strategy may revise it."""
    current: Tensor
    """[rows, block] int64: the token on the canvas; only read where editable."""
    undecided_at_first: Tensor
    """[rows] int64: wanted masks when the block was opened."""

    @property
    def positions(self) -> Tensor:
        """[rows, block] int64: absolute."""
        return self.start[:, None] + torch.arange(self.masked.shape[1], device=self.masked.device)
