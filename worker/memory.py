"""How much memory a step may need beside the weights and the pages: measured, by running the largest ones."""

from collections.abc import Callable

import torch

from worker.ahead import MAX_ROWS, make_graphs
from worker.engine.plan import Plan, Row
from worker.engine.scheduler import BatchLimits
from worker.engine.window import cuts_windows
from worker.models import LoadedModel
from worker.models.spec import Commit
from worker.runner import LOGITS_AT_ONCE, Runner

_LONGEST = 16_384
"""Positions of a text that cannot be cut that are tried; a longer one that finds no memory fails by itself."""


@torch.inference_mode()
def step_bytes(model: LoadedModel, limits: BatchLimits, page_size: int) -> int:
    """Return an upper bound of what a step allocates, bytes; 0 where that is not known to matter.

    Captured steps keep their memory, so theirs is added to that of the largest plan. A model on a CPU shares the
    host's memory, which is not planned.
    """
    spec, device = model.spec, model.device
    if device.type != "cuda":
        return 0
    # Logits are looked at in parts of a bounded size, in float32 and with some copies where requests are special.
    logits = 4 * LOGITS_AT_ONCE * torch.float32.itemsize
    if spec.commit is Commit.ENCODED:
        return 2 * logits
    tokens = limits.token_budget
    if not cuts_windows(spec):
        tokens = max(tokens, min(spec.max_model_len, _LONGEST))
    captured, plan = _measure(model, limits, tokens, page_size)
    torch.cuda.empty_cache()
    return plan + captured + logits


def _measure(model: LoadedModel, limits: BatchLimits, tokens: int, page_size: int) -> tuple[int, int]:
    """Return the bytes of a captured step of all rows, and of a plan of so many tokens."""
    pages = -(-tokens // page_size)
    runner = Runner(model, pages, page_size, model.device)
    row = Row("", 0, (0,) * tokens, (tokens,) * tokens, tuple(range(pages)), None)
    plan = _peak(model.device, lambda: runner(Plan((row,))))
    if not limits.pages_ahead:
        return 0, plan
    rows = min(limits.max_rows, MAX_ROWS)
    graphs = make_graphs(runner, rows)
    steps = _peak(model.device, lambda: graphs.launch(rows, rows))
    return steps + graphs.kept_bytes, plan


def _peak(device: torch.device, work: Callable[[], object]) -> int:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
