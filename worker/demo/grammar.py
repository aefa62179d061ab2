"""Small text grammars that can both write a text and recognise every text they could have written.

A template is plain text with ``[one|two|three]`` for a free choice (nested at will, an empty branch is fine) and
``{slot}`` for a word bound once: every later mention of the slot must repeat it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

Choices = Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class Slot:
    name: str


@dataclass(frozen=True, slots=True)
class Choice:
    branches: tuple["Run", ...]


@dataclass(frozen=True, slots=True)
class Run:
    parts: tuple["str | Slot | Choice", ...]


class Grammar:
    """A parsed template."""

    def __init__(self, template: str) -> None:
        tokens = re.findall(r"\{\w+\}|[\[\]|]|[^\[\]|{}]+", template)
        self._root, end = _parse(tokens, 0, nested=False)
        if end != len(tokens):
            raise ValueError(f"unbalanced brackets in template: {template[:60]!r}")

    def write(self, rng: Random, slots: Mapping[str, str]) -> str:
        """Choose every branch at random and fill the slots."""
        return _write(self._root, rng, slots)

    def pattern(self, choices: Choices) -> re.Pattern[str]:
        """Compile the set of texts this grammar can write, with a named group for each slot.

        Slots absent from ``choices`` may be any short run of text on one line.
        """
        return re.compile(_pattern(self._root, choices, set()))

    def slots(self) -> set[str]:
        """Name the slots the template mentions."""
        return set(_slots(self._root))


def _parse(tokens: list[str], at: int, nested: bool) -> tuple[Run, int]:
    """Parse until the end of input, or until the ``|`` or ``]`` that ends a branch."""
    parts: list[str | Slot | Choice] = []
    while at < len(tokens):
        token = tokens[at]
        if token == "[":
            branches: list[Run] = []
            while tokens[at] != "]":
                branch, at = _parse(tokens, at + 1, nested=True)
                branches.append(branch)
            parts.append(Choice(tuple(branches)))
        elif token in "|]":
            if not nested:
                raise ValueError("a branch mark outside brackets")
            return Run(tuple(parts)), at
        elif token[0] == "{":
            parts.append(Slot(token[1:-1]))
        else:
            parts.append(token)
        at += 1
    return Run(tuple(parts)), at


def _write(node: Run, rng: Random, slots: Mapping[str, str]) -> str:
    out: list[str] = []
    for part in node.parts:
        if isinstance(part, Slot):
            out.append(slots[part.name])
        elif isinstance(part, Choice):
            out.append(_write(rng.choice(part.branches), rng, slots))
        else:
            out.append(part)
    return "".join(out)


def _pattern(node: Run, choices: Choices, bound: set[str]) -> str:
    out: list[str] = []
    for part in node.parts:
        if isinstance(part, Slot):
            if part.name in bound:
                out.append(f"(?P={part.name})")
                continue
            known = choices.get(part.name)
            if known and len(known) == 1:
                out.append(re.escape(known[0]))
                continue
            # A slot first bound inside one branch would be unbound in the others: templates bind such slots earlier.
            bound.add(part.name)
            body = "|".join(map(re.escape, sorted(known, key=len, reverse=True))) if known else r"[^\n]{1,60}?"
            out.append(f"(?P<{part.name}>{body})")
        elif isinstance(part, Choice):
            out.append("(?:" + "|".join(_pattern(branch, choices, bound) for branch in part.branches) + ")")
        else:
            out.append(re.escape(part))
    return "".join(out)


def _slots(node: Run) -> list[str]:
    names: list[str] = []
    for part in node.parts:
        if isinstance(part, Slot):
            names.append(part.name)
        elif isinstance(part, Choice):
            for branch in part.branches:
                names.extend(_slots(branch))
    return names
