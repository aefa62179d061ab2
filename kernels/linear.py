"""Matrix products with weights: y = x W^T + b, alone or behind a gate."""

import torch.nn.functional as F
from torch import Tensor

from kernels.swiglu import swiglu


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [tokens, inputs] times weight [outputs, inputs] transposed, plus bias [outputs]."""
    return F.linear(x, weight, bias)


def gated_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return swiglu(x W^T) for weight [2 * inner, inputs], gate first: [tokens, inner]."""
    return swiglu(F.linear(x, weight))
