"""Log-probabilities of proposals, for the canvases that report them."""

from collections.abc import Sequence as ReadOnly

import torch
from torch import Tensor

from kernels.attention import upload
from kernels.top_logprobs import top_logprobs
from shared.events import TokenLogprob
from worker.engine.plan import Canvas


def report(logits: Tensor, token: Tensor, canvases: ReadOnly[Canvas], barred: Tensor) -> dict[int, TokenLogprob]:
    """Return, by row, what the canvases [n] that ask for it report of token [n] under the model's logits [n, vocab]."""
    rows = [row for row, canvas in enumerate(canvases) if canvas.logprobs is not None]
    if not rows:
        return {}
    counts = [canvases[row].logprobs or 0 for row in rows]
    index = upload(torch.tensor(rows, dtype=torch.int64), logits.device)
    found = top_logprobs(logits[index], token[index], max(counts), barred)
    columns = (found.logprob.tolist(), found.ids.tolist(), found.logprobs.tolist())
    return {
        row: TokenLogprob(logprob, list(zip(ids[:count], values[:count], strict=True)))
        for row, count, logprob, ids, values in zip(rows, counts, *columns, strict=True)
    }
