"""Hours of a worker in minutes: as many steps of the engine as an hour takes, on a model that is quick.

Mixed arrivals over few pages: greedy and drawn rows, filters, adapters, embeddings, texts that come again, aborts and
preemptions. At the end every page must be free, and device and host must hold what they held after the first quarter.
"""

import gc
import random
import resource
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import torch

from shared.commands import Generate, Limits, LoraUse, Sampling
from shared.events import Failed, Finished
from tests.worker.texts import NoText
from worker.adapters.weights import Adapter, ends_of
from worker.device import guarded
from worker.engine.engine import Engine
from worker.engine.ports import Arrival, Inbox
from worker.engine.scheduler import BatchLimits, CacheShape
from worker.models import LoadedModel
from worker.models.layers import Decoder, Linear
from worker.runners import make_runner

PAGE = 32
MAX_LEN = 2048
STEPS_OF_AN_HOUR = 128_000
"""3,600 s by the 28 ms that a step of SDAR-8B takes with 32 rows of 32."""
_STATM = Path("/proc/self/statm")
_MARKS = 400
_MARKS_TOLD = 20


@dataclass(frozen=True, slots=True)
class Traffic:
    """What arrives."""

    rows: int = 32
    pages: int = 32 * 12
    """Fewer than the rows' texts fill, so that some are preempted."""
    waiting: int = 8
    prompts: tuple[int, ...] = (5, 30, 60, 300, 700)
    produce: tuple[int, ...] = (8, 120, 400, 1000)
    known: int = 12
    """Beginnings that come again and again: of no page, one, two, ..."""
    aborts: float = 0.03
    """Chance of one in a step."""
    drawn: float = 0.4
    filtered: float = 0.01
    adapted: float = 0.01
    embedded: float = 0.01


@dataclass(slots=True)
class Shelf:
    """Adapters of the requests that are under way; the others may be put away."""

    adapters: dict[str, Adapter]
    in_use: dict[str, str] = field(default_factory=dict[str, str])
    """Digest by request."""

    def get(self, digest: str) -> Adapter | None:
        return self.adapters.get(digest)

    def held(self) -> set[str]:
        return set(self.in_use.values())


def random_adapters(model: LoadedModel, count: int = 4, rank: int = 8) -> dict[str, Adapter]:
    """Return adapters of every linear by their digests."""
    assert isinstance(model.module, Decoder)
    linears = [module for module in model.module.modules() if isinstance(module, Linear)]

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, device=model.device) * 0.01).to(model.dtype)

    def factors() -> dict[Linear, tuple[torch.Tensor, torch.Tensor]]:
        return {
            each: (draw(len(ends_of(each)) * rank, each.weight.shape[1]), draw(each.weight.shape[0], rank))
            for each in linears
        }

    return {f"{number:064x}": Adapter(rank, 1.0, factors()) for number in range(count)}


def arrival(number: int, draw: random.Random, traffic: Traffic, shelf: Shelf) -> Generate:
    """Return the request of a number, by the state of `draw`."""
    # Some texts come again and again, from the cache if they are still in it.
    known = tuple(range(PAGE * draw.randrange(traffic.known)))
    own = tuple(draw.randrange(1000) for _ in range(draw.choice(traffic.prompts)))
    kind, tail = draw.random(), draw.random()
    sampling = Sampling()
    if kind < traffic.drawn:
        sampling = Sampling(temperature=0.8, seed=number, top_p=0.9 if kind < traffic.filtered else 1.0)
    lora: tuple[LoraUse, ...] = ()
    if tail < traffic.adapted:
        digest = draw.choice(list(shelf.adapters))
        lora = (LoraUse(name=digest[-1], path=digest[-1], digest=digest),)
        shelf.in_use[f"g-{number}"] = digest
    return Generate(
        id=f"g-{number}",
        model="random",
        prompt=(*known, *own),
        limits=Limits(max_tokens=draw.choice(traffic.produce), ignore_eos=True),
        sampling=sampling,
        embed=tail > 1 - traffic.embedded,
        lora=lora,
    )


@torch.inference_mode()
def soak(
    model: LoadedModel,
    steps: int,
    enough: Callable[[], bool],
    traffic: Traffic | None = None,
    ahead: bool = True,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, object]:
    """Take `steps` steps, fewer if there are `enough` before, then let everything end; return what was seen."""
    traffic = traffic or Traffic()
    on_gpu = model.device.type == "cuda"
    model = replace(model, spec=replace(model.spec, max_model_len=MAX_LEN))
    shelf = Shelf(random_adapters(model))
    forward = make_runner(
        model, traffic.pages, PAGE, model.device,
        max_rows=traffic.rows, max_model_len=MAX_LEN, ahead=ahead, adapters=shelf,
    )  # fmt: skip
    limits = BatchLimits(traffic.rows, 2048, pages_ahead=ahead)
    engine = Engine(model.spec, CacheShape(PAGE, traffic.pages), limits, guarded(forward), lambda *_: NoText())
    draw, number, taken = random.Random(1), 0, 0
    ends, alive = Counter[str](), dict[str, None]()
    marks: list[tuple[int, int, int, int, float]] = []
    every = max(1, steps // _MARKS)
    gc.collect()
    began = time.perf_counter()

    def arriving() -> bool:
        return taken < steps and not enough()

    while arriving() or not engine.idle:
        inbox = Inbox()
        while arriving() and engine.load().waiting + len(inbox.arrivals) < traffic.waiting and draw.random() < 0.8:
            request = arrival(number, draw, traffic, shelf)
            number += 1
            alive[request.id] = None
            inbox.arrivals.append(Arrival(request, epoch=1))
        if alive and draw.random() < traffic.aborts:
            inbox.aborts.append((draw.choice(list(alive)), "cancelled"))
        for event in engine.step(inbox).events:
            if isinstance(event, Finished | Failed):
                ends[event.detail if isinstance(event, Finished) else event.code] += 1
                del alive[event.id]
                shelf.in_use.pop(event.id, None)
        taken += 1
        if taken % every == 0:
            device = torch.cuda.memory_allocated() if on_gpu else 0
            reserved = torch.cuda.memory_reserved() if on_gpu else 0
            marks.append((device, reserved, resident_bytes(), engine.load().running, time.perf_counter()))
            if len(marks) % _MARKS_TOLD == 0:
                held = f"{device / 1e6:.0f} MB on the device"
                tell(f"{taken:,} of {steps:,} steps, {number:,} requests, {marks[-1][-1] - began:.0f} s, {held}")
    passed, load = time.perf_counter() - began, engine.load()
    quarter = max(1, len(marks) // 4)
    second, last = marks[quarter : 2 * quarter] or marks, marks[-quarter:]

    def growth_mb(column: int) -> float:
        """From the second quarter's middle to the last one's."""
        return (median(mark[column] for mark in last) - median(mark[column] for mark in second)) / 1e6

    return {
        "bench": "soak",
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "steps": taken,
        "seconds": passed,
        "step_ms_at_the_end": (last[-1][4] - last[0][4]) * 1e3 / max(1, (len(last) - 1) * every),
        "hours_of_8b": taken / STEPS_OF_AN_HOUR,
        "requests": number,
        "ends": dict(ends),
        "without_an_end": len(alive),
        "preemptions": load.preemptions,
        "cached_tokens": load.cached_tokens,
        "rows_median": median(mark[3] for mark in marks),
        "pages_lost": load.total_pages - load.free_pages,
        "device_growth_mb": growth_mb(0),
        "reserved_growth_mb": growth_mb(1),
        "host_growth_mb": growth_mb(2),
        "host_mb": marks[-1][2] / 1e6,
        "host_peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        "device_mb": marks[-1][0] / 1e6,
    }


def resident_bytes() -> int:
    """Return the bytes of this process that lie in memory; 0 where the system does not tell."""
    if not _STATM.exists():
        return 0
    return int(_STATM.read_text().split()[1]) * resource.getpagesize()
