"""python -m tests.bench.gpu.random_worker SHAPE BLOCK STEPS [flags of a worker]: a worker whose weights are random."""

import sys
from pathlib import Path
from typing import Any

import torch

import worker.assembly
from tests.bench.gpu.shapes import SHAPES, random_model
from worker.models import LoadedModel


def use_random_weights(name: str, block: int, steps: int) -> None:
    """Let this process load random weights of a shape instead of a checkpoint's."""
    from tests.bench.gpu.serving import served

    def load(folder: Path, *, device: torch.device, dtype: torch.dtype, **_: Any) -> LoadedModel:
        shape = SHAPES[name]
        with torch.inference_mode():
            return served(shape, random_model(shape, device), block, steps)

    worker.assembly.load_model = load


def flags(folder: Path, rows: int, budget: int) -> list[str]:
    """Return the flags of a worker that shares its GPU with another engine."""
    return [
        "--model", str(folder), "--model-name", "random", "--max-rows", str(rows), "--token-budget", str(budget),
        "--page-size", "32", "--kv-cache-mb", "18000", "--step-ahead", "on",
    ]  # fmt: skip


if __name__ == "__main__":
    from worker.process import main

    use_random_weights(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    sys.exit(main(sys.argv[4:]))
