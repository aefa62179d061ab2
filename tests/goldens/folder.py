"""Golden data on disk: where it is, and what a family's folder holds."""

import json
import os
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from kernels.fp8 import FP8
from worker.models import LoadedModel, load_checkpoint
from worker.models.checkpoint import read_checkpoint

DATA = Path(__file__).parent / "data"
DEVICE = os.environ.get("DIFFLEET_DEVICE", "cpu")
DTYPE = {"float32": torch.float32, "bfloat16": torch.bfloat16}[os.environ.get("DIFFLEET_DTYPE", "float32")]
SMALL_KV = os.environ.get("DIFFLEET_KV_DTYPE") == "fp8"
"""Keys and values in pages of 8 bits."""
AHEAD = os.environ.get("DIFFLEET_STEP_AHEAD") == "on"
"""Let the device lead the rows of the families that allow it."""
Entry = dict[str, Any]


@dataclass(frozen=True, slots=True)
class GoldenFolder:
    """One family's checkpoint with the outputs of its reference; the format is the README's beside the data."""

    path: Path
    family: str
    forward: tuple[Entry, ...]
    generate: tuple[Entry, ...]
    special: dict[str, int]
    """Ids of special tokens by name."""

    @property
    def name(self) -> str:
        return self.path.name

    def arrays(self) -> dict[str, Tensor]:
        return _arrays(self.path)

    def model(self, dtype: torch.dtype = DTYPE) -> LoadedModel:
        return _model(self.path, dtype)


@cache
def _arrays(path: Path) -> dict[str, Tensor]:
    return load_file(path / "golden.safetensors")


@cache
def _model(path: Path, dtype: torch.dtype) -> LoadedModel:
    # What is exact is computed where every operation has float64.
    return load_golden(path, dtype, "cpu" if dtype == torch.float64 else DEVICE)


def load_golden(path: Path, dtype: torch.dtype, device: torch.device | str) -> LoadedModel:
    """Load a golden checkpoint, with the ids that its config files lack."""
    checkpoint = read_checkpoint(path)
    special = json.loads((path / "golden.json").read_bytes()).get("special_tokens", {})
    # A family whose loop takes the mask as an argument has it in no config file, and its own id is beyond this size.
    config = {"mask_token_id": special.get("mask"), **checkpoint.config}
    model = load_checkpoint(replace(checkpoint, config=config), device=device, dtype=dtype)
    return replace(model, kv_dtype=FP8) if SMALL_KV else model


def find_folders() -> list[GoldenFolder]:
    """Return the folders of DIFFLEET_GOLDENS, or of the data in the repository."""
    root = Path(os.environ.get("DIFFLEET_GOLDENS") or DATA)
    paths = sorted(path.parent for path in (*root.glob("golden.json"), *root.glob("*/golden.json")))
    if not paths:
        raise FileNotFoundError(f"no golden.json in {root} or a folder of it")
    return [_read(path) for path in paths]


def _read(path: Path) -> GoldenFolder:
    content = json.loads((path / "golden.json").read_bytes())
    return GoldenFolder(
        path,
        content.get("family", path.name),
        tuple(content.get("forward", ())),
        tuple(content.get("generate", ())),
        content.get("special_tokens", {}),
    )
