"""Root mean square norm (arXiv 1910.07467), with the residual addition that precedes it in a decoder."""

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (norm(x + residual) * weight, x + residual); without a residual the second is x itself.

    x and residual [tokens, hidden], weight [hidden]; the mean is taken in float32, the result has x's dtype.
    """
    if residual is not None:
        x = x + residual
    return F.rms_norm(x, weight.shape, weight, eps), x
