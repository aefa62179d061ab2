"""What the last bit of float32 decides: arithmetic in another order may differ from a reference's by that much."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from tests.goldens.folder import GoldenFolder, load_golden
from tests.goldens.passes import Pass, run_pass
from worker.models import LoadedModel

DRAWS = 16


@dataclass(frozen=True, slots=True)
class NudgedFolder(GoldenFolder):
    """A folder whose model lies on the host, each weight of it moved by at most half of its last bit."""

    seed: int = 0

    def model(self, dtype: torch.dtype = torch.float32) -> LoadedModel:
        return _nudged(self.path, self.seed)


def nudge(folder: GoldenFolder, seed: int) -> NudgedFolder:
    return NudgedFolder(folder.path, folder.family, folder.forward, folder.generate, folder.special, seed)


def spread(folder: GoldenFolder, wanted: Pass, draws: int = DRAWS) -> float:
    """Return how far from the exact logits a pass comes where the weights' last bits are other ones."""
    exact = run_pass(folder.model(torch.float64), wanted)
    models = [_nudged(folder.path, seed) for seed in range(draws)]
    return max((run_pass(model, wanted) - exact).abs().max().item() for model in models)


@cache
def _nudged(path: Path, seed: int) -> LoadedModel:
    model = load_golden(path, torch.float32, "cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.module.parameters():  # pyright: ignore
            weight *= 1 + (torch.rand(weight.shape, generator=generator) - 0.5) * 2**-23
    return model
