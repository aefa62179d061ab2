"""Adapters at fixed places in memory, where captured steps find them."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

import kernels
from kernels.lora import Factors
from worker.adapters.stack import Residents, Uses, empty_factors, put_factors, spread
from worker.adapters.weights import Adapter
from worker.models.layers import Adapted, Linear, LowRank


class AdapterBank:
    """So many places, each with room for one rank on every linear that takes adapters.

    The linears' weights move: each then lies above the factors a of all places, so that one product makes both.

    An adapter is copied to a place when a row that runs under it comes, in order with the steps launched before and
    after, and stays until another one needs the place. Several adapters of one row are one place, where their factors
    stand behind each other. For one thread.
    """

    def __init__(
        self,
        linears: Iterable[Linear],
        places: int,
        rank: int,
        residents: Residents,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.residents = residents
        self._device = device
        self._rank = rank
        self._held: OrderedDict[Uses, int] = OrderedDict()
        """Place by what is there, least recently used first; see `_content`."""
        self._free = list(range(places))
        self._scales = [0.0] * places
        self.ranks = torch.zeros(places, dtype=torch.int32, device=device)
        self.stacks = {
            linear: _join(linear, empty_factors(linear, places, rank, dtype)) for linear in dict.fromkeys(linears)
        }
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what the weights have left behind
        self.written = 0
        """Times that a place was filled."""

    @property
    def nbytes(self) -> int:
        """What it holds on the device beside the weights."""
        factors = [adapted.factors for adapted in self.stacks.values()]
        return sum(each.a.nbytes + each.b.nbytes for each in factors)

    @torch.inference_mode()
    def bring(self, rows: Iterable[Uses]) -> None:
        """Give the adapters of a batch's rows places, as far as there are any; those of other rows may lose theirs."""
        wanted = dict.fromkeys(_content(uses) for uses in rows if uses)
        for content in wanted:
            if content in self._held:
                self._held.move_to_end(content)
        for content in wanted:
            if content not in self._held:
                self._fill(content, wanted)

    def find(self, uses: Uses) -> tuple[int, float] | None:
        """Return place and scale of a row's adapters; None if they have no place."""
        place = self._held.get(_content(uses))
        if place is None:
            return None
        return place, self._scales[place] * (uses[0][1] if len(uses) == 1 else 1.0)

    def of(self, rows: Sequence[Uses], counts: Sequence[int]) -> LowRank | None:
        """Return the adapters of a ragged batch whose rows have `counts` tokens; None unless all have their places."""
        found = [self.find(uses) if uses else (-1, 0.0) for uses in rows]
        placed = [each for each in found if each is not None]
        if len(placed) < len(rows):
            return None
        return LowRank(self.stacks, (kernels.assign(*spread(placed, counts, self._device), self.ranks),))

    @contextmanager
    def stand_in(self) -> Iterator[Uses]:
        """Let a free place, of zeros, count as an adapter's meanwhile: rows that run under it take what rows under
        adapters take."""
        uses: Uses = (("", 1.0),)
        place = self._held[uses] = self._free[-1]
        self.ranks[place].fill_(self._rank)
        try:
            yield uses
        finally:
            del self._held[uses]
            self.ranks[place].fill_(0)

    def _fill(self, content: Uses, wanted: dict[Uses, None]) -> None:
        adapters = [self.residents.get(digest) for digest, _ in content]
        rank = sum(adapter.rank for adapter in adapters if adapter is not None)
        # One that is gone belongs to a request that this worker has lost.
        if None in adapters or rank > self._rank:
            return
        if not self._free:
            idle = next((held for held in self._held if held not in wanted), None)
            if idle is None:
                return
            self._free.append(self._held.pop(idle))
        place = self._free[-1]
        self._write(place, rank, content, [adapter for adapter in adapters if adapter is not None])
        # Not before, for memory may give out on the way: then the place is free, whatever was written there.
        self._held[content] = self._free.pop()
        self.written += 1

    def _write(self, place: int, rank: int, content: Uses, adapters: list[Adapter]) -> None:
        single = len(adapters) == 1
        self._scales[place] = adapters[0].factor if single else 1.0
        self.ranks[place].fill_(rank)
        for linear, adapted in self.stacks.items():
            stack = adapted.factors
            # What lies behind an adapter's rank, or in a linear that it leaves alone, must add nothing.
            stack.b[place].zero_()
            first = 0
            for (_, scale), adapter in zip(content, adapters, strict=True):
                pair = adapter.factors.get(linear)
                if pair is not None:
                    a, b = pair
                    put_factors(stack, place, (a, b if single else b * (scale * adapter.factor)), first)
                first += adapter.rank


def _join(linear: Linear, factors: Factors) -> Adapted:
    """Let a linear's weight lie above factors a of zeros; one of 8 bits stays where it is."""
    if linear.scale is not None:
        return Adapted(factors)
    outputs, low = linear.weight.shape[0], factors.a.flatten(0, 1)
    weight = torch.cat((linear.weight.detach(), low))
    linear.weight = nn.Parameter(weight[:outputs], requires_grad=False)
    bias = None
    if linear.bias is not None:
        bias = torch.cat((linear.bias.detach(), low.new_zeros(len(low))))
    return Adapted(replace(factors, a=weight[outputs:].view(factors.a.shape)), weight, bias)


def _content(uses: Uses) -> Uses:
    """Return what a place holds for a row: one adapter whatever its scale, or several summed as they are scaled."""
    return ((uses[0][0], 1.0),) if len(uses) == 1 else uses
