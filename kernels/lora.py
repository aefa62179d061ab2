"""Low-rank adapters (arXiv 2106.09685), a different one for each token of a batch."""

import torch
from torch import Tensor


def lora(y: Tensor, x: Tensor, a: Tensor, b: Tensor, adapter: Tensor, scale: Tensor) -> Tensor:
    """Return y + scale * (x a^T) b^T, each token with its own adapter and scale.

    y [tokens, outputs], x [tokens, inputs], a [adapters, rank, inputs], b [adapters, outputs, rank] (smaller ranks are
    padded with zeros), adapter [tokens] int64, -1 for none, scale [tokens] float32. Products are float32.
    """
    total = y.to(torch.float32, copy=True)
    for number in adapter.unique().tolist():
        if number >= 0:
            tokens = (adapter == number).nonzero()[:, 0]
            low = scale[tokens, None] * (x[tokens].float() @ a[number].float().T)
            total.index_add_(0, tokens, low @ b[number].float().T)
    return total.to(y.dtype)
