"""Products with weights of 8 bits: e4m3 with a scale for each output, times tokens that get a scale of their own."""

import torch
from torch import Tensor

from kernels.swiglu import swiglu

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
_LEAST = 1e-12


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [rows, n] as e4m3 [rows, n] and float32 scales [rows, 1]; their product is x, rounded.

    A row's largest magnitude becomes 448. Values that are not finite stay so.
    """
    wide = x.float()
    scale = (wide.abs().amax(-1, keepdim=True) / FP8_MAX).clamp(min=_LEAST)
    return (wide / scale).to(FP8), scale


def fp8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [tokens, inputs] times (weight [outputs, inputs] e4m3 * scale [outputs] float32) transposed, plus bias.

    Tokens are quantized by `quantize_rows` first. The result has the dtype of x.
    """
    return _product(*quantize_rows(x), weight, scale, bias, x.dtype)


def fp8_mlp(x: Tensor, gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor) -> Tensor:
    """Return down(swiglu(gate_up x)), both as in `fp8_linear`; gate_up [2 * inner, inputs] has the gate first."""
    return fp8_linear(swiglu(fp8_linear(x, gate_up, gate_up_scale)), down, down_scale)


def _product(
    x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    y = torch.matmul(x.float(), weight.float().t()) * x_scale * scale
    return (y if bias is None else y + bias.float()).to(dtype)
