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
class RopeShape:
    """How the heads of a checkpoint are rotated."""

    theta: float
    scaling: Llama3Scaling | LinearScaling | None = None

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
        case _:
            known = "'default', 'linear' and 'llama3'"
            raise _refused(checkpoint, "rope_scaling", f"rope type {kind!r} is not supported, only {known}")


def _number(checkpoint: Checkpoint, parameters: dict[str, Any], key: str) -> float:
    value = parameters.get(key)
    if not _is_positive(value):
        raise _refused(checkpoint, "rope_scaling", f"{key} must be a positive number, not {value!r}")
    return float(value)


def _is_positive(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _refused(checkpoint: Checkpoint, key: str, why: str) -> ModelError:
    return ModelError(f"{checkpoint.folder / 'config.json'}: {key}: {why}")
