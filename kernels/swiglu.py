"""Gated linear unit with SiLU (arXiv 2002.05202)."""

import torch.nn.functional as F
from torch import Tensor


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up for gate_up [tokens, 2 * inner], gate first; the result is [tokens, inner]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)
