"""Block length by load on a CPU: what steps cost, which length is chosen, and tokens/s with each beside the choice.

    python -m tests.bench.block_lengths

Held-out items of the bundled model, each decoded to its own end, so many at a time. Rounds alternate between the
lengths, so that a slow moment of the machine meets all; the best round of each counts. Beside tokens/s by the clock
stands what a second of CPU time gives: it depends less on what else the machine does.
"""

import argparse
import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shared.block_lengths import read_block_lengths
from shared.commands import Limits
from shared.text import Message
from tests.bench.load import show
from worker.assembly import Assembly, assemble
from worker.bundled import bundled_folder
from worker.demo.evaluate import collect
from worker.demo.items import Item
from worker.demo.reference_decoder import Settings
from worker.demo.tasks import TASKS
from worker.engine.load_aware import LoadAware
from worker.engine.scheduler import CacheShape
from worker.loop import EngineLoop
from worker.settings import WorkerSettings
from worker.step_prices import plan_of

ROWS = (1, 2, 4, 8, 16, 32)
CONCURRENCY = (1, 8, 32)
AUTO = None


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


def step_ms(assembly: Assembly, length: int, rows: int, tries: int = 9) -> float:
    """Return the best CPU time of a step of so many rows, all half-way through a block of this length."""
    load = assembly.engine.load()
    page_size = assembly.spec.block_length * 2
    spec = replace(assembly.spec, block_length=length)
    plan = plan_of(spec, CacheShape(page_size, load.total_pages), rows)
    assembly.forward(plan)
    times = list[float]()
    for _ in range(tries):
        began = time.process_time()
        assembly.forward(plan)
        times.append(time.process_time() - began)
    return 1000 * min(times)


async def answer_all(loop: EngineLoop, items: Sequence[Item], length: int | None, concurrent: int) -> Tally:
    """Answer the items, so many at a time, the next as soon as one is done."""
    todo: Iterator[Item] = iter(items)
    limits = Limits(max_tokens=Settings().max_tokens)
    tokens = forwards = right = 0

    async def client() -> None:
        nonlocal tokens, forwards, right
        for item in todo:
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
    items: Sequence[Item],
    plain: Assembly,
    auto: Assembly,
    lengths: Sequence[int],
    rounds: int,
    concurrency: Sequence[int],
) -> None:
    found: dict[tuple[int, int | None], list[Tally]] = {}
    async with (
        EngineLoop(plain.engine, plain.tokenizer) as fixed,
        EngineLoop(auto.engine, auto.tokenizer) as chosen,
    ):
        for _ in range(rounds):
            for concurrent in concurrency:
                for length in (*lengths, AUTO):
                    loop = chosen if length is AUTO else fixed
                    tally = await answer_all(loop, items, length, concurrent)
                    found.setdefault((concurrent, length), []).append(tally)
    rows: list[list[object]] = []
    for (concurrent, length), tallies in found.items():
        own = max(tally.cpu_rate for tally in found[concurrent, plain.spec.block_length])
        rate, any_of = max(tally.cpu_rate for tally in tallies), tallies[0]
        right = 100 * sum(tally.right for tally in tallies) / (len(items) * len(tallies))
        cells = [f"{max(tally.rate for tally in tallies):.0f}", f"{rate:.0f}", rate / own]
        rows.append([concurrent, length or "auto", *cells, any_of.tokens / any_of.forwards, right])
    columns = ["concurrent", "blocks of", "tokens/s", "tokens/CPU s", "over own", "tokens/forward", "right %"]
    show(f"{len(items)} held-out items, {rounds} rounds", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=4, help="most items of a headline task; a quarter of others")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrent", type=int, nargs="+", default=CONCURRENCY, help="requests at a time")
    arguments = parser.parse_args()
    plain = assemble(WorkerSettings(model="demo", device="cpu"))
    auto = assemble(WorkerSettings(model="demo", device="cpu", block_length="auto"))
    choose = auto.engine.choose_length
    assert isinstance(choose, LoadAware), "the model's folder has no block_lengths.json, or there is no choice"
    table = read_block_lengths(bundled_folder("demo"))
    assert table is not None
    lengths, eligible = [row.block_length for row in table.lengths], list(choose.tokens_per_forward)
    show(
        "step, ms of CPU time",
        ["rows", *(f"blocks of {length}" for length in lengths)],
        [[rows, *(step_ms(plain, length, rows) for length in lengths)] for rows in ROWS],
    )
    show(
        "tokens/s by the rule",
        ["requests", *(f"blocks of {length}" for length in eligible), "chosen"],
        [[count, *(f"{choose.rate(length, count):.0f}" for length in eligible), choose(count)] for count in ROWS],
    )
    items = [item for group in collect(TASKS.values(), arguments.items).values() for item in group]
    random.Random(1).shuffle(items)
    asyncio.run(measure(items, plain, auto, lengths, arguments.rounds, arguments.concurrent))


if __name__ == "__main__":
    main()
