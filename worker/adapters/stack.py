"""Adapters of a batch side by side, so that one grouped product serves all of its tokens."""

from collections.abc import Sequence
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from worker.adapters.weights import Adapter
from worker.models.layers import Linear, LowRank

Uses = tuple[tuple[str, float], ...]
"""(digest, scale) of a row's adapters."""


class Residents(Protocol):
    """What the stack needs of `AdapterStore`."""

    def get(self, digest: str) -> Adapter | None: ...

    def held(self) -> set[str]: ...


class AdapterStack:
    """Keeps the adapters of the batches at hand stacked; they are stacked anew only when another one joins.

    For one thread.
    """

    def __init__(self, residents: Residents, device: torch.device) -> None:
        self._residents = residents
        self._device = device
        self._places: dict[str, int] = {}
        self._factors: list[float] = []
        self._stacks: dict[Linear, tuple[Tensor, Tensor]] = {}
        self.built = 0

    def of(self, rows: Sequence[Uses], counts: Sequence[int]) -> LowRank | None:
        """Return the adapters of a ragged batch whose rows have `counts` tokens; None if no row has any."""
        wanted = {digest for uses in rows for digest, _ in uses}
        if not wanted:
            if self._places and not self._residents.held():
                self._places, self._stacks = {}, {}
            return None
        if not wanted <= self._places.keys():
            self._build(wanted)
        passes: list[tuple[Tensor, Tensor]] = []
        for number in range(max(map(len, rows))):
            picked = [uses[number] if number < len(uses) else None for uses in rows]
            places = [-1 if use is None else self._places[use[0]] for use in picked]
            scales = [
                0.0 if use is None else use[1] * self._factors[place] for use, place in zip(picked, places, strict=True)
            ]
            passes.append((self._spread(places, counts, torch.int64), self._spread(scales, counts, torch.float32)))
        return LowRank(self._stacks, tuple(passes))

    def _spread(self, values: Sequence[float], counts: Sequence[int], dtype: torch.dtype) -> Tensor:
        flat = list(chain.from_iterable([value] * count for value, count in zip(values, counts, strict=True)))
        return torch.tensor(flat, dtype=dtype, device=self._device)

    def _build(self, wanted: set[str]) -> None:
        # Those of requests that sit this step out stay: they would be stacked again in the next.
        names = sorted(wanted | (self._places.keys() & self._residents.held()))
        # A row whose adapter is gone belongs to a request that this worker has lost: nobody reads what it decides.
        found = [(name, self._residents.get(name) or Adapter(0.0, {})) for name in names]
        self._places = {name: place for place, (name, _) in enumerate(found)}
        adapters = [adapter for _, adapter in found]
        self._factors = [adapter.factor for adapter in adapters]
        self._stacks = {}
        for linear in dict.fromkeys(chain.from_iterable(adapter.factors for adapter in adapters)):
            pairs = [adapter.factors.get(linear) for adapter in adapters]
            rank = max(pair[0].shape[0] for pair in pairs if pair is not None)
            outputs, inputs = linear.weight.shape
            weight = next(pair[0] for pair in pairs if pair is not None)
            a, b = weight.new_zeros((len(pairs), rank, inputs)), weight.new_zeros((len(pairs), outputs, rank))
            for place, pair in enumerate(pairs):
                if pair is not None:
                    a[place, : pair[0].shape[0]] = pair[0]
                    b[place, :, : pair[1].shape[1]] = pair[1]
            self._stacks[linear] = a, b
        self.built += 1
