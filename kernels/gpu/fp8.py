"""Twins of `kernels.fp8`: tokens are quantized by a program each, the products are PyTorch's own."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.fp8 import FP8, FP8_MAX
from kernels.gpu.overlap import overlap_options, wait_for_inputs

_MAX = tl.constexpr(FP8_MAX)


def fp8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    return _product(*quantize_rows(x), weight, scale, bias, x.dtype)


def fp8_mlp(x: Tensor, gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor) -> Tensor:
    wide = fp8_linear(x, gate_up, gate_up_scale)
    return _product(*_quantize(wide, gated=True), down, down_scale, None, x.dtype)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    return _quantize(x, gated=False)


def _product(
    x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    # The product with a scale for each row and column exists for bfloat16 alone.
    y = torch._scaled_mm(
        x, weight.t(), scale_a=x_scale, scale_b=scale[None], out_dtype=torch.bfloat16, use_fast_accum=True
    )
    y = y if bias is None else y + bias
    return y if y.dtype == dtype else y.to(dtype)


def _quantize(x: Tensor, *, gated: bool) -> tuple[Tensor, Tensor]:
    """Quantize the rows of x, or of `swiglu` of it."""
    tokens, width = x.shape
    if gated and width % 2:
        raise ValueError(f"x has {width} columns; an even number was expected")
    inner = width // 2 if gated else width
    if x.stride(-1) != 1:
        x = x.contiguous()
    out = torch.empty((tokens, inner), dtype=FP8, device=x.device)
    scale = torch.empty((tokens, 1), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(inner)
    if tokens:
        _quantize_rows[(tokens,)](
            x,
            out,
            scale,
            x.stride(0),
            inner,
            GATED=gated,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
            **overlap_options(x.device),
        )
    return out, scale


@triton.jit
def _quantize_rows(
    x_ptr, out_ptr, scale_ptr, stride, inner, GATED: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < inner
    wait_for_inputs(OVERLAP)
    x = tl.load(x_ptr + token * stride + column, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    if GATED:
        up = tl.load(x_ptr + token * stride + inner + column, mask=inside, other=0.0)
        # Rounded as the reference stores it.
        wide = (wide * tl.sigmoid(wide) * up.to(tl.float32)).to(x.dtype).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(wide), 0) / _MAX, 1e-12)
    tl.store(scale_ptr + token, scale)
    tl.store(out_ptr + token * inner + column, tl.div_rn(wide, scale).to(tl.float8e4nv), mask=inside)
