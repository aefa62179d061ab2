"""How long work takes on the device, and how fast the device is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch


def device_ms(
    calls: Sequence[Callable[[], object]], repeats: int = 5, least_ms: float = 10.0, count: int | None = None
) -> float:
    """Return the median time of one call in ms: the calls are captured in one graph, replayed, and timed by events.

    Several calls over different data keep the cache from answering for the memory. Ranks that exchange something in a
    call have to agree on `count`, the replays timed at once; else as many are taken as last `least_ms`.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # By thread, because NCCL has one that looks after its work meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for call in calls:
            call()
    graph.replay()
    once = _replay_ms(graph, 1)
    count = count or max(1, int(least_ms / max(once, 1e-3)))
    return median(_replay_ms(graph, count) for _ in range(repeats)) / len(calls)


def _replay_ms(graph: torch.cuda.CUDAGraph, count: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


@dataclass(frozen=True)
class Ceilings:
    """What this card does, measured now."""

    card: str
    copy: float
    """Bytes read and written a second by a large copy."""
    read: float
    """Bytes read a second by a large reduction."""
    matrix: float
    """bfloat16 operations a second of an 8192 cube, random data."""


def measure_ceilings() -> Ceilings:
    source = torch.randn(2**30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / (device_ms([lambda: target.copy_(source)]) * 1e-3)
    read = source.nbytes / (device_ms([lambda: torch.max(source.view(torch.int16))]) * 1e-3)
    a, b = source[: 2**26].view(8192, 8192), source[2**26 : 2**27].view(8192, 8192)
    out = torch.empty_like(a)
    matrix = 2 * 8192**3 / (device_ms([lambda: torch.matmul(a, b, out=out)]) * 1e-3)
    return Ceilings(torch.cuda.get_device_name(), copy, read, matrix)
