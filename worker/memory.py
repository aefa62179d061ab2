"""How much memory the work needs beside the weights and the pages.

The largest plan is run, under adapters where there are any, and the largest captured steps are captured: both are
measured. What logits take while they are looked at is reckoned, from the bound of how many there are at once.
"""

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass, replace

import torch

from worker.adapters.bank import AdapterBank
from worker.ahead import MAX_ROWS, AheadRunner
from worker.engine.plan import Plan, Row
from worker.engine.scheduler import BatchLimits
from worker.engine.window import cuts_windows
from worker.lanes import make_lanes
from worker.models import LoadedModel
from worker.models.spec import Commit
from worker.runner import LOGITS_AT_ONCE, Runner

log = logging.getLogger(__name__)

_LONGEST = 16_384
"""Positions of a text that cannot be cut that are tried; a longer one that finds no memory fails by itself."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that must be free beside the weights and the pages."""

    plan: int
    """Of the largest plan, while it runs."""
    logits: int
    """Of the positions that are looked at together, while they are."""
    steps: int = 0
    """Of all captured steps, for good: what they allocate, which they share, and the graphs themselves."""

    @property
    def total(self) -> int:
        return self.plan + self.logits + self.steps


NO_NEEDS = Needs(0, 0)
"""A model on a CPU shares the host's memory, which is not planned."""


@torch.inference_mode()
def measure_needs(
    model: LoadedModel,
    limits: BatchLimits,
    page_size: int,
    bank: AdapterBank | None = None,
    lengths: ReadOnly[int] = (),
) -> Needs:
    """Return what the work needs; `bank` has the adapters that captured steps run under, `lengths` are those of blocks
    that have captured steps beside the model's own.

    Whoever asks for the free memory afterwards is told what compilers and libraries have left of it.
    """
    spec, device = model.spec, model.device
    if device.type != "cuda":
        return NO_NEEDS
    # Logits are looked at in parts of a bounded size, in float32 and with some copies where requests are special.
    logits = 4 * LOGITS_AT_ONCE * torch.float32.itemsize
    if spec.commit is Commit.ENCODED:
        return Needs(logits, logits)
    tokens = limits.token_budget
    if not cuts_windows(spec):
        tokens = max(tokens, min(spec.max_model_len, _LONGEST))
    began = time.perf_counter()
    plan, steps = _measure(model, limits, tokens, page_size, bank, lengths)
    torch.cuda.empty_cache()
    needs = Needs(plan, logits, steps)
    log.info(
        "memory: %d MiB for the largest plan, %d for logits, %d for captured steps; measured in %.1f s",
        *(size // 2**20 for size in (needs.plan, needs.logits, needs.steps)),
        time.perf_counter() - began,
    )
    return needs


def _measure(
    model: LoadedModel,
    limits: BatchLimits,
    tokens: int,
    page_size: int,
    bank: AdapterBank | None,
    lengths: ReadOnly[int] = (),
) -> tuple[int, int]:
    """Return the bytes of a plan of so many tokens, and of the captured steps."""
    pages = -(-tokens // page_size)
    runner = Runner(model, pages, page_size, model.device, adapters=bank and bank.residents, bank=bank)
    row = Row("", 0, (0,) * tokens, (tokens,) * tokens, tuple(range(pages)), None)
    plan = _peak(model.device, lambda: runner(Plan((row,))))
    if bank is not None:
        # Some products are then held whole of which parts were enough.
        with bank.stand_in() as uses:
            plan = max(plan, _peak(model.device, lambda: runner(Plan((replace(row, lora=uses),)))))
    return plan, measure_steps(runner, min(limits.max_rows, MAX_ROWS), lengths) if limits.pages_ahead else 0


def measure_steps(runner: Runner, max_rows: int, lengths: ReadOnly[int] = ()) -> int:
    """Return the bytes that all captured steps hold, judged by those of the most rows of each block length."""
    return sum(_measure_lane(runner.model.device, lane) for lane in make_lanes(runner, max_rows, lengths))


def _measure_lane(device: torch.device, lane: AheadRunner) -> int:
    """Return what the steps of one block length hold beside those that were captured before.

    The largest two, layers and head, allocate what the others share; of those that follow, each holds a little.
    """
    graphs, captures = lane.graphs, lane.captures()
    largest = [work for rows, work in captures if rows == captures[0][0]]
    grown = list[int]()
    for works in (largest[:2], largest[2:]):
        graphs.tidy()
        before = Held.of(device)
        for work in works:
            work()
        graphs.tidy()
        grown.append(Held.of(device).since(before))
    shared, rest = grown
    return graphs.kept_bytes + extrapolate(shared, rest, 2, len(largest), len(captures))


@dataclass(frozen=True, slots=True)
class Held:
    """What this process holds of a device, seen from both sides."""

    reserved: int
    """By the allocator: all but graphs, kernels and libraries."""
    free: int
    """Left on the device; other processes may have a hand in it."""

    @classmethod
    def of(cls, device: torch.device) -> "Held":
        return cls(torch.cuda.memory_reserved(device), torch.cuda.mem_get_info(device)[0])

    def since(self, before: "Held") -> int:
        """Return by how much more is held: as the device says, but never less than the allocator knows of."""
        return max(0, self.reserved - before.reserved, before.free - self.free)


def extrapolate(shared: int, rest: int, first: int, tried: int, count: int) -> int:
    """Return what `count` things take, of which the `first` took `shared` bytes and the others `tried` took the rest.

    What the first take they share with the others; those that follow are taken for equal.
    """
    others = tried - first
    return shared + (-(-rest // others) * (count - first) if others else 0)


def _peak(device: torch.device, work: Callable[[], object]) -> int:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
