"""Entropy-bound renoising (DiffusionGemma): a canvas of noise that is sampled as a whole until it stands still.

Its forwards accept nothing until the last one, so it does not go through `decide`. Tensors are those of one canvas.
"""

from collections.abc import Sequence as ReadOnly
from typing import Protocol

import torch
from torch import Tensor

import kernels
from kernels.noise import POSITION_LANE, uniform
from kernels.token_stats import Noise
from shared.decoding import Renoise


class CanvasNoise(Protocol):
    """Where a canvas's randomness comes from: the same for the same seed, positions and step."""

    def ids(self, seed: int, positions: Tensor, step: int, vocab_size: int) -> Tensor:
        """Return uniform token ids [n] int64 for positions [n]; step -1 is the canvas before its first forward."""
        ...

    def sample(
        self, logits: Tensor, barred: Tensor, temperature: Tensor, seed: int, positions: Tensor, step: int
    ) -> Tensor:
        """Return [n] int64 samples of softmax(logits [n, vocab] / temperature [n]) without barred [vocab] ids."""
        ...


class HashedNoise:
    """The product's own: hashes of seed, position and step (`kernels.noise`)."""

    def ids(self, seed: int, positions: Tensor, step: int, vocab_size: int) -> Tensor:
        lane = torch.full((), POSITION_LANE, device=positions.device)
        drawn = uniform(_fill(seed, positions), positions, _fill(step + 1, positions), lane)
        return (drawn * vocab_size).long().clamp(max=vocab_size - 1)

    def sample(
        self, logits: Tensor, barred: Tensor, temperature: Tensor, seed: int, positions: Tensor, step: int
    ) -> Tensor:
        rows = torch.arange(logits.shape[0], device=logits.device)
        noise = Noise(rows=rows, seed=_fill(seed, positions), position=positions, step=_fill(step, positions))
        return kernels.token_stats(logits, temperature=temperature, barred=barred, noise=noise).token


def _fill(value: int, like: Tensor) -> Tensor:
    return torch.full_like(like, value)


def temperature(decoding: Renoise, step: int) -> float:
    """Return the temperature of a step, counted from 0: `t_max` at first, `t_min` if a step came after the last."""
    left = decoding.max_denoising_steps - step
    return decoding.t_min + (decoding.t_max - decoding.t_min) * left / decoding.max_denoising_steps


def keep(entropy: Tensor, bound: float) -> Tensor:
    """Return [n] bool: by rising entropy [n] float32, positions with at most `bound` of entropy before them."""
    rising, order = entropy.sort(stable=True)
    kept = rising.cumsum(0) - rising <= bound
    return torch.zeros_like(kept).scatter_(0, order, kept)


def is_settled(decoding: Renoise, best: Tensor, before: ReadOnly[Tensor], entropy: Tensor) -> bool:
    """Tell whether the canvas is decided: `best` [n] equals those of the steps `before`, and is sure enough."""
    asked = decoding.stability_threshold
    stable = len(before) >= asked and all(torch.equal(best, old) for old in before[len(before) - asked :])
    return stable and float(entropy.mean()) < decoding.confidence_threshold
