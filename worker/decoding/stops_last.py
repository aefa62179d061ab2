"""Confidence without stop tokens (LLaDA's confidence_eos_eot_inf), so that an answer's end is not decided first."""

import torch
from torch import Tensor


def rank_without(logits: Tensor, token: Tensor, struck: tuple[Tensor, Tensor]) -> Tensor:
    """Return [n] float32: the probability of `token` [n] among the tokens that are left, 0 where it is struck itself.

    logits [n, vocab] after temperature; struck (rows [m], ids [m]).
    """
    z = logits.float()
    gone = torch.zeros_like(z, dtype=torch.bool).index_put(struck, torch.ones((), dtype=torch.bool, device=z.device))
    left = z.masked_fill(gone, float("-inf"))
    return (left.gather(-1, token[:, None])[:, 0] - left.logsumexp(-1)).exp()
