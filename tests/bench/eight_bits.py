"""python -m tests.bench.eight_bits [--items 40]: what 8 bits do to the bundled model's answers, on the CPU.

Held-out items of the model's own evaluation, decoded by the engine with weights, head, and pages of 8 bits, each alone
and all together: right answers, tokens a forward, and how many answers are the same as without.
"""

import argparse
import asyncio
from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer

from shared.commands import Limits, Sampling
from worker.bundled import bundled_folder
from worker.demo.chatml import STOP_ID
from worker.demo.evaluate import MODES, Report, collect, evaluate
from worker.demo.export import load_model
from worker.demo.items import Item
from worker.demo.reference_decoder import Generation, Settings
from worker.demo.tasks import TASKS
from worker.loop import EngineLoop
from worker.settings import WorkerSettings

WAYS: dict[str, dict[str, str]] = {
    "as stored": {},
    "head": {"head": "fp8"},
    "pages": {"kv_dtype": "fp8"},
    "weights": {"weights": "fp8"},
    "all three": {"head": "fp8", "kv_dtype": "fp8", "weights": "fp8"},
}


async def _generate(prompts: Sequence[Sequence[int]], changes: dict[str, str]) -> list[Generation]:
    settings = WorkerSettings.model_validate({"model": "demo", "device": "cpu", "threads": 1, **changes})
    limits = Limits(max_tokens=160)
    async with EngineLoop.load(settings) as loop:
        asked = [loop.generate(list(each), sampling=Sampling(temperature=0.0), limits=limits) for each in prompts]
        answers = await asyncio.gather(*asked)
    return [([*answer.token_ids, STOP_ID], answer.usage.nfe) for answer in answers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=40)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    arguments = parser.parse_args()
    tokenizer = load_model(bundled_folder("demo-nano"))[1]
    items = collect(TASKS.values(), arguments.items)
    texts: list[list[list[int]]] = []
    for way in arguments.ways:
        answers, report = _measure(items, tokenizer, WAYS[way])
        texts.append([ids for ids, _ in answers])
        same = sum(a == b for a, b in zip(texts[-1], texts[0], strict=True)) / len(answers)
        print({"way": way, "items": len(answers), "same": round(same, 4), **report["overall"]["threshold"]}, flush=True)


def _measure(
    items: Mapping[str, Sequence[Item]], tokenizer: Tokenizer, changes: dict[str, str]
) -> tuple[list[Generation], Report]:
    answers: list[Generation] = []

    def generate(prompts: list[list[int]], settings: Settings) -> list[Generation]:
        answers.extend(asyncio.run(_generate(prompts, changes)))
        return answers

    return answers, evaluate(generate, tokenizer, items, {"threshold": MODES["threshold"]})


if __name__ == "__main__":
    main()
