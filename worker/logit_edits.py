"""Sparse edits of logits: penalties and biases of the requests that ask for them, row by row."""

from collections.abc import Sequence as ReadOnly

import torch
from torch import Tensor

from kernels.attention import upload
from worker.engine.plan import Canvas


def edit_logits(logits: Tensor, canvases: ReadOnly[Canvas]) -> Tensor:
    """Return logits [n, vocab] with the edits of `canvases` [n], one for each row; float32 if there are any.

    An edit reads and writes one element, so a row does not depend on its neighbours.
    """
    wanted = [(row, *edit) for row, canvas in enumerate(canvases) for edit in canvas.edits]
    if not wanted:
        return logits
    rows, ids, divisors, shifts = zip(*wanted, strict=True)
    places = (
        upload(torch.tensor(rows, dtype=torch.int64), logits.device),
        upload(torch.tensor(ids, dtype=torch.int64), logits.device),
    )
    divisor = upload(torch.tensor(divisors, dtype=torch.float32), logits.device)
    shift = upload(torch.tensor(shifts, dtype=torch.float32), logits.device)
    z = logits.float()
    own = z[places]
    return z.index_put(places, torch.where(own > 0, own / divisor, own * divisor) + shift)
