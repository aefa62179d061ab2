"""What the tokens of some positions are drawn with, beside their logits."""

from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
from torch import Tensor

from kernels.attention import upload
from kernels.token_stats import Filters, Noise

Group = TypeVar("Group", Filters, Noise)


@dataclass(frozen=True, slots=True)
class Draws:
    """Arguments of `kernels.token_stats` for n positions, which says what they do; None is what most need.

    They are made on the host, where other ranks are told of them and a rank finds its own share, and go to the device
    once.
    """

    temperature: Tensor | None = None
    """[n] float32"""
    forbidden: tuple[Tensor, Tensor] | None = None
    """Rows [m] int64 and ids [m] int64."""
    filters: Filters | None = None
    noise: Noise | None = None
    ranking: Tensor | None = None
    """[n] float32"""

    def within(self, first: int, end: int) -> "Draws":
        """Return those of ids [first, end), counted from `first`. What is forbidden must lie on the host.

        On a device this would wait for the number of those that are left.
        """
        if self.forbidden is None:
            return self
        rows, ids = self.forbidden
        inside = (ids >= first) & (ids < end)
        return replace(self, forbidden=(rows[inside], ids[inside] - first))

    def on(self, device: torch.device) -> "Draws":
        """Return them on a device, without waiting for it; what lies there stays."""
        forbidden = None
        if self.forbidden is not None:
            rows, ids = self.forbidden
            forbidden = _there(rows, device), _there(ids, device)
        return Draws(
            temperature=_sent(self.temperature, device),
            forbidden=forbidden,
            filters=None if self.filters is None else _all_there(self.filters, device),
            noise=None if self.noise is None else _all_there(self.noise, device),
            ranking=_sent(self.ranking, device),
        )


def _there(values: Tensor, device: torch.device) -> Tensor:
    return values if values.device.type == device.type else upload(values, device)


def _sent(values: Tensor | None, device: torch.device) -> Tensor | None:
    return None if values is None else _there(values, device)


def _all_there(group: Group, device: torch.device) -> Group:
    held: dict[str, Tensor | None] = {column.name: getattr(group, column.name) for column in fields(group)}
    return replace(group, **{name: _there(values, device) for name, values in held.items() if values is not None})
