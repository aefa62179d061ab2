"""JSON, CSV, Markdown tables, dates, times, units and tool calls."""

import datetime
import json
from collections.abc import Callable
from random import Random

from worker.demo.items import Item, Task, Turn, ask, exact, phrase
from worker.demo.tables import column, words

_JOBS = (
    "teacher,doctor,baker,pilot,nurse,farmer,painter,writer,lawyer,singer,driver,cook,builder,engineer,gardener,dentist,"
    "plumber,actor,dancer,tailor"
).split(",")
_FOODS = "pizza,pasta,soup,rice,salad,bread,cheese,apples,noodles,pancakes,fish,chocolate,ice cream,tacos,curry".split(
    ","
)
_COLORS = "red blue green yellow black white purple orange brown grey pink silver".split()
_PETS = "cat dog rabbit parrot turtle hamster goldfish pony".split()
_MONTHS = ("January February March April May June July August September October November December").split()


def cities() -> list[str]:
    """Capitals that are one plain word."""
    return [city for city in column("countries", 1) if city.isalpha()]


Fact = tuple[str, str | int, str]  # key, value, clause about the subject


def _facts(rng: Random) -> list[Fact]:
    age, city, job = rng.randint(5, 95), rng.choice(cities()), rng.choice(_JOBS)
    food, color, pet = rng.choice(_FOODS), rng.choice(_COLORS), rng.choice(_PETS)
    year, phone = rng.randint(1940, 2015), f"{rng.randint(100, 999)}-{rng.randint(1000, 9999)}"
    return [
        ("age", age, rng.choice((f"is {age} years old", f"is {age}"))),
        ("city", city, rng.choice((f"lives in {city}", f"comes from {city}", f"moved to {city}"))),
        ("job", job, rng.choice((f"works as a {job}", f"is a {job}"))),
        ("food", food, rng.choice((f"likes {food}", f"loves to eat {food}"))),
        ("color", color, rng.choice((f"has a {color} car", f"loves the color {color}"))),
        ("pet", pet, rng.choice((f"has a {pet}", f"owns a {pet}"))),
        ("born", year, f"was born in {year}"),
        ("phone", phone, f"can be reached at {phone}"),
    ]


def _clauses(rng: Random, name: str, clauses: list[str]) -> str:
    if len(clauses) == 1:
        return f"{name} {clauses[0]}."
    if len(clauses) == 2 or rng.random() < 0.5:
        return f"{name} {', '.join(clauses[:-1])} and {clauses[-1]}."
    half = len(clauses) // 2
    return f"{name} {' and '.join(clauses[:half])}. {name} also {' and '.join(clauses[half:])}."


_EXTRACT = (
    "Extract {k} as JSON: {s}",
    "Extract {k} as JSON. {s}",
    "Return {k} as JSON. {s}",
    "Give me a JSON object with {k}. {s}",
    "Make JSON with the keys {k} from this text: {s}",
    "Turn this into JSON with {k}: {s}",
    "{s} Extract {k} as JSON.",
)


def _listing(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def to_json(rng: Random) -> Item:
    """Extract two to six keys from a sentence, null for what it does not say."""
    name = rng.choice(words("names"))
    facts = rng.sample(_facts(rng), rng.randint(1, 5))
    said = [fact for fact in facts if rng.random() > 0.12] or facts[:1]
    shown = rng.sample(said, len(said))
    data: dict[str, str | int | None] = {"name": name}
    data |= {key: value if (key, value, clause) in said else None for key, value, clause in facts}
    if rng.random() < 0.25:
        shown = shown + [fact for fact in _facts(rng) if fact[0] not in data][:1]
    prompt, _ = phrase(rng, _EXTRACT, k=_listing(list(data)), s=_clauses(rng, name, [fact[2] for fact in shown]))
    return ask("to_json", prompt, json.dumps(data), prompt)


def _record(rng: Random, least: int, most: int) -> dict[str, str | int]:
    facts = rng.sample(_facts(rng), rng.randint(least - 1, most - 1))
    return {"name": rng.choice(words("names"))} | {key: value for key, value, _ in facts}


def from_json(rng: Random) -> Item:
    """Read one value out of a small object."""
    data = _record(rng, 3, 6)
    key = rng.choice(list(data))
    prompt, _ = phrase(
        rng,
        (
            "What is the {k} in {j}?",
            "Get the value of {k}: {j}",
            "{j}\nWhat is the {k}?",
            "Read {k} from this JSON: {j}",
        ),
        k=key,
        j=json.dumps(data),
    )
    return ask("from_json", prompt, str(data[key]), prompt)


def csv_json(rng: Random) -> Item:
    """Turn a CSV row into JSON or back."""
    data = _record(rng, 3, 5)
    header, row = ",".join(data), ",".join(map(str, data.values()))
    if rng.random() < 0.6:
        prompt, _ = phrase(rng, ("Convert this CSV to JSON:\n{h}\n{r}", "CSV to JSON:\n{h}\n{r}"), h=header, r=row)
        return ask("csv_json", prompt, json.dumps(data), prompt)
    prompt, _ = phrase(rng, ("Convert this JSON to CSV: {j}", "JSON to CSV: {j}"), j=json.dumps(data))
    return ask("csv_json", prompt, f"{header}\n{row}", prompt)


def table(rng: Random) -> Item:
    """Write two or three records as a Markdown table."""
    keys = ["name", *rng.sample(("age", "city", "job", "color"), rng.randint(1, 2))]
    people = []
    for name in rng.sample(words("names"), rng.randint(2, 3)):
        values = {key: value for key, value, _ in _facts(rng)}
        people.append([name, *(str(values[key]) for key in keys[1:])])
    given = "\n".join(", ".join(person) for person in people)
    prompt, _ = phrase(
        rng,
        ("Make a Markdown table with the columns {k}:\n{g}", "Write this as a Markdown table with {k}:\n{g}"),
        k=_listing(keys),
        g=given,
    )
    lines = [keys, ["---"] * len(keys), *people]
    return ask("table", prompt, "\n".join(f"| {' | '.join(line)} |" for line in lines), prompt)


def date(rng: Random) -> Item:
    """Convert a date between ISO and long form."""
    day = datetime.date(1900, 1, 1) + datetime.timedelta(days=rng.randrange(73000))
    iso, month = day.isoformat(), _MONTHS[day.month - 1]
    if rng.random() < 0.5:
        templates = (
            "Write {d} as a long date.",
            "Convert {d} to a long date.",
            "What date is {d}?",
            "Write the date {d} in words.",
        )
        prompt, _ = phrase(rng, templates, d=iso)
        return ask("date", prompt, f"{day.day} {month} {day.year}", iso)
    long = rng.choice((f"{day.day} {month} {day.year}", f"{month} {day.day}, {day.year}"))
    templates = (
        "Write {d} as an ISO date.",
        "Convert {d} to ISO format.",
        "What is {d} in YYYY-MM-DD?",
        "{d} in ISO format",
    )
    prompt, _ = phrase(rng, templates, d=long)
    return ask("date", prompt, iso, long)


def clock(rng: Random) -> Item:
    """Convert a time between the 12-hour and the 24-hour clock."""
    hour, minute = rng.randrange(24), rng.randrange(60)
    long, short = f"{hour:02d}:{minute:02d}", f"{hour % 12 or 12}:{minute:02d} {'PM' if hour >= 12 else 'AM'}"
    if rng.random() < 0.5:
        templates = ("Convert {t} to 12-hour time.", "What is {t} in 12-hour format?", "Write {t} with AM or PM.")
        prompt, index = phrase(rng, templates, t=long)
        return ask("clock", prompt, short, f"{long}:{index}")
    templates = ("Convert {t} to 24-hour time.", "What is {t} in 24-hour format?", "Write {t} on the 24-hour clock.")
    prompt, index = phrase(rng, templates, t=short)
    return ask("clock", prompt, long, f"{short}:{index}")


_UNITS = (
    ("km", "m", 1000, 99),
    ("m", "cm", 100, 99),
    ("cm", "mm", 10, 500),
    ("kg", "g", 1000, 99),
    ("l", "ml", 1000, 99),
    ("hours", "minutes", 60, 48),
    ("minutes", "seconds", 60, 60),
    ("days", "hours", 24, 31),
    ("weeks", "days", 7, 52),
    ("years", "months", 12, 30),
    ("feet", "inches", 12, 40),
    ("dozen", "pieces", 12, 30),
)


def units(rng: Random) -> Item:
    """Convert between units with an exact whole factor."""
    big, small, factor, most = rng.choice(_UNITS)
    n = rng.randint(2, most)
    a, unit, b, other = (n, big, n * factor, small) if rng.random() < 0.6 else (n * factor, small, n, big)
    prompt, index = phrase(
        rng,
        ("Convert {a} {u} to {o}.", "How many {o} are {a} {u}?", "What is {a} {u} in {o}?", "{a} {u} in {o}"),
        a=a,
        u=unit,
        o=other,
    )
    return ask("units", prompt, f"{a} {unit} = {b} {other}", f"{a}:{unit}:{other}:{index}")


Arguments = dict[str, str | int]
Tool = tuple[tuple[str, ...], str, dict[str, str], Callable[[Random], tuple[str, list[str | int]]]]


def _city_ask(templates: tuple[str, ...]) -> Callable[[Random], tuple[str, list[str | int]]]:
    def draw(rng: Random) -> tuple[str, list[str | int]]:
        city = rng.choice(cities())
        return phrase(rng, templates, c=city)[0], [city]

    return draw


def _timer(rng: Random) -> tuple[str, list[str | int]]:
    n = rng.randint(1, 90)
    return phrase(rng, ("Set a timer for {n} minutes.", "Start a {n} minute timer.", "Wake me in {n} minutes."), n=n)[
        0
    ], [n]


def _email(rng: Random) -> tuple[str, list[str | int]]:
    name, subject = rng.choice(words("names")), rng.choice(words("words"))
    return phrase(rng, ("Send an email to {n} about the {s}.", "Email {n} about the {s}."), n=name, s=subject)[0], [
        name,
        subject,
    ]


def _sum(rng: Random) -> tuple[str, list[str | int]]:
    a, b = rng.randint(1, 9999), rng.randint(1, 9999)
    return phrase(rng, ("Use the tool to add {a} and {b}.", "Add {a} and {b} with the tool."), a=a, b=b)[0], [a, b]


def _search(rng: Random) -> tuple[str, list[str | int]]:
    topic = " ".join(rng.sample(words("words"), rng.randint(1, 2)))
    return phrase(rng, ("Search for {t}.", "Look up {t}.", "Find pages about {t}."), t=topic)[0], [topic]


def _note(rng: Random) -> tuple[str, list[str | int]]:
    text = f"buy {rng.choice(words('words'))} and {rng.choice(words('words'))}"
    return phrase(rng, ("Save a note: {t}", "Remember this: {t}", "Write down: {t}"), t=text)[0], [text]


def _money(rng: Random) -> tuple[str, list[str | int]]:
    n, (a, b) = rng.randint(1, 999), rng.sample(("USD", "EUR", "GBP", "JPY", "CHF", "INR", "CAD", "AUD"), 2)
    return phrase(rng, ("Convert {n} {a} to {b}.", "How much is {n} {a} in {b}?"), n=n, a=a, b=b)[0], [n, a, b]


_TOOLS: tuple[Tool, ...] = (
    (
        ("get_weather", "weather", "current_weather", "get_current_weather"),
        "Get the current weather",
        {"city": "string"},
        _city_ask(
            (
                "What is the weather in {c}?",
                "How is the weather in {c} today?",
                "weather in {c}",
                "Is it raining in {c}?",
            )
        ),
    ),
    (
        ("get_time", "current_time", "get_current_time"),
        "Get the local time",
        {"city": "string"},
        _city_ask(("What time is it in {c}?", "Tell me the time in {c}.", "What is the local time in {c}?")),
    ),
    (("set_timer", "start_timer"), "Start a timer", {"minutes": "integer"}, _timer),
    (("send_email", "email"), "Send an email", {"to": "string", "subject": "string"}, _email),
    (("add", "add_numbers", "calculate_sum"), "Add two numbers", {"a": "integer", "b": "integer"}, _sum),
    (("search", "web_search", "search_web"), "Search the web", {"query": "string"}, _search),
    (("save_note", "add_note"), "Save a note", {"text": "string"}, _note),
    (
        ("convert_currency", "exchange"),
        "Convert an amount of money",
        {"amount": "integer", "from": "string", "to": "string"},
        _money,
    ),
)
_RENAMED = {
    "city": ("city", "city", "location", "place"),
    "query": ("query", "query", "q"),
    "text": ("text", "content"),
}

TOOL_INTRO = "You may call these tools:\n<tools>\n"
TOOL_OUTRO = '\n</tools>\nTo call one, answer with <tool_call>\n{"name": NAME, "arguments": ARGUMENTS}\n</tool_call>'


def _schema(name: str, description: str, parameters: dict[str, str], described: bool) -> dict[str, object]:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    function: dict[str, object] = {"name": name}
    if described:
        function["description"] = description
    function["parameters"] = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": function}


def _pick_tools(rng: Random, wanted: Tool) -> tuple[str, str, list[str]]:
    """Return the system turn, the wanted tool's name and its parameter names."""
    others = [tool for tool in _TOOLS if tool is not wanted]
    listed = [wanted, *rng.sample(others, rng.randint(0, 2))]
    rng.shuffle(listed)
    lines, chosen, keys = [], "", [""]
    sort_keys = rng.random() < 0.3
    for tool in listed:
        name = rng.choice(tool[0])
        renamed = {rng.choice(_RENAMED.get(key, (key,))): kind for key, kind in tool[2].items()}
        lines.append(json.dumps(_schema(name, tool[1], renamed, rng.random() < 0.7), sort_keys=sort_keys))
        if tool is wanted:
            chosen, keys = name, list(renamed)
    return TOOL_INTRO + "\n".join(lines) + TOOL_OUTRO, chosen, keys


def _call(name: str, arguments: Arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def tool_call(rng: Random) -> Item:
    """Call the right one of the tools in the system turn."""
    wanted = rng.choice(_TOOLS)
    system, name, keys = _pick_tools(rng, wanted)
    prompt, values = wanted[3](rng)
    if rng.random() < 0.3:
        system = rng.choice(("You are a helpful assistant.", "You are helpful.", "Be brief.")) + "\n\n" + system
    return ask("tool_call", prompt, _call(name, dict(zip(keys, values, strict=True))), prompt, system=system)


def tool_result(rng: Random) -> Item:
    """Answer after a tool has answered."""
    wanted = _TOOLS[rng.randrange(2)]
    system, name, keys = _pick_tools(rng, wanted)
    prompt, values = wanted[3](rng)
    city = str(values[0])
    if wanted is _TOOLS[0]:
        sky, degrees = rng.choice(("sunny", "cloudy", "rainy", "windy", "snowy", "foggy")), rng.randint(-9, 39)
        result = json.dumps({"weather": sky, "temperature": degrees})
        answer = f"It is {sky} in {city}, with a temperature of {degrees} degrees."
    else:
        result = f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"
        answer = f"It is {result} in {city}."
        result = json.dumps({"time": result})
    turns: tuple[Turn, ...] = (
        ("system", system),
        ("user", prompt),
        ("assistant", _call(name, dict(zip(keys, values, strict=True)))),
        ("tool", result),
    )
    return Item("tool_result", turns, answer, exact(answer), f"{city}:{result}")


TASKS = (
    Task("to_json", "json", 4.2, to_json),
    Task("from_json", "structure", 1.5, from_json),
    Task("csv_json", "structure", 1.3, csv_json),
    Task("table", "structure", 1.0, table),
    Task("date", "dates", 2.0, date, plain=True),
    Task("clock", "structure", 1.2, clock, plain=True),
    Task("units", "structure", 2.2, units, plain=True),
    Task("tool_call", "tools", 2.4, tool_call),
    Task("tool_result", "tools", 0.9, tool_result),
)
