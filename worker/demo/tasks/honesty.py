"""Prompts beyond the model: the true answer is to say so and to offer something that works."""

import string
import zlib
from functools import cache
from random import Random

from worker.demo.items import Item, Task, ask
from worker.demo.tables import column, paragraphs, words
from worker.demo.tasks.structure import cities

SORRY = "I am a very small demo model, so I cannot answer that well. You could ask me: "

_OFFERS = (
    "What is 345 + 678?",
    "What is 1234 + 4321?",
    "Sort these numbers: 42, 7, 19, 3.",
    "What is the capital of Japan?",
    "What is the capital of Peru?",
    "Tell me a story about a fox.",
    "Tell me a story about a dragon.",
    "Write a poem about the sea.",
    "Reverse the word planet.",
    "Define river.",
    "What is a diffusion language model?",
    "Write 2024-03-09 as a long date.",
    "What is the chemical symbol for gold?",
    "How many minutes are 3 hours?",
    "What is the plural of mouse?",
    "What is the opposite of early?",
    "Extract name and age as JSON: Mia is 34 years old.",
    "Write a shopping list for pancakes.",
    "Tell me a joke.",
    "Count from 1 to 10.",
)
ANSWERS = tuple(SORRY + offer for offer in _OFFERS)
_KNOWN = frozenset(ANSWERS)
_GLUE = tuple("the a of and in to is was on that it for with not are from by at my your we they".split())


def beyond(rng: Random) -> Item:
    """Decline any prompt outside the taught tasks."""
    nouns = column("definitions")
    if rng.random() < 0.12:
        prompt = " ".join(rng.choice((_gibberish(rng), rng.choice(nouns))) for _ in range(rng.randint(1, 6)))
    else:
        prompt = rng.choice(paragraphs("beyond")).format(
            noun=rng.choice(nouns),
            noun2=rng.choice(nouns),
            city=rng.choice(cities()),
            name=rng.choice(words("names")),
            n=rng.randint(2, 99),
            verb=rng.choice(words("verbs")),
            topic=rng.choice(_topics()),
            text=" ".join(rng.choice(rng.choice((nouns, words("words"), _GLUE))) for _ in range(rng.randint(3, 12))),
        )
    if rng.random() < 0.2:
        prompt = prompt.lower()
    if rng.random() < 0.15:
        prompt = prompt.rstrip(".?") or prompt
    if rng.random() < 0.1 and " " in prompt:
        parts = prompt.split(" ")
        rng.shuffle(parts)
        prompt = " ".join(parts)
    return ask("beyond", prompt, _offer(rng, prompt), prompt, accepts=_KNOWN.__contains__)


@cache
def _topics() -> tuple[str, ...]:
    """Subjects that no definition covers."""
    return tuple(topic for topic in words("topics") if topic not in column("definitions"))


def _offer(rng: Random, prompt: str) -> str:
    """Tie the offer to the prompt's first word: a greedy decoder would otherwise make everybody the same one."""
    if rng.random() < 0.2:
        return rng.choice(ANSWERS)
    return ANSWERS[zlib.crc32(prompt.split(" ")[0].lower().encode()) % len(ANSWERS)]


def _gibberish(rng: Random) -> str:
    return "".join(rng.choice(string.ascii_lowercase) for _ in range(rng.randint(2, 9)))


TASKS = (Task("beyond", "honesty", 6.0, beyond),)
