"""Models that are shared by several processes of this machine."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from worker.device import Placement
from worker.models import LoadedModel
from worker.parallel.leader import Leader
from worker.parallel.messages import Start

CPU = Placement(torch.device("cpu"), torch.float32, 1)


@dataclass(frozen=True)
class SilentPeers:
    """The other ranks, if they took no time and had nothing to say."""

    rank: int
    size: int

    def sum(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> Tensor:
        return x[None].repeat(self.size, *[1] * x.dim())


@contextmanager
def shared_model(
    folder: Path, size: int = 2, placement: Placement = CPU, weights: str = "stored"
) -> Iterator[LoadedModel]:
    """Lead `size` - 1 other processes, each with its share of the folder's model."""
    start = Start(
        rank=0,
        size=size,
        meeting="",
        folder=str(folder),
        device=placement.device.type,
        dtype=str(placement.dtype).removeprefix("torch."),
        threads=placement.threads,
        weights=weights,
        head="stored",
        log_level="warning",
        log_format="text",
    )
    leader = Leader(start)
    try:
        yield leader.load(folder, placement)
        leader.close(clean=True)
    finally:
        leader.close()


def copy_with_config(source: Path, folder: Path, **changes: Any) -> Path:
    """Return `folder` with links to the files of a checkpoint, and its config.json changed."""
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.name != "config.json":
            (folder / path.name).symlink_to(path)
    config = json.loads((source / "config.json").read_bytes()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder
