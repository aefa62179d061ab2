"""Twin of `kernels.kv_write`."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.overlap import overlap_options, wait_for_inputs
from kernels.kv_write import kv_write as reference


def kv_write(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor, scales: Tensor | None = None
) -> None:
    if scales is not None:
        # Who writes pages of 8 bits does so in the kernel that rotates.
        return reference(k, v, k_pages, v_pages, slots, scales)
    tokens, heads, head_dim = k.shape
    if v.shape != k.shape or k_pages.shape[2:] != k.shape[1:] or v_pages.shape != k_pages.shape:
        raise ValueError(f"keys {list(k.shape)} and values {list(v.shape)} do not go with pages {list(k_pages.shape)}")
    if not (k_pages.is_contiguous() and v_pages.is_contiguous()):
        raise ValueError("pages must be contiguous")
    if k.stride(-1) != 1 or v.stride(-1) != 1:
        k, v = k.contiguous(), v.contiguous()
    if tokens:
        _kv_write[(tokens,)](
            k,
            v,
            k_pages,
            v_pages,
            slots,
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            HEADS=heads,
            HEAD_DIM=head_dim,
            BLOCK_H=triton.next_power_of_2(heads),
            BLOCK_D=triton.next_power_of_2(head_dim),
            num_warps=4,
            **overlap_options(k.device),
        )


@triton.jit
def _kv_write(
    k_ptr,
    v_ptr,
    k_pages_ptr,
    v_pages_ptr,
    slots_ptr,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_H)[:, None]
    component = tl.arange(0, BLOCK_D)[None, :]
    inside = (head < HEADS) & (component < HEAD_DIM)
    wait_for_inputs(OVERLAP)
    place = tl.load(slots_ptr + token) * (HEADS * HEAD_DIM) + head * HEAD_DIM + component
    k = tl.load(k_ptr + token * k_token_stride + head * k_head_stride + component, mask=inside)
    v = tl.load(v_ptr + token * v_token_stride + head * v_head_stride + component, mask=inside)
    tl.store(k_pages_ptr + place, k, mask=inside)
    tl.store(v_pages_ptr + place, v, mask=inside)
