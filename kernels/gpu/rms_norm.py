"""Twin of `kernels.rms_norm`: one program a token, the sum with the residual is written on the way."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.overlap import overlap_options, release_and_wait


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    tokens, hidden = x.shape
    if weight.shape != (hidden,) or (residual is not None and residual.shape != x.shape):
        raise ValueError(f"x {list(x.shape)} does not go with weight {list(weight.shape)}")
    x = _rows(x)
    out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    if residual is None:
        added, total = x, x
    else:
        added, total = _rows(residual), torch.empty_like(out)
    block = triton.next_power_of_2(hidden)
    if tokens:
        _rms_norm[(tokens,)](
            x,
            added,
            weight,
            out,
            total,
            x.stride(0),
            added.stride(0),
            hidden,
            eps,
            BLOCK=block,
            ADD=residual is not None,
            num_warps=min(16, max(1, block // 512)),
            **overlap_options(x.device),
        )
    return out, total


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit
def _rms_norm(
    x_ptr,
    added_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    x_stride,
    added_stride,
    hidden,
    eps,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    release_and_wait(OVERLAP)
    x = tl.load(x_ptr + token * x_stride + column, mask=inside, other=0.0)
    if ADD:
        added = tl.load(added_ptr + token * added_stride + column, mask=inside, other=0.0)
        # The reference norms the sum as it is stored, so it is rounded first.
        x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + token * hidden + column, x, mask=inside)
    wide = x.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, 0) / hidden + eps)
    tl.store(out_ptr + token * hidden + column, (wide * scale * weight).to(x.dtype), mask=inside)
