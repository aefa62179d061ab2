"""Twin of `kernels.swiglu`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.overlap import overlap_options, wait_for_inputs

_BLOCK = 1024


def swiglu(gate_up: Tensor) -> Tensor:
    tokens, width = gate_up.shape
    if width % 2:
        raise ValueError(f"gate_up has {width} columns; an even number was expected")
    inner = width // 2
    if gate_up.stride(-1) != 1:
        gate_up = gate_up.contiguous()
    out = torch.empty((tokens, inner), dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        _swiglu[(tokens, triton.cdiv(inner, _BLOCK))](
            gate_up, out, gate_up.stride(0), inner, BLOCK=_BLOCK, num_warps=4, **overlap_options(gate_up.device)
        )
    return out


@triton.jit
def _swiglu(gate_up_ptr, out_ptr, stride, inner, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    wait_for_inputs(OVERLAP)
    gate = tl.load(gate_up_ptr + token * stride + column, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + token * stride + inner + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    value = wide * tl.sigmoid(wide) * up.to(tl.float32)
    tl.store(out_ptr + token * inner + column, value.to(gate.dtype), mask=inside)
