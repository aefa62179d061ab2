"""Log-probabilities of a token and of the most probable ones, for rows that are to be reported."""

from dataclasses import dataclass

import torch
from torch import Tensor

_AT_ONCE = 2**22
"""Elements of logits that are float32 at the same time."""


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    logprob: Tensor
    """[n] float32: of the row's token."""
    ids: Tensor
    """[n, count] int64: the most probable ones, best first, of equals the lower id first."""
    logprobs: Tensor
    """[n, count] float32"""


def top_logprobs(logits: Tensor, token: Tensor, count: int, barred: Tensor | None = None) -> TopLogprobs:
    """Return natural logarithms of softmax(logits [n, vocab]) at token [n] int64, and the `count` largest.

    barred [vocab] bool are ids that take part in the distribution and are not listed. Rows go in parts, so that no
    float32 copy of all logits exists.
    """
    rows, vocab = logits.shape
    part = max(1, _AT_ONCE // vocab)
    count = min(count, vocab)
    found = [_look(logits[i : i + part], token[i : i + part], count, barred) for i in range(0, rows, part)]
    if not found:
        empty = logits.new_empty((0, count), dtype=torch.float32)
        return TopLogprobs(empty.new_empty(0), empty.long(), empty)
    return TopLogprobs(*(torch.cat(columns) for columns in zip(*found, strict=True)))


def _look(logits: Tensor, token: Tensor, count: int, barred: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    z = logits.float()
    total = z.logsumexp(-1)
    own = z.gather(-1, token[:, None])[:, 0] - total
    if barred is not None:
        z = z + z.new_zeros(z.shape[1]).masked_fill_(barred, float("-inf"))
    # What topk finds comes in no certain order where values are equal.
    ids = z.topk(count, -1).indices.sort(-1).values
    order = z.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return own, ids.gather(-1, order.indices), order.values - total[:, None]
