"""Frequencies of the rotary embedding, and the ways in which checkpoints stretch them for longer texts."""

import math
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from worker.models.checkpoint import Checkpoint, ModelError


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Slow pairs turn `factor` times slower, fast ones as before, and those between are blended (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int

    def apply(self, inv_freq: Tensor) -> Tensor:
        turns = self.original_length * inv_freq / (2 * math.pi)
        kept = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return inv_freq / self.factor * (1 - kept) + inv_freq * kept


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Every pair turns `factor` times slower."""

    factor: float

    def apply(self, inv_freq: Tensor) -> Tensor:
        return inv_freq / self.factor


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Slow pairs turn `factor` times slower, fast ones as before, with a ramp between them (YaRN, arXiv 2309.00071).

    Fast are those that turn more than `beta_fast` times over the original length, slow less than `beta_slow` times.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_length: int
    theta: float

    def apply(self, inv_freq: Tensor) -> Tensor:
        pairs = len(inv_freq)
        first = max(math.floor(self._pair(self.beta_fast, pairs)), 0)
        last = min(math.ceil(self._pair(self.beta_slow, pairs)), 2 * pairs - 1)
        place = torch.arange(pairs, dtype=torch.float32, device=inv_freq.device)
        slow = ((place - first) / max(last - first, 0.001)).clamp(0, 1)
        return inv_freq / self.factor * slow + inv_freq * (1 - slow)

    def _pair(self, turns: float, pairs: int) -> float:
        """Return the (fractional) pair that turns this often over the original length."""
        return pairs * math.log(self.original_length / (turns * 2 * math.pi)) / math.log(self.theta)


@dataclass(frozen=True, slots=True)
class QueryScale:
    """Queries far out grow by 1 + beta * log(1 + floor(position / length)), so that attention stays sharp (Llama 4)."""

    beta: float
    length: int

    def at(self, positions: Tensor) -> Tensor:
        """Return [tokens] float32."""
        return 1 + self.beta * torch.log1p((positions // self.length).float())


@dataclass(frozen=True, slots=True)
class RopeShape:
    """How the heads of a checkpoint are rotated."""

    theta: float
    scaling: Llama3Scaling | LinearScaling | YarnScaling | None = None
    amplitude: float = 1.0
    """Factor of cosines and sines (YaRN's attention factor)."""
    query_scale: QueryScale | None = None

    def frequencies(self, width: int, device: torch.device) -> Tensor:
        """Return [width / 2] float32: by how much each pair of a rotated part of `width` turns from token to token."""
        exponent = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
        inv_freq = 1.0 / self.theta**exponent
        return inv_freq if self.scaling is None else self.scaling.apply(inv_freq)


def read_rope(checkpoint: Checkpoint) -> RopeShape:
    """Read the rotation from `rope_parameters` (newer exports), or `rope_theta` and `rope_scaling`.

    Raises `ModelError`.
    """
    config = checkpoint.config
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = parameters.get("rope_theta", config.get("rope_theta"))
    if not _is_positive(theta):
        raise _refused(checkpoint, "rope_theta", f"must be a positive number, not {theta!r}")
    match kind := parameters.get("rope_type", parameters.get("type", "default")):
        case "default":
            return RopeShape(float(theta))
        case "linear":
            return RopeShape(float(theta), LinearScaling(_number(checkpoint, parameters, "factor")))
        case "llama3":
            scaling = Llama3Scaling(
                _number(checkpoint, parameters, "factor"),
                _number(checkpoint, parameters, "low_freq_factor"),
                _number(checkpoint, parameters, "high_freq_factor"),
                int(_number(checkpoint, parameters, "original_max_position_embeddings")),
            )
            return RopeShape(float(theta), scaling)
        case "yarn":
            return _read_yarn(checkpoint, parameters, float(theta))
        case _:
            known = "'default', 'linear', 'llama3' and 'yarn'"
            raise _refused(checkpoint, "rope_scaling", f"rope type {kind!r} is not supported, only {known}")


def _read_yarn(checkpoint: Checkpoint, parameters: dict[str, Any], theta: float) -> RopeShape:
    factor = _number(checkpoint, parameters, "factor")
    length = int(_number(checkpoint, parameters, "original_max_position_embeddings"))
    scaling = YarnScaling(
        factor=factor,
        beta_fast=float(parameters.get("beta_fast") or 32),
        beta_slow=float(parameters.get("beta_slow") or 1),
        original_length=length,
        theta=theta,
    )

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    amplitude, scale, scale_all = (parameters.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if amplitude is None:
        amplitude = magnitude(scale) / magnitude(scale_all) if scale and scale_all else magnitude(1.0)
    beta = parameters.get("llama_4_scaling_beta")
    return RopeShape(theta, scaling, float(amplitude), QueryScale(float(beta), length) if beta else None)


def _number(checkpoint: Checkpoint, parameters: dict[str, Any], key: str) -> float:
    value = parameters.get(key)
    if not _is_positive(value):
        raise _refused(checkpoint, "rope_scaling", f"{key} must be a positive number, not {value!r}")
    return float(value)


def _is_positive(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _refused(checkpoint: Checkpoint, key: str, why: str) -> ModelError:
    return ModelError(f"{checkpoint.folder / 'config.json'}: {key}: {why}")
