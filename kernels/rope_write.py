"""What stands between a layer's projection and its attention: head norm, rotation, and the KV write."""

from torch import Tensor

from kernels.kv_write import kv_write
from kernels.rope import rope


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
    """Rotate queries and keys, store keys and values at `slots`; return the queries [tokens, heads, head_dim].

    qkv [tokens, heads + 2 * kv_heads, head_dim] holds queries, keys, values in this order, weight
    [heads + kv_heads, head_dim] or None; the rest as in `rope` and `kv_write`.
    """
    kv_heads = k_pages.shape[2]
    heads = qkv.shape[1] - 2 * kv_heads
    qk, v = qkv.split((heads + kv_heads, kv_heads), 1)
    q, k = rope(qk, cos, sin, weight, eps).split((heads, kv_heads), 1)
    kv_write(k, v, k_pages, v_pages, slots, scales)
    return q
