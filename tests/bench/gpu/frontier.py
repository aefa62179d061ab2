"""Where a step's time goes, kernel by kernel, when kernels overlap.

With programmatic dependent launch a kernel begins while the one before it still runs, so durations add up to more than
the time that passes. Each kernel is given the time by which its end is later than all ends before it, and what lies
between an end and the next beginning is idle: these shares add up to the time that passes.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Span:
    name: str
    start: float
    """us"""
    end: float


@dataclass(frozen=True, slots=True)
class Share:
    us: float
    launches: int


IDLE = "idle"


def share_out(spans: Iterable[Span]) -> dict[str, Share]:
    """Return what each name's kernels take of the time from the first beginning to the last end.

    Products have one name whatever they multiply, so a name is told with the one in front of it where that is another
    kernel of the model's.
    """
    us, launches = defaultdict[str, float](float), defaultdict[str, int](int)
    frontier, before = None, ""
    for span in sorted(spans, key=lambda span: (span.end, span.start)):
        frontier = span.start if frontier is None else frontier
        us[IDLE] += max(0.0, span.start - frontier)
        name = f"{span.name} after {before}" if _is_product(span.name) else span.name
        us[name] += span.end - max(frontier, span.start)
        launches[name] += 1
        frontier, before = span.end, span.name
    return {name: Share(us[name], launches[name]) for name in sorted(us, key=lambda name: -us[name])}


def per_step(shares: dict[str, Share], steps: int) -> dict[str, list[float]]:
    """Return us and launches a step by name, for reports."""
    return {name: [round(share.us / steps, 1), share.launches / steps] for name, share in shares.items()}


def _is_product(name: str) -> bool:
    return name in ("product", "_stream") or "gemm" in name or "nvjet" in name


def profile(work: Callable[[], object]) -> list[Span]:
    """Return the kernels and copies that run on the device while `work` does."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    found = (event for event in profiler.events() or () if event.device_type.name == "CUDA")
    return [Span(event.name[:60], event.time_range.start, event.time_range.end) for event in found]
