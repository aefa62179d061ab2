"""python -m tests.bench.gpu.serving [engine] [profile] [prompts] [path] [soak] [memory]: what serves, random weights.

Steps of the engine beside the captured step alone, prompts that come beside running rows, the whole path through HTTP
and Redis over the engine alone, and an hour's worth of mixed arrivals, aborts and preemptions. JSON lines go to
$OUT/serving.jsonl (or the current directory).
"""

import argparse
import asyncio
import gc
import json
import logging
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median

import torch

from kernels.fp8 import FP8
from shared.commands import Generate, Limits
from shared.decoding import LowConfidenceStatic
from shared.events import Delta, Failed, Finished
from tests.bench.gpu.frontier import IDLE, per_step, profile, share_out
from tests.bench.gpu.path import BUDGET, CONTEXT, PRODUCE, Way, bench_path
from tests.bench.gpu.shapes import SHAPES, Shape, random_model, store_in_blocks
from tests.bench.gpu.soak import STEPS_OF_AN_HOUR, Traffic, soak
from tests.bench.gpu.steps import DATASHEET
from tests.bench.gpu.timing import Ceilings, measure_ceilings
from tests.worker.texts import NoText
from worker.ahead import AheadRunner, bucket_sizes, make_graphs
from worker.device import free_memory
from worker.engine.engine import Engine
from worker.engine.plan import Plan
from worker.engine.ports import Arrival, Decision, Inbox
from worker.engine.scheduler import BatchLimits, CacheShape
from worker.foresight import Offer
from worker.memory import measure_needs
from worker.models import LoadedModel
from worker.models.fp8 import quantize, quantize_head
from worker.models.layers import Decoder
from worker.models.spec import Attention, Commit
from worker.runner import Runner
from worker.runners import make_runner

PAGE = 32

OFFERS = {
    "chosen": Offer(),
    "own pass": Offer(slots=(0,), whole=2**30),
    "a slot for each": Offer(slots=(1,), whole=2**30),
    "slots, all room": Offer(whole=2**30),
}
"""Ways to commit: a pass that decides nothing, two blocks in every step, or as many slots as are needed."""

Report = Callable[[dict[str, object]], None]


@dataclass
class Watched:
    """An engine whose steps are timed."""

    model: LoadedModel
    rows: int
    pages: int
    budget: int = BUDGET
    ahead: bool = True
    offer: Offer | None = None
    """Slots and room that steps of all rows come with; None: as in service, for all numbers of rows."""
    times: list[float] = field(default_factory=list)
    """When each forward was answered, s."""
    accepted: list[int] = field(default_factory=list)
    """Tokens that it decided."""
    denoised: list[int] = field(default_factory=list)
    """Rows with a canvas in it."""
    prompts: list[int] = field(default_factory=list)
    """Tokens of prompts in it."""
    slots: list[int] = field(default_factory=list)
    """For finished blocks, in the captured step that it read."""
    kinds: list[str] = field(default_factory=list)
    """Rows, slots and room of the captured step that it read."""

    def __post_init__(self) -> None:
        device, began = self.model.device, time.perf_counter()
        if self.offer is None:
            self.forward = make_runner(
                self.model, self.pages, PAGE, device, max_rows=self.rows, max_model_len=2048, ahead=self.ahead
            )
        else:
            bounded = replace(self.model, spec=replace(self.model.spec, max_model_len=2048))
            runner = Runner(bounded, self.pages, PAGE, device)
            self.forward = AheadRunner(runner, make_graphs(runner, self.rows), [self.rows], self.offer)
            self.forward.capture(lambda done, of: None)
        self.start_s = time.perf_counter() - began
        limits = BatchLimits(self.rows, self.budget, pages_ahead=self.ahead)
        spec = replace(self.model.spec, max_model_len=2048)
        self.engine = Engine(spec, CacheShape(PAGE, self.pages), limits, self._timed, lambda request, resume: NoText())

    def _timed(self, plan: Plan) -> Decision:
        decision = self.forward(plan)
        block = self.model.spec.block_length
        self.times.append(time.perf_counter())
        self.accepted.append(sum(map(sum, decision.accepted)))
        last = self.forward.last if isinstance(self.forward, AheadRunner) else None
        self.slots.append(last[1] if last else 0)
        self.kinds.append(str(last or ""))
        self.denoised.append(sum(row.canvas is not None and len(row.token_ids) <= 2 * block for row in plan.rows))
        self.prompts.append(sum(len(row.token_ids) for row in plan.rows if len(row.token_ids) > 2 * block))
        return decision


def a_request(number: int, model: LoadedModel, produce: int = PRODUCE, context: int = CONTEXT) -> Generate:
    draw = random.Random(number)
    return Generate(
        id=f"g-{number}",
        model="random",
        prompt=tuple(draw.randrange(1000) for _ in range(context)),
        limits=Limits(max_tokens=produce, ignore_eos=True),
        cache_prompt=False,
    )


def served(shape: Shape, model: LoadedModel, block: int, steps: int) -> LoadedModel:
    """Return the model with a block length and a forced number of steps for each."""
    return replace(model, spec=replace(model.spec, block_length=block, decoding=LowConfidenceStatic(steps=steps)))


def floors(shape: Shape, ceilings: Ceilings, rows: int, block: int, step_ms: float) -> dict[str, object]:
    """Return what a step of plain rows takes at least, by an H100's datasheet and by what this card was seen to do."""
    least, own = (
        max(shape.floor_ms(rows, block, CONTEXT, *rates)) for rates in (DATASHEET, (ceilings.read, ceilings.matrix))
    )
    return {
        "floor_ms": least,
        "ratio": step_ms / least,
        "floor_measured_ms": own,
        "ratio_measured": step_ms / own,
    }


def bench_engine(
    model: LoadedModel, shape: Shape, ceilings: Ceilings | None, report: Report, rows: int, how: str = "chosen"
) -> None:
    """All rows at once, from their prompts to the end; what is told is the time in which all of them decode.

    Floors are told beside the median step of those without a slot, where there were enough, else of all.
    """
    pages = rows * ((CONTEXT + PRODUCE) // PAGE + 3)
    ahead = how != "plain"
    watched = Watched(model, rows, pages, ahead=ahead, offer=OFFERS.get(how))
    requests = [a_request(number, model) for number in range(rows)]
    inbox = Inbox(arrivals=[Arrival(request, epoch=1) for request in requests])
    began, first, last = time.perf_counter(), dict[str, float](), dict[str, float]()
    engine = watched.engine
    while inbox.arrivals or not engine.idle:
        for event in engine.step(inbox).events:
            if isinstance(event, Delta):
                first.setdefault(event.id, time.perf_counter() - began)
            elif isinstance(event, Finished):
                last[event.id] = time.perf_counter() - began
            elif isinstance(event, Failed):
                raise RuntimeError(event.message)
        inbox = Inbox()
    full = [i for i in range(1, len(watched.times)) if watched.denoised[i] == rows and not watched.prompts[i]]
    # The first steps in which all decode still hold what came of the prompts; the last ones lose rows.
    full = full[4:-2] if len(full) > 16 else full
    seconds = sum(watched.times[i] - watched.times[i - 1] for i in full)
    steps = [watched.times[i] - watched.times[i - 1] for i in full]
    kinds: dict[str, list[float]] = {}
    for i, step in zip(full, steps, strict=True):
        kinds.setdefault(watched.kinds[i], []).append(step * 1e3)
    leader = watched.forward if isinstance(watched.forward, AheadRunner) else None
    plain = [step for i, step in zip(full, steps, strict=True) if watched.slots[i] == 0]
    plain_ms = median(plain if len(plain) > 8 else steps) * 1e3
    report(
        {
            "bench": "engine",
            "rows": rows,
            "block": model.spec.block_length,
            "ahead": ahead,
            "commit": how,
            "start_s": watched.start_s,
            "step_ms": median(steps) * 1e3,
            "plain_step_ms": plain_ms,
            **(floors(shape, ceilings, rows, model.spec.block_length, plain_ms) if ceilings else {}),
            "tokens_s": sum(watched.accepted[i] for i in full) / seconds,
            "longest_ms": max(steps) * 1e3,
            "steps": len(full),
            "kinds": {kind: (len(times), round(median(times), 2)) for kind, times in sorted(kinds.items())},
            "first_block_last_s": max(first.values()),
            "all_s": max(last.values()),
            "tokens_s_with_prompts": rows * PRODUCE / max(last.values()),
            **({"postponed": leader.postponed, "asked": leader.asked, **leader.choices()} if leader else {}),
            "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        }
    )


def bench_profile(model: LoadedModel, report: Report, rows: int, steps: int = 12) -> None:
    """What the kernels of steps take in which all rows decode."""
    watched = Watched(model, rows, rows * ((CONTEXT + PRODUCE) // PAGE + 3))
    engine = watched.engine
    requests = [a_request(number, model) for number in range(rows)]
    engine.step(Inbox(arrivals=[Arrival(request, epoch=1) for request in requests]))
    while len(watched.times) < 8 or watched.denoised[-1] < rows or watched.prompts[-1]:
        engine.step(Inbox())
    for _ in range(4):
        engine.step(Inbox())

    def some_steps() -> None:
        for _ in range(steps):
            engine.step(Inbox())

    mark = len(watched.times)
    shares = share_out(profile(some_steps))
    whole = sum(share.us for share in shares.values())
    report(
        {
            "bench": "profile",
            "rows": rows,
            "block": model.spec.block_length,
            "steps": Counter(watched.kinds[mark:]),
            "step_us": whole / steps,
            "host_share": shares[IDLE].us / whole,
            "kernels": per_step(shares, steps),
        }
    )


def bench_llada(model: LoadedModel, report: Report, rows: int) -> None:
    """Dual cache: each block begins with a forward over the whole canvas, whose logits are its first step."""
    spec = replace(
        model.spec,
        attention=Attention.BIDIRECTIONAL,
        commit=Commit.REFRESHED,
        blocks_after_prompt=True,
        cache="dual",
        max_model_len=2048,
    )
    watched = Watched(replace(model, spec=spec), rows, rows * ((CONTEXT + PRODUCE) // PAGE + 3), budget=16_384)
    engine = watched.engine
    for wave in range(2):
        inbox = Inbox(arrivals=[Arrival(a_request(number + wave * rows, model), epoch=1) for number in range(rows)])
        began, mark = time.perf_counter(), len(watched.times)
        while inbox.arrivals or not engine.idle:
            for event in engine.step(inbox).events:
                if isinstance(event, Failed):
                    raise RuntimeError(event.message)
            inbox = Inbox()
        seconds = time.perf_counter() - began
        # The first wave is for compilers.
        if wave:
            steps = [b - a for a, b in zip(watched.times[mark:], watched.times[mark + 1 :], strict=False)]
            assert isinstance(watched.forward, AheadRunner)
            report(
                {
                    "bench": "dual cache",
                    "rows": rows,
                    "tokens_s": rows * PRODUCE / seconds,
                    "step_median_ms": median(steps) * 1e3,
                    "step_longest_ms": max(steps) * 1e3,
                    "steps": len(steps),
                    "postponed": watched.forward.postponed,
                    "asked": watched.forward.asked,
                }
            )


def bench_memory(model: LoadedModel, report: Report, rows: int) -> None:
    """What the plan of the memory says, and what the captured steps then take."""
    device = model.device
    needs = measure_needs(model, BatchLimits(rows, BUDGET, pages_ahead=True), PAGE)
    _tidy()
    runner = Runner(model, rows * 8, PAGE, device)
    graphs = make_graphs(runner, rows)
    leader = AheadRunner(runner, graphs, bucket_sizes(rows))
    free = free_memory(device) or 0
    leader.capture(lambda done, of: None)
    graphs.tidy()
    taken = free - (free_memory(device) or 0) + graphs.kept_bytes
    told = {f"{name}_gb": size / 1e9 for name, size in asdict(needs).items()}
    report({"bench": "memory", "rows": rows, **told, "captures": len(leader.captures()), "steps_took_gb": taken / 1e9})


def bench_prompts(model: LoadedModel, report: Report, running: int, coming: int, budget: int) -> None:
    """`coming` prompts arrive while `running` rows decode."""
    rows = running + coming
    watched = Watched(model, rows, rows * ((CONTEXT + 2 * PRODUCE) // PAGE + 3), budget)
    engine = watched.engine
    old = [a_request(number, model, 2 * PRODUCE) for number in range(running)]
    engine.step(Inbox(arrivals=[Arrival(request, epoch=1) for request in old]))
    while len(watched.times) < 24:
        engine.step(Inbox())
    alone = median(b - a for a, b in zip(watched.times[12:], watched.times[13:], strict=False))
    new = [a_request(number, model, 64) for number in range(running, rows)]
    mark, began, first = len(watched.times), time.perf_counter(), dict[str, float]()
    inbox = Inbox(arrivals=[Arrival(request, epoch=1) for request in new])
    names = {request.id for request in new}
    while len(first) < coming:
        for event in engine.step(inbox).events:
            if isinstance(event, Delta) and event.id in names:
                first.setdefault(event.id, time.perf_counter() - began)
        inbox = Inbox()
    beside = [
        b - a
        for a, b, tokens in zip(
            watched.times[mark:], watched.times[mark + 1 :], watched.prompts[mark + 1 :], strict=False
        )
        if tokens
    ]
    report(
        {
            "bench": "prompts",
            "running": running,
            "coming": coming,
            "budget": budget,
            "step_alone_ms": alone * 1e3,
            "step_beside_ms": median(beside) * 1e3 if beside else None,
            "steps_with_prompts": len(beside),
            "first_block_median_s": median(first.values()),
            "first_block_last_s": max(first.values()),
        }
    )


def _until(deadline: float) -> Callable[[], bool]:
    """Return what tells whether the deadline has passed or SIGTERM has come."""
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    return lambda: asked.is_set() or time.perf_counter() > deadline


def main() -> None:
    began = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="+", choices=("engine", "profile", "llada", "prompts", "soak", "path", "memory"))
    parser.add_argument("--model", default="SDAR-8B", choices=list(SHAPES))
    parser.add_argument("--rows", default="1,8,32,64")
    parser.add_argument("--block", default="32", help="block lengths; the first is that of all but the engine")
    parser.add_argument("--steps", default="8", help="steps of each block")
    parser.add_argument("--commit", default="chosen", help=f"ways, by commas, of {list(OFFERS)} and plain")
    parser.add_argument("--rounds", type=int, default=5, help="of the path; the first one is for caches")
    parser.add_argument("--fresh", action="store_true", help="each round of the path has prompts of its own")
    parser.add_argument("--emulated", action="store_true", help="the path on a card that is not there")
    parser.add_argument(
        "--seconds",
        type=float,
        default=240.0,
        help="of a soak at most, from the start of the process; SIGTERM ends its arrivals too",
    )
    parser.add_argument("--soak-steps", type=int, default=STEPS_OF_AN_HOUR, help="of a soak; try --model soak with it")
    parser.add_argument("--soak-rows", type=int, default=32)
    parser.add_argument("--weights", default="stored", choices=("stored", "fp8", "blocks"))
    parser.add_argument("--head", default="stored", choices=("stored", "fp8"))
    parser.add_argument("--kv", default="auto", choices=("auto", "fp8"))
    arguments = parser.parse_args()
    if "profile" in arguments.what and not torch.cuda.is_available():
        parser.error("a profile needs a GPU")
    logging.basicConfig(level=logging.WARNING)
    given = (arguments.rows, arguments.block, arguments.steps)
    rows, blocks, steps = ([int(each) for each in value.split(",")] for value in given)
    with (Path(os.environ.get("OUT", ".")) / "serving.jsonl").open("a") as file:

        def report(row: dict[str, object]) -> None:
            row = {
                "model": arguments.model,
                "weights": arguments.weights,
                "head": arguments.head,
                "kv": arguments.kv,
                **row,
            }
            file.write(json.dumps(row) + "\n")
            file.flush()
            print({key: round(v, 3) if isinstance(v, float) else v for key, v in row.items()}, flush=True)

        alone = [each for each in arguments.what if each != "path"]
        if alone:
            shape = SHAPES[arguments.model]
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
            with torch.inference_mode():
                model = served(shape, random_model(shape, device, dtype), blocks[0], steps[0])
                if arguments.weights == "fp8":
                    assert isinstance(model.module, Decoder)
                    quantize(model.module)
                if arguments.weights == "blocks":
                    assert isinstance(model.module, Decoder)
                    store_in_blocks(model.module)
                if arguments.kv == "fp8":
                    model = replace(model, kv_dtype=FP8)
                if arguments.head == "fp8":
                    assert isinstance(model.module, Decoder)
                    quantize_head(model.module)
            ceilings = measure_ceilings() if device.type == "cuda" and "engine" in alone else None
            if ceilings:
                report({"bench": "ceilings", **asdict(ceilings)})
            for what in alone:
                if what == "engine":
                    for block, count in zip(blocks, steps, strict=True):
                        model = served(shape, model, block, count)
                        for each in rows:
                            for how in arguments.commit.split(","):
                                bench_engine(model, shape, ceilings, report, each, how)
                                _tidy()
                    model = served(shape, model, blocks[0], steps[0])
                elif what == "profile":
                    for block, count in zip(blocks, steps, strict=True):
                        for each in rows:
                            bench_profile(served(shape, model, block, count), report, each)
                            _tidy()
                elif what == "llada":
                    for each in rows:
                        bench_llada(model, report, each)
                        _tidy()
                elif what == "prompts":
                    for budget in (1024, 2048, 4096):
                        bench_prompts(model, report, 8, 64, budget)
                        _tidy()
                elif what == "soak":
                    enough = _until(began + arguments.seconds)
                    traffic = Traffic(rows=arguments.soak_rows, pages=12 * arguments.soak_rows)
                    report(
                        soak(model, arguments.soak_steps, enough, traffic, tell=lambda line: print(line, flush=True))
                    )
                else:
                    for each in rows:
                        bench_memory(model, report, each)
                _tidy()
            del model
            _tidy()
        if "path" in arguments.what:
            way = Way(arguments.model, blocks[0], steps[0], arguments.emulated)
            asyncio.run(bench_path(way, report, rows, arguments.rounds, arguments.fresh))


def _tidy() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
