"""Products with weights of 8 bits: e4m3 with scales, times tokens that are quantized on the way.

A weight has a scale for each output, and a token one for all it holds; or a weight has one for each block of
128 x 128, and a token one for each 128 inputs (DeepSeek-V3, arXiv 2412.19437 section 3.3.2).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.rms_norm import rms_norm
from kernels.swiglu import swiglu

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
BLOCK = 128
"""Side of a block with a scale of its own."""
_LEAST = 1e-12


class Quantized(NamedTuple):
    """Tokens of 8 bits."""

    values: Tensor
    """[tokens, inputs] e4m3"""
    scale: Tensor
    """[tokens, 1] float32, or [tokens, inputs / group, rounded up]."""


def quantize_rows(x: Tensor, group: int = 0) -> Quantized:
    """Return x [rows, n] as e4m3 with a scale for each `group` values, 0: for the row; their product is x, rounded.

    A group's largest magnitude becomes 448. Values that are not finite stay so.
    """
    wide = x.float()
    if not group:
        scale = _scales(wide)
        return Quantized((wide / scale).to(FP8), scale)
    width = x.shape[1]
    padded = torch.nn.functional.pad(wide, (0, -width % group)).unflatten(1, (-1, group))
    scale = _scales(padded)
    return Quantized((padded / scale).to(FP8).flatten(1)[:, :width], scale[:, :, 0])


def swiglu_fp8(gate_up: Tensor, group: int = 0) -> Quantized:
    """Return `quantize_rows` of `swiglu`."""
    return quantize_rows(swiglu(gate_up), group)


def rms_norm_fp8(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, group: int = 0
) -> tuple[Quantized, Tensor]:
    """Return `quantize_rows` of the first result of `rms_norm`, and the second."""
    normed, total = rms_norm(x, weight, eps, residual)
    return quantize_rows(normed, group), total


def fp8_product(
    values: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return quantized tokens times weight [outputs, inputs] e4m3 transposed, plus bias, in `dtype`.

    `scale` is [outputs] float32 with x_scale [tokens, 1], or [outputs / 128, inputs / 128] (rounded up) with x_scale
    [tokens, inputs / 128].
    """
    if scale.dim() == 1:
        y = torch.matmul(values.float(), weight.float().t()) * x_scale * scale
    else:
        x = values.float() * x_scale.repeat_interleave(BLOCK, 1)[:, : values.shape[1]]
        y = torch.matmul(x, dequantize(weight, scale, torch.float32).t())
    return (y if bias is None else y + bias.float()).to(dtype)


def fp8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [tokens, inputs], quantized as the scales of the weight ask for, times weight; see `fp8_product`.

    The result has the dtype of x.
    """
    return fp8_product(*quantize_rows(x, group_of(scale)), weight, scale, bias, x.dtype)


def group_of(scale: Tensor) -> int:
    """Return how many inputs of a token share a scale, by the scales of the weight; 0: all."""
    return 0 if scale.dim() == 1 else BLOCK


def dequantize(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return weight [outputs, inputs] times its scales: one, one for each output, or one for each block."""
    wide = weight.float()
    if scale.dim() < 2:
        wide *= scale.float()[:, None] if scale.numel() > 1 else scale.float()
    else:
        wide *= (
            scale.float().repeat_interleave(BLOCK, 0)[: wide.shape[0]].repeat_interleave(BLOCK, 1)[:, : wide.shape[1]]
        )
    return wide.to(dtype)


def _scales(wide: Tensor) -> Tensor:
    return (wide.abs().amax(-1, keepdim=True) / FP8_MAX).clamp(min=_LEAST)
