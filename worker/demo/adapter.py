"""A made-up adapter, to try adapters without training one: `python -m worker.demo.adapter FOLDER [--model demo]`.

Its weights are random, so that it makes answers worse the more it weighs, and visibly so.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from shared.adapters import CONFIG, WEIGHTS, Shape, tensor_names
from worker.adapters.targets import find_targets, shapes_of
from worker.models import ModelError, load_model
from worker.settings import WorkerSettings


def write_adapter(folder: Path, shapes: Mapping[str, Shape], rank: int, strength: float, seed: int) -> None:
    """Write an adapter of all those layers, as PEFT would.

    Its product is `strength` times as large as the weights of a layer as it is initialised. Raises OSError.
    """
    random = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, (outputs, inputs) in sorted(shapes.items()):
        down, up = tensor_names(name)
        tensors[down] = torch.randn(rank, inputs, generator=random) / inputs**0.5
        tensors[up] = torch.randn(outputs, rank, generator=random) * strength / rank**0.5
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted({name.rpartition(".")[2] for name in shapes}),
        "bias": "none",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n")
    save_file(tensors, folder / WEIGHTS)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m worker.demo.adapter", description=__doc__)
    parser.add_argument("folder", type=Path, help="Where to write it: a folder below the model store.")
    parser.add_argument("--model", default="demo", help="Name of a bundled model, or folder of a checkpoint.")
    parser.add_argument("--rank", type=int, default=4, choices=range(1, 513), metavar="1..512")
    parser.add_argument("--strength", type=float, default=0.3, help="How much it changes.")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    try:
        shapes = shapes_of(find_targets(load_model(WorkerSettings(model=given.model).folder)))
        write_adapter(given.folder, shapes, given.rank, given.strength, given.seed)
    except (ModelError, OSError) as error:
        parser.error(str(error))
    print(f"{given.folder}: an adapter of rank {given.rank} for {len(shapes)} layers of {given.model}")


if __name__ == "__main__":
    main()
