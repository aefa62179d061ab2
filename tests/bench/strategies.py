"""Accuracy beside tokens per forward of the strategies on a bundled model: python -m tests.bench.strategies FOLDER.

All figures are counts, so neither the machine nor its load matters. The items are held-out ones, drawn as
`worker.demo.evaluate` draws them. Writes FOLDER/figures.json and FOLDER/strategies.png.
"""

import argparse
import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer

from shared.commands import Limits, Sampling
from shared.decoding import (
    AdaptiveParallel,
    Decoding,
    Entropy,
    EntropyBounded,
    Factor,
    JointThreshold,
    LowConfidenceDynamic,
    LowConfidenceStatic,
    MaskgitPlus,
    MultiBlock,
    Origin,
    RandomOrder,
    Sequential,
    SubBlock,
    Threshold,
    ThresholdQuota,
    TopkMargin,
)
from tests.bench.load import show
from worker.bundled import BUNDLED, bundled_folder
from worker.demo.chatml import STOP_ID
from worker.demo.evaluate import collect, evaluate
from worker.demo.items import Item
from worker.demo.reference_decoder import Generation, Settings
from worker.demo.tasks import TASKS
from worker.loop import EngineLoop
from worker.settings import WorkerSettings

STRATEGIES: tuple[Decoding, ...] = (
    LowConfidenceStatic(),
    LowConfidenceStatic(steps=8),
    LowConfidenceStatic(steps=4),
    LowConfidenceDynamic(steps=16),
    LowConfidenceDynamic(steps=8),
    Sequential(),
    Sequential(steps=8),
    RandomOrder(),
    RandomOrder(steps=8),
    Threshold(),
    Factor(),
    Factor(factor=0.5),
    ThresholdQuota(steps=8),
    EntropyBounded(),
    EntropyBounded(bound=0.1),
    AdaptiveParallel(),
    AdaptiveParallel(steps=8),
    AdaptiveParallel(threshold=0.0, steps=8),
    Origin(steps=8),
    MaskgitPlus(steps=8),
    TopkMargin(steps=8),
    Entropy(steps=8),
    SubBlock(),
    JointThreshold(),
    MultiBlock(),
    MultiBlock(tau_add=0.5),
    MultiBlock(tau_semi=1.0),
    MultiBlock(tau_semi=1.0, tau_acc=0.95),
    MultiBlock(tau_semi=1.0, tau_acc=0.98),
)
SWEEP: tuple[Decoding, ...] = tuple(
    Threshold(threshold=value) for value in (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
)
# What ranks positions matters where tokens are drawn: both, by temperature.
RANKED: tuple[Decoding, ...] = (Threshold(), Threshold(confidence="tempered"))
TEMPERATURES = (0.1, 0.2, 0.5, 1.0)
MAX_TOKENS = 160


def label(decoding: Decoding) -> str:
    """Return the options in which `decoding` differs from its strategy's defaults, or its threshold."""
    options = decoding.model_dump(exclude_defaults=True, exclude={"strategy"})
    if isinstance(decoding, Threshold):
        options = {"threshold": decoding.threshold}
    return ", ".join(f"{name} {value}" for name, value in options.items())


def measure(
    model: str, items: Mapping[str, Sequence[Item]], decoding: Decoding, temperature: float = 0.0
) -> dict[str, Any]:
    """Return what `worker.demo.evaluate` reports overall, with the engine as its decoder."""

    async def answers(prompts: Sequence[Sequence[int]]) -> list[Generation]:
        limits, sampling = Limits(max_tokens=MAX_TOKENS), Sampling(temperature=temperature, seed=1)
        async with EngineLoop.load(WorkerSettings(model=model, device="cpu", dtype="float32")) as loop:
            jobs = [loop.generate(prompt, limits=limits, sampling=sampling, decoding=decoding) for prompt in prompts]
            found = await asyncio.gather(*jobs)
        # The evaluation counts the closing token, which is no output of the engine.
        return [([*each.token_ids, *[STOP_ID] * (each.reason == "stop")], each.usage.nfe) for each in found]

    def generate(prompts: list[list[int]], _: Settings) -> list[Generation]:
        return asyncio.run(answers(prompts))

    tokenizer = Tokenizer.from_file(str(bundled_folder(model) / "tokenizer.json"))
    return evaluate(generate, tokenizer, items, {"engine": Settings()})["overall"]["engine"]


def rows_of(model: str, items: Mapping[str, Sequence[Item]], decodings: Sequence[Decoding]) -> list[dict[str, Any]]:
    return [
        {"strategy": decoding.strategy, "options": label(decoding)} | measure(model, items, decoding)
        for decoding in track(decodings, console=Console(stderr=True), transient=True)
    ]


def drawn(model: str, items: Mapping[str, Sequence[Item]]) -> list[dict[str, Any]]:
    return [
        {"strategy": decoding.strategy, "options": f"confidence {decoding.confidence}, temperature {temperature}"}
        | measure(model, items, decoding, temperature)
        for decoding in RANKED
        for temperature in TEMPERATURES
    ]


def plot(figures: dict[str, Any], path: Path) -> None:
    """Draw accuracy over tokens per forward: one point for each row, and the sweep as a line."""
    figure, axes = plt.subplots(figsize=(9, 5.4))
    sweep = figures["sweep"]
    axes.plot(
        [row["tokens_per_forward"] for row in sweep],
        [100 * row["accuracy"] for row in sweep],
        ".-",
        color="0.6",
        label="threshold, from 0.99 to 0.3",
    )
    for row in sweep:
        if row["options"].split()[-1] in ("0.3", "0.5", "0.6", "0.7", "0.8"):
            place = (row["tokens_per_forward"], 100 * row["accuracy"])
            axes.annotate(row["options"].split()[-1], place, (5, 3), textcoords="offset points", fontsize=7)
    kinds = list(dict.fromkeys(row["strategy"] for row in figures["strategies"]))
    for number, kind in enumerate(kinds):
        rows = [row for row in figures["strategies"] if row["strategy"] == kind]
        axes.scatter(
            [row["tokens_per_forward"] for row in rows],
            [100 * row["accuracy"] for row in rows],
            marker="os^Dv"[number % 5],
            color=plt.get_cmap("tab20")(number),
            label=kind,
            zorder=3,
        )
    axes.set(
        xlabel="tokens per forward", ylabel="right, %", title=f"{figures['model']}, {figures['items']} held-out items"
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="demo", choices=BUNDLED)
    parser.add_argument("--items", type=int, default=8, help="most items of a headline task; a quarter of others")
    arguments = parser.parse_args()
    items = collect(TASKS.values(), arguments.items)
    figures = {
        "model": arguments.model,
        "items": sum(map(len, items.values())),
        "tasks": len(items),
        "strategies": rows_of(arguments.model, items, STRATEGIES),
        "sweep": rows_of(arguments.model, items, SWEEP),
        "drawn": drawn(arguments.model, items),
    }
    arguments.folder.mkdir(parents=True, exist_ok=True)
    (arguments.folder / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    plot(figures, arguments.folder / "strategies.png")
    for name in ("strategies", "sweep", "drawn"):
        table = [
            [row["strategy"], row["options"], 100 * row["accuracy"], row["tokens_per_forward"], row["unclosed"]]
            for row in figures[name]
        ]
        show(
            f"{name}, {figures['items']} items", ["strategy", "options", "right %", "tokens/forward", "unclosed"], table
        )


if __name__ == "__main__":
    main()
