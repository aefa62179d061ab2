"""python -m tests.bench.gpu.random_worker SHAPE BLOCK STEPS real|emulated FILE [flags of a worker]: random weights.

It writes what its steps did to a file; `emulated` ones take an H100's time on any machine.
"""

import sys
from pathlib import Path
from typing import Any

import torch

import worker.assembly
from tests.bench.gpu.shapes import SHAPES, random_model
from worker.models import LoadedModel


def use_random_weights(name: str, block: str, steps: str, card: str) -> None:
    """Let this process load random weights of a shape instead of a checkpoint's."""
    from tests.bench.gpu.serving import served

    shape = SHAPES[name]

    def load(folder: Path, *, device: torch.device, dtype: torch.dtype, **_: Any) -> LoadedModel:
        with torch.inference_mode():
            return served(shape, random_model(shape, device), int(block), int(steps))

    worker.assembly.load_model = load
    if card == "emulated":
        from tests.bench.gpu.emulated import use_emulated_card

        use_emulated_card()


def flags(folder: Path, rows: int, budget: int) -> list[str]:
    """Return the flags of a worker that shares its GPU with another engine."""
    return [
        "--model", str(folder), "--model-name", "random", "--max-rows", str(rows), "--token-budget", str(budget),
        "--page-size", "32", "--kv-cache-mb", "18000", "--step-ahead", "on",
    ]  # fmt: skip


if __name__ == "__main__":
    from tests.bench.gpu.timeline import record
    from worker.process import main

    use_random_weights(*sys.argv[1:5])
    record(Path(sys.argv[5]))
    sys.exit(main(sys.argv[6:]))
