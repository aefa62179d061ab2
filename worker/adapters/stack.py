"""Adapters of a batch side by side, so that one grouped product serves all of its tokens."""

from collections.abc import Sequence
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

import kernels
from kernels.attention import upload
from kernels.lora import Factors
from worker.adapters.weights import Adapter, ends_of, room_for
from worker.models.layers import Adapted, Linear, LowRank

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
        self._scales: list[float] = []
        self._ranks = torch.zeros(0, dtype=torch.int32, device=device)
        self._stacks: dict[Linear, Adapted] = {}
        self.built = 0

    def of(self, rows: Sequence[Uses], counts: Sequence[int]) -> LowRank | None:
        """Return the adapters of a ragged batch whose rows have `counts` tokens; None if no row has any that is here.

        A row whose adapter is gone belongs to a request that this worker has lost: nobody reads what it decides.
        """
        wanted = {digest for uses in rows for digest, _ in uses}
        if not wanted:
            if self._places and not self._residents.held():
                self._places, self._stacks = {}, {}
            return None
        if any(self._residents.get(digest) for digest in wanted - self._places.keys()):
            self._build(wanted)
        if not self._places:
            return None
        passes = [
            kernels.assign(*spread([self._use(uses, number) for uses in rows], counts, self._device), self._ranks)
            for number in range(max(map(len, rows)))
        ]
        return LowRank(self._stacks, tuple(passes))

    def _use(self, uses: Uses, number: int) -> tuple[int, float]:
        """Return place and scale of a row's adapter of that number; -1 if there is none, or it is gone."""
        place = self._places.get(uses[number][0], -1) if number < len(uses) else -1
        return place, uses[number][1] * self._scales[place] if place >= 0 else 0.0

    def _build(self, wanted: set[str]) -> None:
        # Those of requests that sit this step out stay: they would be stacked again in the next.
        names = sorted(wanted | (self._places.keys() & self._residents.held()))
        # One that is gone gets no place: it may come back while those beside it stay.
        found = {name: adapter for name in names if (adapter := self._residents.get(name)) is not None}
        adapters = list(found.values())
        # Memory may give out on the way, and half a stack would be taken for a whole one: until all is there, nothing
        # is. What was there goes first, for there is room for one of them.
        self._places, self._stacks = {}, {}
        stacks: dict[Linear, Adapted] = {}
        ranks = upload(torch.tensor([adapter.rank for adapter in adapters], dtype=torch.int32), self._device)
        for linear in dict.fromkeys(chain.from_iterable(adapter.factors for adapter in adapters)):
            dtype = next(adapter.factors[linear][0].dtype for adapter in adapters if linear in adapter.factors)
            rank = max(adapter.rank for adapter in adapters)
            stack = empty_factors(linear, len(adapters), rank, dtype)
            stacks[linear] = Adapted(stack)
            for place, adapter in enumerate(adapters):
                pair = adapter.factors.get(linear)
                if pair is not None:
                    put_factors(stack, place, pair)
        self._places = {name: place for place, name in enumerate(found)}
        self._scales = [adapter.factor for adapter in adapters]
        self._ranks, self._stacks = ranks, stacks
        self.built += 1


def empty_factors(linear: Linear, adapters: int, rank: int, dtype: torch.dtype) -> Factors:
    """Return zeros for so many adapters of a linear, with room for a rank at least."""
    (outputs, inputs), ends, device = linear.weight.shape, ends_of(linear), linear.weight.device
    rank = room_for(rank, device)
    return Factors(
        torch.zeros((adapters, len(ends) * rank, inputs), dtype=dtype, device=device),
        torch.zeros((adapters, outputs, rank), dtype=dtype, device=device),
        ends,
    )


def put_factors(stack: Factors, place: int, pair: tuple[Tensor, Tensor], first: int = 0) -> None:
    """Write an adapter's factors of a linear, as ranks `first` and following of a place."""
    a, b = pair
    rank, pieces = b.shape[1], len(stack.ends)
    stack.a[place].unflatten(0, (pieces, -1))[:, first : first + rank].copy_(a.unflatten(0, (pieces, rank)))
    stack.b[place, :, first : first + rank].copy_(b)


def spread(uses: Sequence[tuple[int, float]], counts: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return place [tokens] int64 and scale [tokens] float32 of rows with `counts` tokens."""
    repeats = torch.tensor(counts)
    places = torch.tensor([place for place, _ in uses]).repeat_interleave(repeats)
    scales = torch.tensor([scale for _, scale in uses], dtype=torch.float32).repeat_interleave(repeats)
    return upload(places, device), upload(scales, device)
