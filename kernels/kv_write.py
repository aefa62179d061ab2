"""Write new keys and values to their pages."""

from torch import Tensor


def kv_write(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """Store k and v [tokens, kv_heads, head_dim] at `slots` [tokens] of the pages, in place.

    k_pages and v_pages are [pages, page_size, kv_heads, head_dim], contiguous; a slot is page * page_size + offset.
    """
    k_pages.flatten(0, 1).index_copy_(0, slots, k)
    v_pages.flatten(0, 1).index_copy_(0, slots, v)
