"""Block length by load: which one gives most tokens a second for as many requests as run together. Pure rules.

A longer block decides more tokens in a forward and runs more positions for it. Where the device has positions to spare
the longer one wins; where each costs its time, the one that wastes the fewest.
"""

from bisect import bisect_left
from collections.abc import Mapping
from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass
from typing import Self

from shared.commands import Generate
from worker.models.spec import Commit, ModelSpec

MARGIN = 0.15
"""By how much another length must be faster than the model's own to be taken. Prompts and what the host does for a
request are not in the rates and cost the same with any length: gains have been measured to be 0.12 less than told."""


@dataclass(frozen=True, slots=True)
class StepPrices:
    """What a step takes by its number of query positions: straight lines, each at least as steep as the one before.

    So it is in theory (first the weights' way to the arithmetic takes its time, then the arithmetic itself), and noise
    only adds: what lies above a line between two others tells nothing.
    """

    positions: tuple[int, ...]
    """Rising."""
    seconds: tuple[float, ...]

    @classmethod
    def of(cls, measured: ReadOnly[tuple[int, float]]) -> Self:
        """Build them from (positions, seconds): the lower hull, level where more positions took less.

        Raises ValueError without any.
        """
        best: dict[int, float] = {}
        for count, price in measured:
            best[count] = min(price, best.get(count, price))
        if not best:
            raise ValueError("no step was measured")
        cheapest = min(best.values())
        hull: list[tuple[int, float]] = []
        for count, price in sorted(best.items()):
            while hull and (hull[-1][1] > price or (len(hull) > 1 and _bulges(hull[-2], hull[-1], (count, price)))):
                hull.pop()
            hull.append((count, price))
        first = min(best)
        if hull[0][0] > first:
            hull.insert(0, (first, cheapest))
        return cls(tuple(count for count, _ in hull), tuple(price for _, price in hull))

    def of_step(self, count: float) -> float:
        """Return the seconds of a step of so many positions: level before the first, straight on beyond the last."""
        at = bisect_left(self.positions, count)
        if at == 0:
            return self.seconds[0]
        if len(self.positions) == 1:
            return self.seconds[0] * count / self.positions[0]
        at = min(at, len(self.positions) - 1)
        left, right = self.positions[at - 1], self.positions[at]
        slope = (self.seconds[at] - self.seconds[at - 1]) / (right - left)
        return self.seconds[at - 1] + slope * (count - left)


def _bulges(before: tuple[int, float], middle: tuple[int, float], after: tuple[int, float]) -> bool:
    """Tell whether the middle point lies on or above the line between the others."""
    to_middle = (middle[1] - before[1]) * (after[0] - before[0])
    return to_middle >= (after[1] - before[1]) * (middle[0] - before[0])


@dataclass(frozen=True, slots=True)
class LoadAware:
    """Chooses among a model's block lengths; called with the number of requests that run together."""

    own: int
    """The model's block length."""
    tokens_per_forward: Mapping[int, float]
    """By block length, `own` among them."""
    prices: Mapping[int, StepPrices]
    """By block length."""
    token_budget: int
    """Query positions of a step: of more rows than it holds some wait."""

    def rate(self, length: int, requests: int) -> float:
        """Return the tokens a second of so many requests, all with blocks of this length."""
        tokens = self.tokens_per_forward[length]
        # A finished block is run once more, beside the next one: each of its tokens is one position more.
        width = length + tokens
        rows = min(float(requests), max(1.0, self.token_budget / width))
        return rows * tokens / self.prices[length].of_step(rows * width)

    def __call__(self, requests: int) -> int:
        """Return the fastest length, the shorter one of equals; `own` unless that is slower by `MARGIN`."""
        return self.choose(requests, self.own)

    def choose(self, requests: int, usual: int) -> int:
        """The same with another length than `own` as the one to be taken unless it is slower by `MARGIN`."""
        best = max(sorted(self.tokens_per_forward), key=lambda length: self.rate(length, requests))
        return best if self.rate(best, requests) > (1 + MARGIN) * self.rate(usual, requests) else usual


class Steady:
    """Chooses as `LoadAware` does, but stays with its last choice unless that is slower by `MARGIN`.

    For devices on which each length takes a step of its own: what comes beside others had better have theirs. A request
    that is alone is chosen for anew.
    """

    def __init__(self, rule: LoadAware) -> None:
        self.rule = rule
        self._last = rule.own

    def __call__(self, requests: int) -> int:
        self._last = self.rule.choose(requests, self._last if requests > 1 else self.rule.own)
        return self._last


def can_choose(spec: ModelSpec) -> bool:
    """Tell whether requests of the model may have blocks of several lengths, and cost what `LoadAware` takes for it."""
    return spec.commit is Commit.FUSED and spec.block_length > 0 and not spec.fixed_block_length


def leaves_choice(request: Generate, spec: ModelSpec) -> bool:
    """Tell whether a request asks for nothing that block lengths were not compared on, or that depends on them."""
    fixed = request.block_length, request.template, request.draft, request.constraint, request.limits.max_nfe
    plain = not (request.embed or request.lora or request.cfg_scale > 0)
    return plain and all(field is None for field in fixed) and request.decoding in (None, spec.decoding)
