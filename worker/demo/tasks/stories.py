"""Free texts from grammars: stories, letters, poems, lists. The grammar that writes a text also recognises it."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from random import Random

from worker.demo.grammar import Grammar
from worker.demo.items import Checker, Item, Task, ask, phrase
from worker.demo.tables import paragraphs, rows, words
from worker.demo.tasks.structure import cities

_PRONOUNS = {"he": ("his", "him"), "she": ("her", "her")}


@cache
def _props(slot: str) -> tuple[str, ...]:
    return tuple(next(values for name, values in rows("props") if name == slot).split(" | "))


@cache
def _heroes() -> dict[str, tuple[str, tuple[str, ...]]]:
    return {kind: (pronoun, tuple(names.split())) for kind, pronoun, names in rows("heroes")}


@cache
def _plots() -> tuple[tuple[str, Grammar], ...]:
    """Each plot with every ending spelled out as one choice at the end."""
    ends = f"[{'|'.join(_props('end'))}]"
    plots = []
    for text in paragraphs("plots"):
        title, body = text.split("\n", 1)
        plots.append((title, Grammar(body.replace("{end}", ends + "{moral}"))))
    return tuple(plots)


@cache
def _patterns() -> tuple[re.Pattern[str], ...]:
    names = sorted({name for _, known in _heroes().values() for name in known})
    choices: dict[str, Sequence[str]] = {
        "name": names,
        "name2": names,
        "kind": list(_heroes()),
        "kind2": list(_heroes()),
        "moral": ["", *(f" Moral: {moral.capitalize()}." for moral in _props("moral"))],
    }
    choices |= {slot: _props(slot) for slot in ("thing", "place", "spot", "adj", "open")}
    choices["a_kind2"] = [_an(kind) for kind in _heroes()]
    choices["A_kind2"] = [_an(kind).capitalize() for kind in _heroes()]
    for suffix in ("", "2"):
        choices |= {f"he{suffix}": ["he", "she"], f"He{suffix}": ["He", "She"]}
        choices |= {f"his{suffix}": ["his", "her"], f"him{suffix}": ["him", "her"]}
    return tuple(grammar.pattern(choices) for _, grammar in _plots())


def _bind(suffix: str, kind: str, name: str) -> dict[str, str]:
    pronoun = _heroes()[kind][0]
    his, him = _PRONOUNS[pronoun]
    values = {
        "name": name,
        "kind": kind,
        "a_kind": _an(kind),
        "A_kind": _an(kind).capitalize(),
        "he": pronoun,
        "He": pronoun.capitalize(),
        "his": his,
        "him": him,
    }
    return {key + suffix: value for key, value in values.items()}


def is_consistent(text: str, wanted: Mapping[str, str]) -> bool:
    """Say whether some plot could have written the text with one hero throughout and everything asked for in it."""
    for pattern in _patterns():
        match = pattern.fullmatch(text)
        if match is None:
            continue
        found = {key: value for key, value in match.groupdict().items() if value is not None}
        friend = found.get("a_kind2") or found.get("A_kind2") or f"a {found['kind2']}"
        found["kind2"] = friend.split(" ", 1)[1]
        if any(found.get(key) != value for key, value in wanted.items()):
            return False
        for suffix in ("", "2"):
            known = _bind(suffix, found[f"kind{suffix}"], found[f"name{suffix}"])
            if any(found.get(key, value) != value for key, value in known.items()):
                return False
        return found["name"] != found["name2"]
    return False


_VERBS = (
    "Tell me a story",
    "Write a story",
    "Write a short story",
    "Tell a story",
    "Can you tell me a story",
    "Make up a story",
)
_ABOUTS: tuple[tuple[tuple[str, ...], str], ...] = (
    ((), ""),
    (("kind",), " about {kind}"),
    (("kind",), " with {kind} in it"),
    (("kind", "name"), " about {kind} named {name}"),
    (("kind", "name"), " about {kind} called {name}"),
    (("kind", "name", "thing"), " about {kind} named {name} and a {thing}"),
    (("kind", "thing"), " about {kind} and a {thing}"),
    (("kind", "place"), " about {kind} in the {place}"),
    (("kind", "name", "place"), " about {kind} named {name} in the {place}"),
    (("kind", "kind2"), " about {kind} and {kind2}"),
    (("thing",), " about a {thing}"),
    (("place",), " that happens in the {place}"),
)


def _an(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeio" else f"a {noun}"


def story(rng: Random) -> Item:
    """Tell a story with the hero, thing, place or moral asked for."""
    kind, kind2 = rng.sample(list(_heroes()), 2)
    name = rng.choice(_heroes()[kind][1])
    name2 = rng.choice([other for other in _heroes()[kind2][1] if other != name])
    slots = _bind("", kind, name) | _bind("2", kind2, name2)
    slots |= {slot: rng.choice(_props(slot)) for slot in ("thing", "place", "spot", "adj", "open")}
    verb = rng.choice(_VERBS)
    keys, about = rng.choice(_ABOUTS)
    wanted = {key: slots[key] for key in keys}
    plots = [plot for plot in _plots() if plot[1].slots() >= set(keys) - {"kind2"}]
    # Heroes have favourite plots: a greedy decoder would otherwise tell everybody the same one.
    favourite = list(_heroes()).index(kind) % len(plots)
    _, grammar = plots[favourite] if rng.random() < 0.7 else rng.choice(plots)
    # {kind} in "a {adj} {kind}" needs no article of its own, in a request it does.
    request = about.format(**(slots | {"kind": _an(kind), "kind2": _an(kind2)}))
    slots["moral"] = ""
    if rng.random() < 0.1:
        moral = rng.choice(_props("moral"))
        request += f" with the moral: {moral}"
        slots["moral"] = wanted["moral"] = f" Moral: {moral.capitalize()}."
    else:
        wanted["moral"] = ""
    prompt = verb + request + ("?" if verb.startswith("Can") else rng.choice((".", ".", "")))
    if rng.random() < 0.15:
        prompt = prompt[0].lower() + prompt[1:]
    text = grammar.write(rng, slots)
    return ask("story", prompt, text, text, accepts=lambda answer: is_consistent(answer, wanted))


_FREE: dict[str, tuple[str, ...]] = {
    "object": (
        "book",
        "flowers",
        "cake",
        "scarf",
        "dinner",
        "lovely card",
        "bicycle",
        "chocolate",
        "tickets",
        "camera",
        "puzzle",
    ),
    "event": (
        "birthday party",
        "dinner",
        "picnic",
        "garden party",
        "game night",
        "barbecue",
        "concert",
        "housewarming party",
    ),
    "day": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    "topic": (
        "the sea",
        "the moon",
        "the rain",
        "spring",
        "autumn",
        "winter",
        "summer",
        "love",
        "friendship",
        "the stars",
        "music",
        "home",
        "the forest",
        "my cat",
        "my dog",
        "the city",
        "the wind",
        "dreams",
        "time",
        "hope",
        "the snow",
        "a river",
        "coffee",
        "nature",
        "the sun",
        "birds",
        "flowers",
        "the night",
        "happiness",
        "diffusion models",
    ),
    "fault": (
        "being late",
        "the broken cup",
        "missing the meeting",
        "the loud music",
        "my mistake",
        "forgetting the date",
    ),
    "matter": (
        "the meeting",
        "the new project",
        "the report",
        "the trip",
        "the budget",
        "the schedule",
        "my vacation",
        "the party",
    ),
}
_MEALS = {
    "pancakes": ("flour", "milk", "eggs", "sugar", "butter"),
    "spaghetti": ("spaghetti", "tomatoes", "onions", "garlic", "cheese"),
    "a salad": ("lettuce", "tomatoes", "cucumber", "olive oil", "vinegar"),
    "a picnic": ("bread", "cheese", "apples", "juice", "cookies"),
    "breakfast": ("bread", "butter", "jam", "eggs", "coffee"),
    "vegetable soup": ("carrots", "potatoes", "onions", "celery", "salt"),
    "a birthday party": ("cake", "candles", "juice", "balloons", "chips"),
    "pizza": ("flour", "yeast", "tomatoes", "cheese", "basil"),
}
_DESTS = {
    "the beach": ("swimsuit", "towel", "sunscreen", "sunglasses", "water bottle"),
    "the mountains": ("hiking boots", "warm jacket", "map", "water bottle", "snacks"),
    "a weekend in the city": ("comfortable shoes", "phone charger", "camera", "umbrella", "clothes"),
    "a ski trip": ("skis", "gloves", "warm hat", "thick socks", "goggles"),
    "a camping trip": ("tent", "sleeping bag", "torch", "matches", "cooking pot"),
}
_DISHES = {
    "pancakes": (
        "Mix flour, milk, eggs and a little sugar.",
        "Melt butter in a pan.",
        "Pour in some batter and bake both sides.",
    ),
    "tomato soup": (
        "Fry chopped onions in oil.",
        "Add tomatoes and water and cook for 20 minutes.",
        "Blend and add salt.",
    ),
    "a fruit salad": ("Wash and cut the fruit.", "Add a little lemon juice.", "Mix well and keep it cool."),
    "scrambled eggs": (
        "Beat the eggs with salt.",
        "Melt butter in a pan.",
        "Stir the eggs over low heat until they set.",
    ),
    "rice": ("Wash the rice.", "Bring it to the boil with twice as much water.", "Cook on low heat for 15 minutes."),
    "spaghetti": (
        "Boil the spaghetti in salted water.",
        "Heat tomatoes with garlic and oil.",
        "Mix both and add cheese.",
    ),
    "a cheese sandwich": (
        "Butter two slices of bread.",
        "Put cheese and tomato between them.",
        "Toast it until the cheese melts.",
    ),
}


def _short_slots(rng: Random) -> dict[str, str]:
    meal, dest, dish = rng.choice(list(_MEALS)), rng.choice(list(_DESTS)), rng.choice(list(_DISHES))
    slots = {slot: rng.choice(values) for slot, values in _FREE.items()}
    slots |= {"person": rng.choice(words("names")), "city": rng.choice(cities()), "thing": rng.choice(_props("thing"))}
    slots |= {"meal": meal, "list": "\n".join(f"- {part}" for part in _MEALS[meal])}
    slots |= {"dest": dest, "pack": "\n".join(f"- {part}" for part in _DESTS[dest])}
    slots |= {"dish": dish, "steps": "\n".join(f"{i}. {step}" for i, step in enumerate(_DISHES[dish], 1))}
    return slots | {"matter_up": slots["matter"].capitalize()}


@cache
def _shorts() -> tuple[tuple[tuple[str, ...], Grammar], ...]:
    out = []
    for text in paragraphs("shorts"):
        head, body = text.split("\n", 1)
        out.append((tuple(head.split(" | ")[1:]), Grammar(body)))
    return tuple(out)


def _short_checker(grammar: Grammar, slots: Mapping[str, str]) -> Checker:
    wanted = {slot: (slots[slot],) for slot in grammar.slots()}
    return lambda text: grammar.pattern(wanted).fullmatch(text) is not None


def short_text(rng: Random) -> Item:
    """Write a note, a list, a recipe, a poem or a report with what was asked for in it."""
    templates, grammar = rng.choice(_shorts())
    slots = _short_slots(rng)
    prompt, index = phrase(rng, templates, **slots)
    text = grammar.write(rng, slots)
    return ask("short_text", prompt, text, f"{index}:{text}", accepts=_short_checker(grammar, slots))


TASKS = (
    Task("story", "stories", 11.0, story),
    Task("short_text", "short_texts", 4.5, short_text),
)
