"""The unit of the demo model's data: one exchange whose answer can be checked."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

Role = Literal["system", "user", "assistant", "tool"]
Turn = tuple[Role, str]
Checker = Callable[[str], bool]

HOLDOUT = 50  # one item of fifty never enters training


@dataclass(frozen=True, slots=True)
class Item:
    """One exchange: the turns of the prompt, the answer wanted, and what else would be right."""

    task: str
    turns: tuple[Turn, ...]
    answer: str
    accepts: Checker
    key: str | None  # what the held-out rule hashes; None is always training material
    letters: bool = False  # the answer is written one character a token


@dataclass(frozen=True, slots=True)
class Task:
    """A named generator with its share of the mix and the headline group it is reported under."""

    name: str
    group: str
    weight: float
    draw: Callable[[Random], Item]
    plain: bool = False  # the answer survives a style instruction such as "in capital letters"


def exact(answer: str) -> Checker:
    """Accept one text only."""
    return lambda text: text == answer


def one_of(answers: Sequence[str]) -> Checker:
    """Accept any of several texts."""
    known = frozenset(answers)
    return lambda text: text in known


def ask(
    task: str,
    prompt: str,
    answer: str,
    key: str | None,
    *,
    accepts: Checker | None = None,
    system: str | None = None,
    letters: bool = False,
) -> Item:
    """Build the common item: one user turn, perhaps under a system turn."""
    turns: tuple[Turn, ...] = (("user", prompt),)
    if system is not None:
        turns = (("system", system), *turns)
    return Item(task, turns, answer, accepts or exact(answer), key, letters)


def is_held_out(item: Item) -> bool:
    """Say whether an item belongs to the evaluation: a stable hash, the same in every process and version."""
    if item.key is None:
        return False
    digest = hashlib.blake2b(f"{item.task}:{item.key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HOLDOUT == 0


_TYPOS = {"what": "waht", "the": "teh", "please": "pls", "you": "u", "which": "wich", "with": "wiht", "number": "numer"}


def phrase(rng: Random, templates: Sequence[str], **slots: object) -> tuple[str, int]:
    """Fill one of the templates and return the text with the template's index.

    Some texts come out as people type them: lower case first letter, no final punctuation, a typo in a function word.
    Only the template's own words change, never what is filled in.
    """
    index = rng.randrange(len(templates))
    template = templates[index]
    if rng.random() < 0.2:
        template = template[0].lower() + template[1:]
    if rng.random() < 0.2 and template[-1] in ".?!":
        template = template[:-1]
    if rng.random() < 0.06:
        template = " ".join(_TYPOS.get(word, word) for word in template.split(" "))
    return template.format(**slots), index
