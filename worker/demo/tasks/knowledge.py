"""Facts from the tables: the facts are all taught, only pairs of a fact and a phrasing are held out."""

from collections import Counter
from functools import cache
from random import Random

from worker.demo.items import Item, Task, ask, phrase
from worker.demo.tables import column, rows


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]


def _article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _fact(rng: Random, task: str, templates: tuple[str, ...], subject: str, answer: str, **slots: object) -> Item:
    prompt, index = phrase(rng, templates, x=subject, **slots)
    return ask(task, prompt, answer, f"{subject}:{index}:{len(templates)}")


_CAPITAL = (
    "What is the capital of {x}?",
    "What is the capital city of {x}?",
    "Capital of {x}?",
    "Name the capital of {x}.",
    "Tell me the capital of {x}.",
    "What's the capital of {x}?",
    "Which city is the capital of {x}?",
    "Do you know the capital of {x}?",
    "{x} capital?",
)


def capital(rng: Random) -> Item:
    """Name the capital of a country."""
    country, city, _, _ = rng.choice(rows("countries"))
    return _fact(rng, "capital", _CAPITAL, country, f"The capital of {country} is {city}.")


def capital_of(rng: Random) -> Item:
    """Name the country of a capital."""
    # Monaco, Singapore and their like name both: "Where is Monaco?" asks for the continent.
    country, city, _, _ = rng.choice([row for row in rows("countries") if row[0] != row[1]])
    templates = (
        "{x} is the capital of which country?",
        "Which country has {x} as its capital?",
        "Which country's capital is {x}?",
        "What country is {x} the capital of?",
        "In which country is {x}?",
        "Where is {x}?",
    )
    return _fact(rng, "capital_of", templates, city, f"{city} is the capital of {country}.")


def continent(rng: Random) -> Item:
    """Name the continent of a country."""
    country, _, where, _ = rng.choice(rows("countries"))
    templates = (
        "On which continent is {x}?",
        "Which continent is {x} in?",
        "What continent is {x} on?",
        "Where is {x} located?",
        "Where is {x}?",
        "Name the continent of {x}.",
    )
    return _fact(rng, "continent", templates, country, f"{_upper(country)} is in {where}.")


def currency(rng: Random) -> Item:
    """Name the currency of a country."""
    country, _, _, money = rng.choice(rows("countries"))
    templates = (
        "What is the currency of {x}?",
        "Which currency is used in {x}?",
        "What money do they use in {x}?",
        "How do people pay in {x}?",
        "Currency of {x}?",
        "Name the currency of {x}.",
    )
    return _fact(rng, "currency", templates, country, f"The currency of {country} is the {money}.")


def element(rng: Random) -> Item:
    """Give the symbol, number or name of a chemical element."""
    name, symbol, number = rng.choice(rows("elements"))
    kind = rng.randrange(4)
    if kind == 0:
        templates = (
            "What is the chemical symbol for {x}?",
            "What is the symbol of {x}?",
            "Chemical symbol of {x}?",
            "Symbol for {x}?",
            "Give the symbol of the element {x}.",
        )
        return _fact(rng, "element", templates, name, f"The chemical symbol for {name} is {symbol}.")
    if kind == 1:
        templates = (
            "What is the atomic number of {x}?",
            "Atomic number of {x}?",
            "Tell me the atomic number of {x}.",
            "Which atomic number does {x} have?",
            "How many protons does {x} have?",
            "What number is {x} in the periodic table?",
        )
        return _fact(rng, "element", templates, name, f"The atomic number of {name} is {number}.")
    if kind == 2:
        templates = (
            "Which element has the symbol {x}?",
            "What element is {x}?",
            "What does the chemical symbol {x} stand for?",
            "Name the element with the symbol {x}.",
        )
        return _fact(rng, "element", templates, symbol, f"{symbol} is the symbol for {name}.")
    templates = (
        "Which element has the atomic number {x}?",
        "What element has atomic number {x}?",
        "Name the element with {x} protons.",
    )
    return _fact(rng, "element", templates, number, f"The element with atomic number {number} is {name}.")


_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
_MONTHS = "January February March April May June July August September October November December".split()
_LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def calendar(rng: Random) -> Item:
    """Days of the week, months and their lengths, planets in order."""
    kind = rng.randrange(5)
    if kind == 0:
        day, step, name = rng.randrange(7), *rng.choice(((1, "after"), (-1, "before")))
        templates = (
            "What day comes {s} {x}?",
            "Which day is {s} {x}?",
            "What day of the week comes {s} {x}?",
            "Tell me the day {s} {x}.",
        )
        answer = f"{_DAYS[(day + step) % 7]} comes {name} {_DAYS[day]}."
        return _fact(rng, "calendar", templates, _DAYS[day], answer, s=name)
    month = rng.randrange(12)
    if kind == 1:
        step, name = rng.choice(((1, "after"), (-1, "before")))
        templates = (
            "What month comes {s} {x}?",
            "Which month is {s} {x}?",
            "Tell me the month {s} {x}.",
            "Which month of the year comes {s} {x}?",
            "Month {s} {x}?",
        )
        answer = f"{_MONTHS[(month + step) % 12]} comes {name} {_MONTHS[month]}."
        return _fact(rng, "calendar", templates, _MONTHS[month], answer, s=name)
    if kind == 2:
        templates = (
            "How many days are in {x}?",
            "How many days does {x} have?",
            "How long is {x}?",
            "Number of days in {x}?",
            "How many days are there in {x}?",
            "Tell me how many days {x} has.",
        )
        days = f"{_MONTHS[month]} has {_LENGTHS[month]} days" + (", or 29 in a leap year." if month == 1 else ".")
        return _fact(rng, "calendar", templates, _MONTHS[month], days)
    planet, place, remark = rng.choice(rows("planets"))
    if kind == 3:
        templates = (
            "Which planet is {x} from the Sun?",
            "What is the {x} planet from the Sun?",
            "Name the {x} planet of the solar system.",
            "What is the {x} planet?",
            "Tell me the {x} planet from the Sun.",
            "Which is the {x} planet?",
            "{x} planet from the Sun?",
        )
        return _fact(rng, "calendar", templates, place, f"{planet} is the {place} planet from the Sun.")
    templates = (
        "What is {x}?",
        "Tell me about {x}.",
        "Tell me about the planet {x}.",
        "What is the planet {x}?",
        "What do you know about {x}?",
        "What is {x} like?",
        "Describe the planet {x}.",
        "Describe {x}.",
    )
    return _fact(rng, "calendar", templates, planet, f"{planet} is {remark}.")


@cache
def _pairs(name: str) -> tuple[tuple[str, str], ...]:
    """Both directions of a table of pairs, without words that have two partners."""
    both = [(a, b) for a, b in rows(name)] + [(b, a) for a, b in rows(name)]
    count = Counter(a for a, _ in both)
    return tuple((a, b) for a, b in both if count[a] == 1)


def opposite(rng: Random) -> Item:
    """Give the opposite of a word."""
    word, other = rng.choice(_pairs("opposites"))
    templates = (
        "What is the opposite of {x}?",
        "Opposite of {x}?",
        "Give the opposite of {x}.",
        "Give me an antonym of {x}.",
        "What's the opposite of {x}?",
        "Which word means the opposite of {x}?",
    )
    return _fact(rng, "opposite", templates, word, f"The opposite of {word} is {other}.")


def plural(rng: Random) -> Item:
    """Give the plural of a noun, or the past tense of a verb."""
    if rng.random() < 0.6:
        one, many = rng.choice(rows("plurals"))
        templates = (
            "What is the plural of {x}?",
            "Plural of {x}?",
            "Give the plural of {x}.",
            "What's the plural form of {x}?",
            "How do you say {x} in the plural?",
        )
        return _fact(rng, "plural", templates, one, f"The plural of {one} is {many}.")
    verb, past = rng.choice(rows("past"))
    templates = (
        "What is the past tense of {x}?",
        "Past tense of {x}?",
        "Give the past tense of {x}.",
        "Put {x} in the past tense.",
        "What's the past tense of {x}?",
        "Tell me the past form of the verb {x}.",
    )
    return _fact(rng, "plural", templates, verb, f"The past tense of {verb} is {past}.")


def animal(rng: Random) -> Item:
    """Young, home, sound or legs of an animal."""
    name, young, home, sound, legs = rng.choice(rows("animals"))
    kind = rng.randrange(4)
    x = _article(name)
    if kind == 0:
        templates = (
            "What is a baby {x} called?",
            "What do you call a young {x}?",
            "What is the young of {a} called?",
            "Name for a baby {x}?",
        )
        return _fact(rng, "animal", templates, name, f"A baby {name} is called {_article(young)}.", a=x)
    if kind == 1:
        templates = (
            "Where does {a} live?",
            "What is the home of {a}?",
            "Where do you find {a}?",
            "Home of {a}?",
            "Where would I find {a}?",
        )
        return _fact(rng, "animal", templates, name, f"{_upper(x)} lives in {_article(home)}.", a=x)
    if kind == 2:
        templates = (
            "What sound does {a} make?",
            "What noise does {a} make?",
            "Which sound does {a} make?",
            "What does {a} say?",
            "Sound of {a}?",
            "Tell me the sound that {a} makes.",
        )
        return _fact(rng, "animal", templates, name, f"The sound of {x} is a {sound}.", a=x)
    templates = (
        "How many legs does {a} have?",
        "Number of legs of {a}?",
        "How many legs has {a}?",
        "Tell me how many legs {a} has.",
        "How many legs are on {a}?",
        "Count the legs of {a}.",
        "Does {a} have legs?",
    )
    return _fact(rng, "animal", templates, name, f"{_upper(x)} has {legs if legs != '0' else 'no'} legs.", a=x)


@cache
def _definitions() -> tuple[tuple[str, ...], ...]:
    """WordNet's words without those that a planet or a hand-written answer explains better."""
    asked = {
        question for table in ("product", "trivia", "chat") for row in rows(table) for question in row[0].split(" | ")
    }
    asked |= {f"What is {planet}?" for planet in column("planets")}
    taken = {question.lower() for question in asked}
    return tuple(
        row for row in rows("definitions") if not {f"what is {row[0]}?", f"what is {_article(row[0])}?"} & taken
    )


def definition(rng: Random) -> Item:
    """Define a common noun in WordNet's words."""
    word, gloss = rng.choice(_definitions())
    templates = (
        "What is {a}?",
        "What is {x}?",
        "Define {x}.",
        "What does {x} mean?",
        "What does the word {x} mean?",
        "Give a definition of {x}.",
        "What is the meaning of {x}?",
        "Explain the word {x}.",
        "Definition of {x}?",
        "Please define the word {x}.",
    )
    return _fact(rng, "definition", templates, word, f"{_upper(word)}: {gloss}.", a=_article(word))


def _qa(rng: Random, task: str) -> Item:
    """A question of a table whose first cell lists its phrasings, separated by `` | ``."""
    questions, answer = rng.choice(rows(task))
    templates = tuple(questions.split(" | "))
    prompt, index = phrase(rng, templates)
    # A hand-written question has few phrasings, so one in fifty would be lost for good: vary the tail instead.
    tail = rng.choice(("", "", "", " Please explain.", " Tell me.", " I would like to know."))
    key = f"{templates[index]}{tail}" if tail else None
    return ask(task, prompt + (tail if prompt[-1] in "?.!" else ""), answer, key if prompt[-1] in "?.!" else None)


def product(rng: Random) -> Item:
    """Questions about this product and about diffusion language models."""
    return _qa(rng, "product")


def trivia(rng: Random) -> Item:
    """Common questions that a newcomer tries."""
    return _qa(rng, "trivia")


def listing(rng: Random) -> Item:
    """List the members of a small known set."""
    sets = (
        ("the days of the week", _DAYS),
        ("the months of the year", _MONTHS),
        ("the planets", [row[0] for row in rows("planets")]),
        ("the continents", ["Africa", "Antarctica", "Asia", "Europe", "North America", "Oceania", "South America"]),
        ("the four seasons", ["spring", "summer", "autumn", "winter"]),
        ("the vowels", list("aeiou")),
        ("the letters of the alphabet", list("abcdefghijklmnopqrstuvwxyz")),
        ("the colors of the rainbow", ["red", "orange", "yellow", "green", "blue", "indigo", "violet"]),
        ("the first ten elements", list(column("elements")[:10])),
    )
    name, members = rng.choice(sets)
    prompt, _ = phrase(rng, ("List {x}.", "Name {x}.", "What are {x}?", "Tell me {x}.", "Can you list {x}?"), x=name)
    return ask("listing", prompt, ", ".join(members), None)


TASKS = (
    Task("capital", "capitals", 3.0, capital),
    Task("capital_of", "capitals", 2.4, capital_of),
    Task("continent", "knowledge", 1.2, continent),
    Task("currency", "knowledge", 1.2, currency),
    Task("element", "knowledge", 2.0, element),
    Task("calendar", "knowledge", 0.6, calendar),
    Task("opposite", "knowledge", 0.7, opposite),
    Task("plural", "knowledge", 0.7, plural),
    Task("animal", "knowledge", 0.6, animal),
    Task("definition", "definitions", 6.5, definition),
    Task("product", "knowledge", 1.8, product),
    Task("trivia", "knowledge", 1.5, trivia),
    Task("listing", "knowledge", 0.2, listing),
)
