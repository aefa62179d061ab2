"""Block length by load: what steps cost, which length is chosen, and tokens/s with each beside the choice.

    python -m tests.bench.block_lengths
    python -m tests.bench.block_lengths --device cuda [--step-ahead off]

Held-out items of the bundled model, each decoded to its own end, so many at a time. Rounds alternate between the
lengths, so that a slow moment of the machine meets all; the best round of each counts. `mixed` are all lengths in turn,
side by side. On a CPU the time is CPU time, which depends less on what else the machine does; beside it stand tokens/s
by the clock.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

from shared.block_lengths import FILE, BlockLengths, read_block_lengths
from shared.commands import Limits
from shared.text import Message
from tests.bench.load import show
from worker.assembly import Assembly, assemble, page_size_of
from worker.bundled import bundled_folder
from worker.demo.evaluate import collect
from worker.demo.items import Item
from worker.demo.reference_decoder import Settings
from worker.demo.tasks import TASKS
from worker.engine.load_aware import LoadAware, Steady
from worker.engine.scheduler import BatchLimits, CacheShape
from worker.led_prices import LedSteps
from worker.loop import EngineLoop
from worker.runners import runs_ahead
from worker.settings import WorkerSettings
from worker.step_prices import plan_of

ROWS = (1, 2, 4, 8, 16, 32)
CONCURRENCY = (1, 8, 32)
AUTO, MIXED = "auto", "mixed"
Kind = int | str
"""A block length, or one of these."""
_SHARE_MB = 4096
"""Of a card, for the pages of each of two workers."""


@dataclass(frozen=True, slots=True)
class Tally:
    """One round."""

    tokens: int
    forwards: int
    right: int
    seconds: float
    cpu_seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def cpu_rate(self) -> float:
        return self.tokens / self.cpu_seconds


@dataclass(frozen=True, slots=True)
class Worker:
    settings: WorkerSettings
    assembly: Assembly

    @classmethod
    def start(cls, settings: WorkerSettings) -> "Worker":
        return cls(settings, assemble(settings))

    @property
    def on_cpu(self) -> bool:
        return self.assembly.placement.device.type == "cpu"

    @property
    def is_led(self) -> bool:
        return runs_ahead(self.assembly.spec, self.assembly.placement.device, self.settings.step_ahead)

    @property
    def cache(self) -> CacheShape:
        pages = self.assembly.engine.load().total_pages
        return CacheShape(page_size_of(self.settings, self.assembly.spec), pages)

    @property
    def rule(self) -> LoadAware:
        choose = self.assembly.engine.choose_length
        rule = choose.rule if isinstance(choose, Steady) else choose
        assert isinstance(rule, LoadAware), "the model's folder has no block_lengths.json, or there is no choice"
        return rule


def step_ms(worker: Worker, length: int, rows: int) -> float:
    """Return the best time of a step of so many rows: as they follow each other where they are led, else with all
    half-way through a block of this length."""
    if not worker.is_led:
        return plain_step_ms(worker, length, rows)
    limits = BatchLimits(worker.settings.max_rows, worker.settings.token_budget, pages_ahead=True)
    steps = LedSteps(worker.assembly.forward, worker.assembly.spec, worker.cache, limits, length, time.perf_counter)
    return 1000 * min(seconds for _ in range(4) for _, seconds in steps.time(rows))


def plain_step_ms(worker: Worker, length: int, rows: int, tries: int = 9) -> float:
    assembly, spec = worker.assembly, replace(worker.assembly.spec, block_length=length)
    clock = time.process_time if worker.on_cpu else time.perf_counter
    plan = plan_of(spec, worker.cache, rows)
    assembly.forward(plan)
    times = list[float]()
    for _ in range(tries):
        began = clock()
        assembly.forward(plan)
        times.append(clock() - began)
    return 1000 * min(times)


async def answer_all(loop: EngineLoop, items: Sequence[Item], lengths: Sequence[int | None], concurrent: int) -> Tally:
    """Answer the items, so many at a time, the next as soon as one is done; the lengths take turns."""
    given: Iterator[tuple[Item, int | None]] = zip(items, cycle(lengths), strict=False)
    limits = Limits(max_tokens=Settings().max_tokens)
    tokens = forwards = right = 0

    async def client() -> None:
        nonlocal tokens, forwards, right
        for item, length in given:
            messages: list[Message] = [{"role": role, "content": text} for role, text in item.turns]
            prompt = loop.render_chat_prompt(messages)
            answer = await loop.generate(prompt, limits=limits, block_length=length)
            tokens += answer.usage.completion_tokens
            forwards += answer.usage.nfe
            right += item.accepts(answer.text)

    began, cpu_began = time.perf_counter(), time.process_time()
    await asyncio.gather(*(client() for _ in range(concurrent)))
    return Tally(tokens, forwards, right, time.perf_counter() - began, time.process_time() - cpu_began)


async def measure(
    items: Sequence[Item], named: Worker, auto: Worker, lengths: Sequence[int], rounds: int, concurrency: Sequence[int]
) -> None:
    found: dict[tuple[int, Kind], list[Tally]] = {}
    async with (
        EngineLoop(named.assembly.engine, named.assembly.tokenizer) as fixed,
        EngineLoop(auto.assembly.engine, auto.assembly.tokenizer) as chosen,
    ):
        ways: dict[Kind, tuple[EngineLoop, Sequence[int | None]]] = {length: (fixed, [length]) for length in lengths}
        ways |= {MIXED: (fixed, lengths), AUTO: (chosen, [None])}
        for _ in range(rounds):
            for concurrent in concurrency:
                for kind, (loop, asked) in ways.items():
                    tally = await answer_all(loop, items, asked, concurrent)
                    found.setdefault((concurrent, kind), []).append(tally)

    def best(tallies: Sequence[Tally]) -> float:
        return max(tally.cpu_rate if named.on_cpu else tally.rate for tally in tallies)

    rows: list[list[object]] = []
    for (concurrent, kind), tallies in found.items():
        own = best(found[concurrent, named.assembly.spec.block_length])
        tokens, forwards = tallies[0].tokens, tallies[0].forwards
        right = 100 * sum(tally.right for tally in tallies) / (len(items) * len(tallies))
        rates = [max(tally.rate for tally in tallies), max(tally.cpu_rate for tally in tallies)]
        cells = [*(f"{rate:.0f}" for rate in rates), best(tallies) / own]
        rows.append([concurrent, kind, *cells, tokens / forwards, right])
    columns = ["concurrent", "blocks of", "tokens/s", "tokens/CPU s", "over own", "tokens/forward", "right %"]
    show(f"{len(items)} held-out items, {rounds} rounds", columns, rows)


def with_all_eligible(folder: Path, table: BlockLengths, own: int) -> Path:
    """Fill an empty folder with the bundled model, which then takes all lengths of the table to be as often right."""
    for file in bundled_folder("demo").iterdir():
        if file.name != FILE:
            (folder / file.name).symlink_to(file.resolve())
    told = table.model_dump(mode="json")
    accuracy = next(row.accuracy for row in table.lengths if row.block_length == own)
    told["lengths"] = [row | {"accuracy": accuracy} for row in told["lengths"]]
    (folder / FILE).write_text(json.dumps(told))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=4, help="most items of a headline task; a quarter of others")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrent", type=int, nargs="+", default=CONCURRENCY, help="requests at a time")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--step-ahead", choices=("auto", "on", "off"), default="auto", help="auto: on a card")
    arguments = parser.parse_args()
    table = read_block_lengths(bundled_folder("demo"))
    assert table is not None
    settings = WorkerSettings(
        model="demo",
        device=arguments.device,
        step_ahead=arguments.step_ahead,
        block_length="auto",
        kv_cache_mb=None if arguments.device == "cpu" else _SHARE_MB,
    )
    auto = Worker.start(settings)
    with tempfile.TemporaryDirectory() as folder:
        model = with_all_eligible(Path(folder), table, auto.assembly.spec.block_length)
        named = Worker.start(settings.model_copy(update={"model": str(model)}))
    lengths = [row.block_length for row in table.lengths]
    show(
        f"step, ms {'' if named.is_led or not named.on_cpu else 'of CPU time'}",
        ["rows", *(f"blocks of {length}" for length in lengths)],
        [[rows, *(step_ms(named, length, rows) for length in lengths)] for rows in ROWS],
    )
    rule = auto.rule
    eligible = list(rule.tokens_per_forward)
    show(
        "tokens/s by the rule",
        ["requests", *(f"blocks of {length}" for length in eligible), "chosen"],
        [[count, *(f"{rule.rate(length, count):.0f}" for length in eligible), rule(count)] for count in ROWS],
    )
    items = [item for group in collect(TASKS.values(), arguments.items).values() for item in group]
    random.Random(1).shuffle(items)
    asyncio.run(measure(items, named, auto, lengths, arguments.rounds, arguments.concurrent))


if __name__ == "__main__":
    main()
