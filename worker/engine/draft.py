"""A draft of the output: which of its tokens stand for which positions, and how they are put to the test.

A block's part of the draft is tested in two forwards, before its strategy has its turn. In the first every second
position is masked while its neighbours show the draft; what the model then proposes itself, is kept. In the second the
others are masked, given what was kept. So no token is judged by a forward that sees it, and a block whose draft is
right costs two forwards. Pure rules over tokens: a request that moves to another worker goes on as it would have.
"""

from collections.abc import Mapping
from collections.abc import Sequence as ReadOnly

PHASES = 2
_TAIL = 3
"""Produced tokens by which the place in the draft is found again, once the output has left it."""


def place_in(draft: ReadOnly[int], produced: ReadOnly[int]) -> int:
    """Return the index of the draft's token for the next position.

    It is that position's own, unless what was produced last stands elsewhere in the draft: then the nearest place.
    """
    here = len(produced)
    tail = list(produced[-_TAIL:])
    if not tail or list(draft[max(here - len(tail), 0) : here]) == tail:
        return here
    found = [end for end in range(len(tail), len(draft) + 1) if list(draft[end - len(tail) : end]) == tail]
    return min(found, key=lambda end: (abs(end - here), end), default=here)


def drafted(draft: ReadOnly[int], produced: ReadOnly[int], count: int) -> list[int]:
    """Return the draft's tokens for the next `count` positions, fewer where it ends."""
    place = place_in(draft, produced)
    return list(draft[place : place + count])


def on_trial(tokens: Mapping[int, int], masked: ReadOnly[bool], start: int, phase: int) -> tuple[bool, ...]:
    """Return which positions of a block from `start` on a phase puts to the test: [block length]."""
    return tuple(
        is_masked and start + index in tokens and (start + index) % PHASES == phase
        for index, is_masked in enumerate(masked)
    )


def count_kept(draft: ReadOnly[int], produced: ReadOnly[int], first: int, end: int) -> int:
    """Return how many tokens of produced[first:end], one block, are what the draft had for them."""
    told = drafted(draft, produced[:first], end - first)
    return sum(token == other for token, other in zip(produced[first:end], told, strict=False))
