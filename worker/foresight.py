"""What the next step of rows on the device will need, told before the step under way has been read.

The host launches a step when it knows what the rows were before the last one. Most rules accept a number of positions
that follows from that; of the others the mean so far is taken. A wrong guess costs some rows a step, never a token.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass
from math import ceil, sqrt

from kernels.canvas import Field, Rule

WHOLE = 256
"""Positions up to which a step does all of its last layer and its head: less would not be faster, for their weights are
read anyway."""

_EXACT = (Rule.STATIC, Rule.SEQUENTIAL)


@dataclass(frozen=True, slots=True)
class Offer:
    """Of which sizes steps are captured, as shares of what all rows could need."""

    slots: tuple[float, ...] = (0, 1 / 8, 1 / 4, 1 / 2, 1)
    room: tuple[float, ...] = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)
    """There is always one with room for all."""
    whole: int = WHOLE
    """Positions up to which all get room."""

    def slots_of(self, rows: int) -> list[int]:
        return sorted({ceil(share * rows) for share in self.slots})

    def room_of(self, rows: int, block: int) -> list[int]:
        most = rows * block
        return [most] if most <= self.whole else sorted({most, *(ceil(share * most) for share in self.room)})


NO_SLOTS = Offer(slots=(0,))
"""For models that commit nothing."""


@dataclass(frozen=True, slots=True)
class Need:
    """What the rows of a step are expected to ask for."""

    waiting: float
    """Finished blocks to write."""
    masked: float
    """Masked positions of all rows."""
    variance: float
    """Of `masked`."""
    seen: float = 0.0
    """Positions that all rows see before their blocks."""

    def room(self, slots: int, block: int) -> int:
        """Return for how many masked positions there should be room, if there are so many slots."""
        # Rows that find no slot decide nothing.
        alone = max(0.0, self.waiting - slots) * block
        return max(1, ceil(self.masked - alone + sqrt(self.variance)))


def foresee(
    under_way: Iterable[ReadOnly[int]],
    fresh: Iterable[ReadOnly[int]],
    block: int,
    slots: int,
    room: int,
    pace: float,
) -> Need:
    """Return what rows will need behind a step of so many slots and so much room.

    `under_way` are the states before that step of rows that are in it, in order of their places; `fresh` are those of
    rows that were put there behind it. `pace` is how many positions a row accepts in a step.
    """
    waiting = masked = variance = seen = 0.0
    taken = used = 0
    for state in fresh:
        waiting += state[Field.COMMIT]
        masked += state[Field.MISSING]
        seen += state[Field.START]
    for state in under_way:
        if not state[Field.LIVE]:
            continue
        missing = state[Field.MISSING]
        seen += state[Field.START]
        if state[Field.COMMIT]:
            taken += 1
            if taken > slots:
                masked += missing
                continue
        used += missing
        if used > room:
            masked += missing
            continue
        accepts, ends = _acceptance(state, block, missing, pace)
        following = max(0, min(block, state[Field.LIMIT] - state[Field.START] - block))
        masked += ends * following + (1 - ends) * (missing - accepts)
        if following:
            waiting += ends
            variance += ends * (1 - ends) * following**2
    return Need(waiting, masked, variance, seen)


def _acceptance(state: ReadOnly[int], block: int, missing: int, pace: float) -> tuple[float, float]:
    """Return how many positions a row will accept, and how likely it is that none is left masked."""
    steps = state[Field.STEPS] or block
    count = max(1, block // steps + (state[Field.STEP] < block % steps))
    if state[Field.RULE] in _EXACT:
        return min(count, missing), float(count >= missing)
    least = count if state[Field.RULE] in (Rule.DYNAMIC, Rule.DYNAMIC_LEFTMOST) else 1
    if least >= missing:
        return missing, 1.0
    expected = max(pace, least)
    # About even where as many are missing as a row accepts; sure at half of that, out of the question at half more.
    return min(expected, missing), min(1.0, max(0.0, 1.5 - missing / expected))


@dataclass(frozen=True, slots=True)
class Prices:
    """What a step of some number of rows takes, ms; nothing where it was not measured."""

    layers: Mapping[int, float]
    """By slots."""
    head: Mapping[int, float]
    """By room."""
    keys: float = 0.0
    """For each position that a row sees before its block."""

    def slots(self, rows: int, waiting: float, seen: float = 0.0) -> int:
        """Return how many slots are worth their time: each saves a row a step that decides nothing, but reads all that
        the row sees. The rows see `seen` positions together."""
        if not self.layers:
            raise ValueError("no prices")
        alone = self.layers[min(self.layers)]
        saved = (alone + min(self.head.values()) + self.keys * seen) / rows
        return max(sorted(self.layers), key=lambda slots: min(slots, waiting) * saved - self.layers[slots])


def at_least(sizes: ReadOnly[int], needed: float) -> int:
    """Return the smallest of the sizes [ascending] that holds what is needed; the largest if none does."""
    return next((size for size in sizes if size >= needed), sizes[-1])
