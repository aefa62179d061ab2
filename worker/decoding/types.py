"""Vocabulary of the strategies: what they see and what they answer.

All tensors are [rows, block], rows padded to the longest block of the step; padding is never masked.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenStats:
    """One pass over the logits of the wanted positions; zeros elsewhere."""

    token: Tensor
    """[rows, block] int64: the proposal (argmax, or the seeded sample)."""
    confidence: Tensor
    """[rows, block] float32: probability of the proposal."""
    entropy: Tensor
    """[rows, block] float32: entropy in nats of softmax(logits / temperature)."""
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
