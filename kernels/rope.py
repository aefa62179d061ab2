"""Rotary position embedding (arXiv 2104.09864), half-split, with the per-head norm that precedes it in some models."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rope_tables(positions: Tensor, inv_freq: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (cos, sin), each [tokens, 1, 2 * len(inv_freq)], for `rope`; the sine's first half is negated.

    positions [tokens] int64, inv_freq [pairs] float32. Angles are float32.
    """
    angle = positions[:, None].float() * inv_freq
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1).to(dtype)[:, None], torch.cat((-sin, sin), -1).to(dtype)[:, None]


def rope(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Norm each head of x by `weight` if given, then rotate its first cos.shape[-1] components.

    x [tokens, heads, head_dim], cos and sin from `rope_tables`, weight [heads, head_dim]. Pair i is (i, i + half).
    """
    if weight is not None:
        x = F.rms_norm(x, x.shape[-1:], None, eps).mul_(weight)
    width = cos.shape[-1]
    if width < x.shape[-1]:
        return torch.cat((_rotate(x[..., :width], cos, sin), x[..., width:]), -1)
    return _rotate(x, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)
