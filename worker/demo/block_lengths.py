"""Measure a bundled model at several block lengths and write its block_lengths.json.

    python -m worker.demo.block_lengths --model demo --lengths 8,16,32

The items are the held-out ones of `worker.demo.evaluate`; the engine decodes them, greedily and by the model's default
strategy. All figures are counts, so neither the machine nor its load matters.
"""

import argparse
import asyncio
import datetime
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from shared.block_lengths import FILE, BlockLengths, Measured, read_block_lengths
from shared.commands import Limits
from worker.assembly import assemble
from worker.bundled import BUNDLED, bundled_folder
from worker.demo.chatml import STOP_ID
from worker.demo.evaluate import collect, evaluate
from worker.demo.items import Item
from worker.demo.reference_decoder import Generation, Settings
from worker.demo.tasks import TASKS
from worker.loop import EngineLoop
from worker.settings import WorkerSettings

MODE = "engine"
AS_EVALUATED = Settings()


async def decode(settings: WorkerSettings, prompts: Sequence[Sequence[int]], block_length: int) -> list[Generation]:
    """Return each prompt's answer, and the forwards that it took."""
    limits = Limits(max_tokens=AS_EVALUATED.max_tokens)
    async with EngineLoop.load(settings) as loop:
        jobs = [loop.generate(prompt, limits=limits, block_length=block_length) for prompt in prompts]
        found = await asyncio.gather(*jobs)
    # The evaluation counts the closing token, which is no output of the engine.
    return [([*each.token_ids, *[STOP_ID] * (each.reason == "stop")], each.usage.nfe) for each in found]


def measure(
    settings: WorkerSettings,
    items: Mapping[str, Sequence[Item]],
    lengths: Sequence[int],
    tell: Callable[[Measured], None] = lambda _: None,
) -> BlockLengths:
    """Decode every item with blocks of each length; `tell` hears of each as it is done."""
    tokenizer = Tokenizer.from_file(str(settings.folder / "tokenizer.json"))
    rows: list[Measured] = []
    for length in lengths:

        def generate(prompts: list[list[int]], _: Settings, length: int = length) -> list[Generation]:
            return asyncio.run(decode(settings, prompts, length))

        found = evaluate(generate, tokenizer, items, {MODE: AS_EVALUATED})["overall"][MODE]
        row = Measured(block_length=length, accuracy=found["accuracy"], tokens_per_forward=found["tokens_per_forward"])
        rows.append(row)
        tell(row)
    return BlockLengths(
        items=sum(map(len, items.values())),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        decoding=assemble(settings).card.decoding,
        lengths=tuple(rows),
    )


def write(table: BlockLengths, folder: Path) -> None:
    """Write the table; other lengths that the file has of as many items, under the same strategy, stay."""
    former = read_block_lengths(folder)
    rows = {row.block_length: row for row in table.lengths}
    if former is not None and (former.items, former.decoding) == (table.items, table.decoding):
        rows = {row.block_length: row for row in former.lengths} | rows
    table = table.model_copy(update={"lengths": tuple(rows[length] for length in sorted(rows))})
    (folder / FILE).write_text(table.model_dump_json(indent=1) + "\n", encoding="utf-8")


def _lengths(text: str) -> list[int]:
    lengths = [int(length) for length in text.split(",")]
    if min(lengths) < 1:
        raise ValueError("a block has one token at least")
    return lengths


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure a bundled model at several block lengths.")
    parser.add_argument("--model", choices=BUNDLED, required=True)
    parser.add_argument(
        "--lengths", type=_lengths, default="8,16,32", metavar="N,...", help="those that the model was trained on"
    )
    parser.add_argument("--items", type=int, default=500, help="most items of a headline task; a quarter of others")
    arguments = parser.parse_args(argv)
    settings = WorkerSettings(model=arguments.model, device="cpu", dtype="float32")
    items = collect(TASKS.values(), arguments.items)
    table = measure(settings, items, arguments.lengths, lambda row: print(row.model_dump_json(), flush=True))
    write(table, bundled_folder(arguments.model))


if __name__ == "__main__":
    main()
