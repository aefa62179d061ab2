"""Which linear layers of a model may have adapters, and under which names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from torch import nn

from shared.adapters import Shape
from worker.models import LoadedModel
from worker.models.layers import Linear


@dataclass(frozen=True, slots=True)
class Target:
    linear: Linear
    first: int
    end: int
    """Rows [first, end) of the linear's weight, which several projections may share."""
    of_text: bool = False
    """One of `Linear.text_pieces`."""


def find_targets(model: LoadedModel) -> dict[str, Target]:
    """Return the projections by the names of their modules in the checkpoint."""
    return {
        name: Target(module, first, end, of_text)
        for module in cast(nn.Module, model.module).modules()
        if isinstance(module, Linear)
        for of_text, pieces in ((False, module.pieces), (True, module.text_pieces))
        for name, (first, end) in pieces.items()
    }


def shapes_of(targets: Mapping[str, Target]) -> dict[str, Shape]:
    """Return (outputs, inputs) of each: what a model's card says."""
    return {name: (target.end - target.first, target.linear.weight.shape[1]) for name, target in targets.items()}
