"""Write new keys and values to their pages."""

import torch
from torch import Tensor

from kernels.fp8 import quantize_rows


def kv_write(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor, scales: Tensor | None = None
) -> None:
    """Store k and v [tokens, kv_heads, head_dim] at `slots` [tokens] of the pages, in place.

    k_pages and v_pages are [pages, page_size, kv_heads, head_dim], contiguous; a slot is page * page_size + offset.
    With `scales` [2, pages, page_size, kv_heads] float32 the pages are e4m3, and each head of each slot has a scale for
    its key and one for its value.
    """
    if scales is not None:
        for number, (wide, pages) in enumerate(((k, k_pages), (v, v_pages))):
            small, scale = quantize_rows(wide.flatten(0, 1))
            # Bytes are moved: not every device knows how to index numbers of 8 bits.
            pages.view(torch.uint8).flatten(0, 1).index_copy_(0, slots, small.view(torch.uint8).view(wide.shape))
            scales[number].flatten(0, 1).index_copy_(0, slots, scale.view(wide.shape[:2]))
        return
    k_pages.flatten(0, 1).index_copy_(0, slots, k)
    v_pages.flatten(0, 1).index_copy_(0, slots, v)
