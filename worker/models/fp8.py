"""Weights of 8 bits, made when a model is loaded."""

import torch
from torch import nn

from kernels.fp8 import quantize_rows
from worker.models.layers import Decoder, Linear

_MULTIPLE = 16
"""Columns and rows of a product come in so many."""


def quantize(module: nn.Module) -> int:
    """Turn the linears of a decoder's layers into e4m3, in place; return how many.

    Embedding, head, norms, routers and experts stay as they are, and so do linears whose sides are no multiple of 16.
    """
    count = 0
    if not isinstance(module, Decoder):
        return count
    for linear in module.modules():
        if not isinstance(linear, Linear) or any(side % _MULTIPLE for side in linear.weight.shape):
            continue
        weight, scale = quantize_rows(linear.weight)
        linear.weight = nn.Parameter(weight, requires_grad=False)
        linear.scale = nn.Parameter(scale[:, 0].contiguous(), requires_grad=False)
        count += 1
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return count
