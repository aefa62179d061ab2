"""Twins of `kernels.fp8`: tokens are quantized by a program each, in the kernel that makes them where there is one; the
products are PyTorch's own."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.fp8 import BLOCK, FP8, FP8_MAX, Quantized, group_of
from kernels.fp8 import fp8_product as reference_product
from kernels.gpu.overlap import overlap_options, wait_for_inputs

_MAX = tl.constexpr(FP8_MAX)


def fp8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    return fp8_product(*quantize_rows(x, group_of(scale)), weight, scale, bias, x.dtype)


def fp8_product(
    values: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    if scale.dim() == 1:
        y = _scaled(values, x_scale, weight, scale[None], fast=True)
    elif has_block_product(weight.shape[1], weight.device) and scale.stride() == (scale.shape[1], 1):
        tokens = values.shape[0]
        values, x_scale = _whole(values, x_scale)
        y = _scaled(values, x_scale, weight, scale.t(), fast=False)[:tokens]
    else:
        return reference_product(values, x_scale, weight, scale, bias, dtype)
    y = y if bias is None else y + bias
    return y if y.dtype == dtype else y.to(dtype)


def _scaled(x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, *, fast: bool) -> Tensor:
    # The products with several scales exist for bfloat16 alone.
    return torch._scaled_mm(
        x, weight.t(), scale_a=x_scale, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def has_block_product(inputs: int, device: torch.device) -> bool:
    """Tell whether cuBLAS multiplies by weights with a scale for each block: on Hopper, where the scales of an output's
    blocks fill 16 bytes."""
    return inputs % (4 * BLOCK) == 0 and device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def _whole(values: Tensor, x_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return tokens and their scales with more tokens of nothing, up to a multiple of 4: the product asks for it."""
    tokens, more = values.shape[0], -values.shape[0] % 4
    if not more:
        return values, x_scale
    wide = torch.zeros((tokens + more, values.shape[1]), dtype=FP8, device=values.device)
    wide[:tokens] = values
    scale = torch.ones((x_scale.shape[1], tokens + more), dtype=torch.float32, device=values.device).t()
    scale[:tokens] = x_scale
    return wide, scale


def quantize_rows(x: Tensor, group: int = 0) -> Quantized:
    return _quantize(x, group=group)[0]


def swiglu_fp8(gate_up: Tensor, group: int = 0) -> Quantized:
    return _quantize(gate_up, gated=True, group=group)[0]


def rms_norm_fp8(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, group: int = 0
) -> tuple[Quantized, Tensor]:
    if weight.shape != x.shape[1:] or (residual is not None and residual.shape != x.shape):
        raise ValueError(f"x {list(x.shape)} does not go with weight {list(weight.shape)}")
    return _quantize(x, norm=weight, eps=eps, residual=residual, group=group)


def _quantize(
    x: Tensor,
    *,
    gated: bool = False,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    group: int = 0,
) -> tuple[Quantized, Tensor]:
    """Quantize the rows of x, of `swiglu` of it, or of `rms_norm` of it; return them and x + residual."""
    tokens, width = x.shape
    if gated and width % 2:
        raise ValueError(f"x has {width} columns; an even number was expected")
    inner = width // 2 if gated else width
    x = x if x.stride(-1) == 1 else x.contiguous()
    added = x if residual is None else (residual if residual.stride(-1) == 1 else residual.contiguous())
    total = x if residual is None else torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    out = torch.empty((tokens, inner), dtype=FP8, device=x.device)
    groups = triton.cdiv(inner, group) if group else 1
    # Token by token, as the products want it.
    scale = torch.empty((groups, tokens), dtype=torch.float32, device=x.device).t()
    block = max(triton.next_power_of_2(inner), group)
    if tokens:
        _quantize_rows[(tokens,)](
            x,
            added,
            x if norm is None else norm,
            total,
            out,
            scale,
            x.stride(0),
            added.stride(0),
            inner,
            tokens,
            eps,
            GATED=gated,
            NORM=norm is not None,
            ADD=residual is not None,
            GROUP=group,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
            **overlap_options(x.device),
        )
    return Quantized(out, scale), total


@triton.jit(do_not_specialize=["tokens"])
def _quantize_rows(
    x_ptr,
    added_ptr,
    norm_ptr,
    total_ptr,
    out_ptr,
    scale_ptr,
    stride,
    added_stride,
    inner,
    tokens,
    eps,
    GATED: tl.constexpr,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < inner
    if NORM:
        weight = tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(OVERLAP)
    x = tl.load(x_ptr + token * stride + column, mask=inside, other=0.0)
    if ADD:
        added = tl.load(added_ptr + token * added_stride + column, mask=inside, other=0.0)
        # Everything is rounded where the reference stores it.
        x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + token * inner + column, x, mask=inside)
    wide = x.to(tl.float32)
    if NORM:
        root = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, 0) / inner + eps)
        wide = (wide * root * weight).to(x.dtype).to(tl.float32)
    if GATED:
        up = tl.load(x_ptr + token * stride + inner + column, mask=inside, other=0.0)
        wide = (wide * tl.sigmoid(wide) * up.to(tl.float32)).to(x.dtype).to(tl.float32)
    if GROUP == 0:
        scale = tl.maximum(tl.max(tl.abs(wide), 0) / _MAX, 1e-12)
        tl.store(scale_ptr + token, scale)
        tl.store(out_ptr + token * inner + column, tl.div_rn(wide, scale).to(tl.float8e4nv), mask=inside)
    else:
        parts = tl.reshape(wide, (BLOCK // GROUP, GROUP))
        scales = tl.maximum(tl.max(tl.abs(parts), 1) / _MAX, 1e-12)
        number = tl.arange(0, BLOCK // GROUP)
        tl.store(scale_ptr + number * tokens + token, scales, mask=number * GROUP < inner)
        place = number[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        values = tl.div_rn(parts, tl.broadcast_to(scales[:, None], (BLOCK // GROUP, GROUP))).to(tl.float8e4nv)
        tl.store(out_ptr + token * inner + place, values, mask=place < inner)
