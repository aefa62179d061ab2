"""Random numbers without a generator: a hash of (seed, absolute position, step in the block, lane).

A block that is decoded again, by whichever worker, draws the same numbers. All arithmetic is on 32-bit unsigned
integers, so that a kernel reproduces it exactly; here they live in int64 tensors, masked after each product.
"""

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
# A lane no vocabulary reaches: draws that belong to a position rather than to one of its tokens.
POSITION_LANE = _WORD


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words with low bias (the `lowbias32` constants of hash-prospector)."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _WORD
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _WORD
    return x ^ (x >> 16)


def hash_words(seed: Tensor, position: Tensor, step: Tensor, lane: Tensor) -> Tensor:
    """Return 32-bit words as int64, over the broadcast shape of the four int64 tensors; 0 <= seed < 2**63."""
    key = _mix((seed & _WORD) ^ 0x9E3779B9)
    for word in (seed >> 32, position, step):
        # Adding an odd constant keeps a zero word from being the identity.
        key = _mix(key ^ ((word * 0x85EBCA6B + 0xC2B2AE35) & _WORD))
    return _mix(_mix((lane + key) & _WORD) ^ key)


def uniform(seed: Tensor, position: Tensor, step: Tensor, lane: Tensor) -> Tensor:
    """Return float32 numbers in (0, 1), never 0 and never 1: the middle of one of 2**23 equal cells."""
    return ((hash_words(seed, position, step, lane) >> 9).to(torch.float32) + 0.5) * 2.0**-23


def gumbel(seed: Tensor, position: Tensor, step: Tensor, vocab_size: int, first: int = 0) -> Tensor:
    """Return [n, vocab_size] float32 standard Gumbel noise for [n] seeds, positions and steps, of ids from `first` on.

    argmax(logits + noise) is a sample of softmax(logits).
    """
    lane = torch.arange(first, first + vocab_size, device=seed.device)
    return -(-uniform(seed[:, None], position[:, None], step[:, None], lane).log()).log()
