"""A norm between two products, without a kernel of its own.

norm(t) is t times the norm's weights, times one number for each token. The product in front can weigh what it has just
made, and the product behind can multiply its outputs by the token's number: (r * v) W^T = r * (v W^T). What the number
takes, the squares of all columns, comes in parts, for no block of the product in front has a whole token.

float16 does not fold: values are up to the stream's magnitude times the weights', which may be beyond 65,504.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.swiglu import swiglu

_STRETCH = 64


@dataclass(frozen=True, slots=True)
class Unscaled:
    """Tokens that are normed but for the factor of each."""

    values: Tensor
    """[tokens, hidden]: times the norm's weights."""
    squares: Tensor
    """[tokens, stretches] float32: sums of the squares of the tokens' columns; a twin's stretches may be others."""
    eps: float


def folds(x: Tensor, weight: Tensor, reader: Tensor, *, gated: bool) -> bool:
    """Tell whether the norm between two products is better folded into them.

    x [tokens, inputs] and weight [hidden, inputs] are the first product's, reader [outputs, hidden] is the weight of
    the second, behind which there is a gate or not. A twin's products need not take what it was not asked about: they
    raise ValueError for shapes that it has no kernel for.
    """
    return False


def unscaled_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Unscaled, Tensor]:
    """Return norm(linear(x) + residual) without its factors, and linear(x) + residual, both [tokens, hidden].

    x, weight and bias as in `linear`, residual [tokens, hidden], norm_weight [hidden], eps of the norm. The sum is the
    same as that of `linear` and `rms_norm`.
    """
    total = F.linear(x, weight, bias) + residual
    wide = total.float()
    padded = F.pad(wide.square(), (0, -wide.shape[1] % _STRETCH))
    squares = padded.unflatten(1, (-1, _STRETCH)).sum(2)
    return Unscaled((wide * norm_weight.float()).to(total.dtype), squares, eps), total


def scaled_linear(values: Tensor, squares: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `linear` [tokens, outputs] of the tokens that the fields of an `Unscaled` stand for."""
    product = _product(values, squares, eps, weight)
    return (product if bias is None else product + bias.float()).to(values.dtype)


def scaled_gated_linear(values: Tensor, squares: Tensor, eps: float, weight: Tensor) -> Tensor:
    """Return `gated_linear` [tokens, outputs / 2] of the tokens that the fields of an `Unscaled` stand for."""
    return swiglu(_product(values, squares, eps, weight)).to(values.dtype)


def _product(values: Tensor, squares: Tensor, eps: float, weight: Tensor) -> Tensor:
    factor = torch.rsqrt(squares.sum(1, keepdim=True) / values.shape[1] + eps)
    return F.linear(values.float(), weight.float()) * factor
