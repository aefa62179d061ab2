"""Canvases with text that stands and holes that are filled: where the holes are, and what was put into them.

A hole is a run of `HOLE` in a template of token ids. A stop token within a hole ends its text there; what stands behind
it, up to the hole's end, is filler.
"""

from collections.abc import Collection, Sequence
from itertools import groupby

HOLE = -1


def spans(template: Sequence[int]) -> list[tuple[int, int]]:
    """Return [start, end) of each hole, in order."""
    found: list[tuple[int, int]] = []
    position = 0
    for is_hole, run in groupby(template, key=lambda token: token == HOLE):
        end = position + len(list(run))
        if is_hole:
            found.append((position, end))
        position = end
    return found


def filling(tokens: Sequence[int], span: tuple[int, int], stops: Collection[int]) -> list[int]:
    """Return what stands in a hole of a filled template, up to its first stop token."""
    start, end = span
    text = tokens[start:end]
    return list(text[: next((index for index, token in enumerate(text) if token in stops), len(text))])


def count_filled(template: Sequence[int], tokens: Sequence[int], stops: Collection[int]) -> int:
    """Return how many tokens of the holes are text; `tokens` may be shorter than the template."""
    return sum(len(filling(tokens, span, stops)) for span in spans(template))
