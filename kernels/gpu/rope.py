"""Twins of `kernels.rope` and `kernels.rope_write`: norm, rotation, and the way into the pages in one kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.overlap import overlap_options, release_and_wait

# Heads a program handles: 32 tokens of a small batch then still make more programs than there are multiprocessors.
_HEADS_AT_ONCE = 8


def rope(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    tokens, heads, head_dim = x.shape
    out = torch.empty((tokens, heads, head_dim), dtype=x.dtype, device=x.device)
    _launch(x, cos, sin, weight, eps, heads, 0, out, out, out, None)
    return out


def rope_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    weight: Tensor | None,
    eps: float,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    scales: Tensor | None = None,
) -> Tensor:
    tokens, total, head_dim = qkv.shape
    kv_heads = k_pages.shape[2]
    heads = total - 2 * kv_heads
    if k_pages.shape != v_pages.shape or k_pages.shape[3] != head_dim or heads < 1:
        raise ValueError(f"qkv {list(qkv.shape)} does not go with pages {list(k_pages.shape)}")
    if not (k_pages.is_contiguous() and v_pages.is_contiguous()):
        raise ValueError("pages must be contiguous")
    q = torch.empty((tokens, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    _launch(qkv, cos, sin, weight, eps, heads, kv_heads, q, k_pages, v_pages, slots, scales)
    return q


def _launch(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    weight: Tensor | None,
    eps: float,
    heads: int,
    kv_heads: int,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor | None,
    scales: Tensor | None = None,
) -> None:
    tokens, total, head_dim = x.shape
    width = cos.shape[-1]
    if cos.shape != (tokens, 1, width) or sin.shape != cos.shape or width > head_dim or width % 2:
        raise ValueError(f"tables {list(cos.shape)} do not go with heads {list(x.shape)}")
    if weight is not None and weight.shape != (heads + kv_heads, head_dim):
        raise ValueError(f"weight {list(weight.shape)}; [{heads + kv_heads}, {head_dim}] was expected")
    if x.stride(-1) != 1:
        x = x.contiguous()
    if tokens:
        _rotate[(tokens, triton.cdiv(total, _HEADS_AT_ONCE))](
            x,
            cos,
            sin,
            q if weight is None else weight,
            q,
            k_pages,
            v_pages,
            q if slots is None else slots,
            q if scales is None else scales,
            k_pages.shape[0] * k_pages.shape[1] * kv_heads,
            x.stride(0),
            x.stride(1),
            cos.stride(0),
            sin.stride(0),
            eps,
            HEADS=heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            WIDTH=width,
            BLOCK_H=_HEADS_AT_ONCE,
            BLOCK_D=triton.next_power_of_2(head_dim),
            NORM=weight is not None,
            SMALL=scales is not None,
            num_warps=4,
            **overlap_options(x.device),
        )


@triton.jit
def _rotate(
    x_ptr,
    cos_ptr,
    sin_ptr,
    weight_ptr,
    q_ptr,
    k_pages_ptr,
    v_pages_ptr,
    slots_ptr,
    scales_ptr,
    value_scales,
    token_stride,
    head_stride,
    cos_stride,
    sin_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NORM: tl.constexpr,
    SMALL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_D)
    half: tl.constexpr = WIDTH // 2
    # The component that each one is rotated with; those behind the rotated width stay alone.
    other = tl.where(d < half, d + half, tl.where(d < WIDTH, d - half, d))
    inside = (head < HEADS + 2 * KV_HEADS) & (d < HEAD_DIM)[None, :]
    turned = head < HEADS + KV_HEADS

    release_and_wait(OVERLAP)
    row = x_ptr + token * token_stride + head * head_stride
    x = tl.load(row + d[None, :], mask=inside, other=0.0)
    y = tl.load(row + other[None, :], mask=inside, other=0.0)
    cos = tl.load(cos_ptr + token * cos_stride + d, mask=d < WIDTH, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * sin_stride + d, mask=d < WIDTH, other=0.0).to(tl.float32)
    a, b = x.to(tl.float32), y.to(tl.float32)
    if NORM:
        scale = 1.0 / tl.sqrt_rn(tl.sum(a * a, 1) / HEAD_DIM + eps)[:, None]
        weights = weight_ptr + head * HEAD_DIM
        known = inside & turned
        a *= scale * tl.load(weights + d[None, :], mask=known, other=0.0).to(tl.float32)
        b *= scale * tl.load(weights + other[None, :], mask=known, other=0.0).to(tl.float32)
    rotated = (a * cos[None, :] + b * sin[None, :]).to(x.dtype)

    q_place = (token * HEADS + head) * HEAD_DIM + d[None, :]
    tl.store(q_ptr + q_place, rotated, mask=inside & (head < HEADS))
    if KV_HEADS > 0:
        slot = tl.load(slots_ptr + token) * KV_HEADS
        k_pair = slot + head - HEADS
        v_pair = k_pair - KV_HEADS
        is_key = (head >= HEADS) & turned
        is_value = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
        if SMALL:
            wide = tl.where(turned, rotated, x).to(tl.float32)
            scale = tl.maximum(tl.max(tl.abs(wide), 1)[:, None] / 448.0, 1e-12)
            tl.store(scales_ptr + k_pair, scale, mask=is_key)
            tl.store(scales_ptr + value_scales + v_pair, scale, mask=is_value)
            small = tl.div_rn(wide, tl.broadcast_to(scale, (BLOCK_H, BLOCK_D))).to(tl.float8e4nv)
            tl.store(k_pages_ptr + k_pair * HEAD_DIM + d[None, :], small, mask=inside & is_key)
            tl.store(v_pages_ptr + v_pair * HEAD_DIM + d[None, :], small, mask=inside & is_value)
        else:
            tl.store(k_pages_ptr + k_pair * HEAD_DIM + d[None, :], rotated, mask=inside & is_key)
            tl.store(v_pages_ptr + v_pair * HEAD_DIM + d[None, :], x, mask=inside & is_value)
