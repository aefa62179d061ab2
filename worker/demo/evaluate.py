"""Evaluate a model folder on held-out items and write its eval.json.

    python -m worker.demo.evaluate --model worker/demo/models/demo --items 200 --mode threshold

Any decoder will do: ``evaluate`` takes a function from prompts and settings to token ids and forward passes.
"""

import argparse
import datetime
import json
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer

from worker.demo.chatml import ANSWER_START, STOP_ID, render_turns
from worker.demo.export import load_model, stages_of
from worker.demo.items import Item, Task
from worker.demo.mix import held_out, with_system
from worker.demo.reference_decoder import Generation, Settings
from worker.demo.tasks import TASKS

Generate = Callable[[list[list[int]], Settings], list[Generation]]
Report = dict[str, Any]  # the content of eval.json

MODES: Mapping[str, Settings] = {"threshold": Settings(threshold=0.9), "sequential": Settings(threshold=None)}
SEED = 2024

# The groups that the acceptance figures name; the other tasks are measured on fewer items.
HEADLINES = frozenset("arithmetic arithmetic_long sort json dates capitals definitions reverse stories".split())


def items_wanted(task: Task, count: int) -> int:
    """How many held-out items of a task to evaluate when headline tasks get ``count``."""
    return count if task.group in HEADLINES else -(-count // 4)


def collect(tasks: Iterable[Task], count: int, seed: int = SEED) -> dict[str, list[Item]]:
    """Draw the held-out items of each task; tasks without any are left out."""
    drawn = {task.name: dress(held_out(task, items_wanted(task, count), seed), task, seed) for task in tasks}
    return {name: items for name, items in drawn.items() if items}


def dress(items: Sequence[Item], task: Task, seed: int) -> list[Item]:
    """Put system turns before as many items as in training."""
    rng = Random(f"{seed}:{task.name}:system")
    return [with_system(item, rng, plain=task.plain) for item in items]


def evaluate(
    generate: Generate, tokenizer: Tokenizer, items: Mapping[str, Sequence[Item]], modes: Mapping[str, Settings] = MODES
) -> Report:
    """Decode every item in every mode and report accuracy, useful tokens per forward and unclosed answers."""
    flat = [item for group in items.values() for item in group]
    prompts = [tokenizer.encode(render_turns(i.turns) + ANSWER_START, add_special_tokens=False).ids for i in flat]
    report: Report = {
        "tasks": {name: {"group": TASKS[name].group, "items": len(group)} for name, group in items.items()}
    }
    report["groups"], report["overall"], report["mistakes"] = {}, {"items": len(flat)}, {}
    for mode, settings in modes.items():
        results = list(zip(flat, generate(prompts, settings), strict=True))
        for name, entry in report["tasks"].items():
            entry[mode] = _summary([pair for pair in results if pair[0].task == name], tokenizer)
        for group in sorted({TASKS[name].group for name in items}):
            part = [pair for pair in results if TASKS[pair[0].task].group == group]
            entry = report["groups"].setdefault(group, {"items": len(part)})
            entry[mode] = _summary(part, tokenizer)
        report["overall"][mode] = _summary(results, tokenizer)
        if mode == "threshold":
            report["mistakes"] = _mistakes(results, tokenizer)
    return report


def _text(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    return tokenizer.decode([i for i in ids if i != STOP_ID], skip_special_tokens=False)


def _summary(results: Sequence[tuple[Item, Generation]], tokenizer: Tokenizer) -> dict[str, float | int]:
    right = sum(item.accepts(_text(ids, tokenizer)) for item, (ids, _) in results)
    tokens, forwards = sum(len(ids) for _, (ids, _) in results), sum(count for _, (_, count) in results)
    return {
        "accuracy": round(right / len(results), 4),
        "tokens_per_forward": round(tokens / forwards, 3),
        "unclosed": sum(not ids or ids[-1] != STOP_ID for _, (ids, _) in results),
    }


def _mistakes(results: Sequence[tuple[Item, Generation]], tokenizer: Tokenizer) -> dict[str, list[dict[str, str]]]:
    """Keep the first wrong answers of each task: a figure without examples teaches nothing."""
    found: dict[str, list[dict[str, str]]] = {}
    for item, (ids, _) in results:
        text, listed = _text(ids, tokenizer), found.setdefault(item.task, [])
        if len(listed) < 2 and not item.accepts(text):
            listed.append({"prompt": item.turns[-1][1], "wanted": item.answer, "got": text})
    return {name: listed for name, listed in found.items() if listed}


def table(report: Report) -> str:
    """Format a report for people."""
    modes = [mode for mode in MODES if mode in report["overall"]]
    head = f"{'task':16s}{'items':>6s}" + "".join(f"{mode:>12s} %{'tok/fwd':>9s}" for mode in modes)
    lines = [head]
    for section in ("tasks", "groups"):
        for name, entry in report[section].items():
            lines.append(_line(name, entry, modes))
        lines.append("-" * len(head))
    lines.append(_line("overall", report["overall"], modes))
    lines.append("unclosed answers: " + ", ".join(f"{mode} {report['overall'][mode]['unclosed']}" for mode in modes))
    return "\n".join(lines)


def _line(name: str, entry: Report, modes: Sequence[str]) -> str:
    cells = (f"{100 * entry[mode]['accuracy']:14.1f}{entry[mode]['tokens_per_forward']:9.2f}" for mode in modes)
    return f"{name:16s}{entry['items']:6d}" + "".join(cells)


def write_report(report: Report, folder: Path, device: str, seconds: float, training: Report | None = None) -> None:
    """Write eval.json, keeping the facts of the training run that an earlier report carries."""
    path = folder / "eval.json"
    if training is None and path.exists():
        training = json.loads(path.read_text(encoding="utf-8")).get("training")
    head: Report = {
        "model": folder.name,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": device,
        "seconds": round(seconds, 1),
        "tokens": sum(stage["tokens"] for stage in stages_of(training)),
        "training": training,
    }
    path.write_text(json.dumps(head | report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    """Evaluate a folder with the reference decoder."""
    import torch

    from worker.demo.reference_decoder import ReferenceDecoder

    parser = argparse.ArgumentParser(description="Evaluate a demo model on held-out items.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--items", type=int, default=200, help="most items a headline task; a quarter for the others")
    parser.add_argument("--mode", choices=sorted(MODES), help="one mode only; then eval.json is left alone")
    parser.add_argument("--tasks", help="comma-separated names; then eval.json is left alone")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_model(arguments.model)
    names = arguments.tasks.split(",") if arguments.tasks else list(TASKS)
    items = collect([TASKS[name] for name in names], arguments.items)
    modes = {arguments.mode: MODES[arguments.mode]} if arguments.mode else MODES
    started = time.monotonic()
    report = evaluate(ReferenceDecoder(model.to(device)).generate, tokenizer, items, modes)
    print(table(report))
    if not arguments.mode and not arguments.tasks:
        name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
        write_report(report, arguments.model, name, time.monotonic() - started)


if __name__ == "__main__":
    main()
