"""Arithmetic, ordering, counting and number words."""

from random import Random

from worker.demo.items import Item, Task, ask, phrase
from worker.demo.tables import words

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_THINGS = "apples books coins marbles stamps pencils cookies stickers shells eggs balloons cards stones flowers".split()


def spell_number(n: int) -> str:
    """Write 0..9999 in English words."""
    if n < 20:
        return _ONES[n]
    if n < 100:
        return _TENS[n // 10 - 2] + (f"-{_ONES[n % 10]}" if n % 10 else "")
    unit, name = (1000, "thousand") if n >= 1000 else (100, "hundred")
    head, rest = divmod(n, unit)
    text = f"{spell_number(head)} {name}"
    if not rest:
        return text
    return f"{text} and {spell_number(rest)}" if rest < 100 else f"{text} {spell_number(rest)}"


def _operand(rng: Random, digits: int) -> int:
    return rng.randint(10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1)


def _key(*numbers: int) -> str | None:
    """Hold out number facts by their operands, but always teach the tiny ones that everybody asks first."""
    return None if sum(len(str(n)) for n in numbers) < 4 else ":".join(map(str, numbers))


_ADD = (
    "What is {a} + {b}?",
    "{a} + {b}",
    "{a} + {b} =",
    "{a} + {b} = ?",
    "{a}+{b}",
    "Add {a} and {b}.",
    "What is the sum of {a} and {b}?",
    "Calculate {a} plus {b}.",
    "How much is {a} plus {b}?",
    "What's {a}+{b}?",
    "Compute {a} + {b}.",
    "Please add {b} to {a}.",
)
_SUBTRACT = (
    "What is {a} - {b}?",
    "{a} - {b}",
    "{a} - {b} =",
    "{a} - {b} = ?",
    "{a}-{b}",
    "Subtract {b} from {a}.",
    "What is {a} minus {b}?",
    "Calculate {a} minus {b}.",
    "How much is {a} take away {b}?",
    "Compute {a} - {b}.",
)
_MULTIPLY = (
    "What is {a} * {b}?",
    "{a} * {b}",
    "{a} x {b}",
    "{a} × {b} = ?",
    "What is {a} times {b}?",
    "Multiply {a} by {b}.",
    "Calculate {a} times {b}.",
    "How much is {a} times {b}?",
)
_DIVIDE = (
    "What is {a} / {b}?",
    "{a} / {b}",
    "{a} ÷ {b} = ?",
    "Divide {a} by {b}.",
    "What is {a} divided by {b}?",
    "Calculate {a} / {b}.",
)


def _add(rng: Random, name: str, a: int, b: int) -> Item:
    prompt, _ = phrase(rng, _ADD, a=a, b=b)
    return ask(name, prompt, f"{a} + {b} = {a + b}", _key(*sorted((a, b))))


def _subtract(rng: Random, name: str, a: int, b: int) -> Item:
    if a < b and rng.random() < 0.8:
        a, b = b, a
    prompt, _ = phrase(rng, _SUBTRACT, a=a, b=b)
    return ask(name, prompt, f"{a} - {b} = {a - b}", _key(a, b))


def add(rng: Random) -> Item:
    """Add numbers of up to three digits."""
    return _add(rng, "add", _operand(rng, rng.choice((1, 2, 2, 3, 3))), _operand(rng, rng.choice((1, 2, 2, 3, 3))))


def add_long(rng: Random) -> Item:
    """Add where at least one number has four digits."""
    a, b = _operand(rng, 4), _operand(rng, rng.choice((2, 3, 4, 4, 4)))
    return _add(rng, "add_long", *((a, b) if rng.random() < 0.7 else (b, a)))


def subtract(rng: Random) -> Item:
    """Subtract numbers of up to three digits, a few into the negative."""
    a, b = (_operand(rng, rng.choice((1, 2, 2, 3, 3))) for _ in range(2))
    return _subtract(rng, "subtract", a, b)


def subtract_long(rng: Random) -> Item:
    """Subtract from a four-digit number."""
    return _subtract(rng, "subtract_long", _operand(rng, 4), _operand(rng, rng.choice((2, 3, 4, 4))))


def multiply(rng: Random) -> Item:
    """Multiply one or two digits by one or two digits; two by two goes through the partial products."""
    digits = rng.choice(((1, 1), (1, 2), (2, 1), (2, 2)))
    a, b = (_operand(rng, d) for d in digits)
    prompt, _ = phrase(rng, _MULTIPLY, a=a, b=b)
    answer = f"{a} × {b} = {a * b}"
    if digits == (2, 2) and b % 10:
        tens, ones = b // 10 * 10, b % 10
        answer = f"{a} × {b} = {a} × {tens} + {a} × {ones} = {a * tens} + {a * ones} = {a * b}"
    return ask("multiply", prompt, answer, None if digits == (1, 1) else f"{a}:{b}")


def divide(rng: Random) -> Item:
    """Divide without remainder by one digit."""
    b, q = rng.randint(1, 12), rng.randint(1, 50)
    prompt, _ = phrase(rng, _DIVIDE, a=b * q, b=b)
    return ask("divide", prompt, f"{b * q} / {b} = {q}", f"{b * q}:{b}")


def compare(rng: Random) -> Item:
    """Say which of two numbers is larger or smaller."""
    a = _operand(rng, rng.randint(1, 4))
    b = a + rng.choice((-1, 1)) * rng.randint(1, max(2, a)) if rng.random() < 0.6 else _operand(rng, rng.randint(1, 4))
    b = abs(b)
    if a == b:
        b += 1
    more, templates = rng.choice(
        (
            (True, ("Which is larger, {a} or {b}?", "Which number is bigger: {a} or {b}?", "Is {a} or {b} greater?")),
            (False, ("Which is smaller, {a} or {b}?", "Which number is less: {a} or {b}?", "Is {a} or {b} smaller?")),
        )
    )
    prompt, _ = phrase(rng, templates, a=a, b=b)
    winner, loser = (max(a, b), min(a, b)) if more else (min(a, b), max(a, b))
    word = "larger" if more else "smaller"
    return ask("compare", prompt, f"{winner} is {word} than {loser}.", _key(a, b))


def _numbers(rng: Random, least: int, most: int) -> list[int]:
    top = rng.choice((9, 99, 99, 99, 999))
    return [rng.randint(0, top) for _ in range(rng.randint(least, most))]


def _join(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def extreme(rng: Random) -> Item:
    """Find the largest or smallest of a list."""
    numbers = _numbers(rng, 3, 7)
    largest = rng.random() < 0.5
    word = rng.choice(("largest", "biggest", "maximum") if largest else ("smallest", "lowest", "minimum"))
    prompt, _ = phrase(
        rng,
        (
            "What is the {w} of {x}?",
            "Find the {w} number: {x}.",
            "Which of these numbers is the {w}: {x}?",
            "Give me the {w} of {x}.",
        ),
        w=word,
        x=_join(numbers),
    )
    return ask("extreme", prompt, str(max(numbers) if largest else min(numbers)), f"{largest}:{_join(numbers)}")


def sort(rng: Random) -> Item:
    """Sort a list of three to eight numbers either way."""
    numbers = _numbers(rng, 3, 8)
    down = rng.random() < 0.35
    up_templates = (
        "Sort these numbers: {x}.",
        "Sort {x}.",
        "Put these numbers in ascending order: {x}.",
        "Order these numbers from smallest to largest: {x}.",
        "Arrange from low to high: {x}.",
        "Please sort the list {x}.",
    )
    down_templates = (
        "Sort these numbers in descending order: {x}.",
        "Sort from largest to smallest: {x}.",
        "Arrange from high to low: {x}.",
        "Sort {x} in reverse order.",
    )
    prompt, _ = phrase(rng, down_templates if down else up_templates, x=_join(numbers))
    return ask("sort", prompt, _join(sorted(numbers, reverse=down)), f"{down}:{_join(numbers)}")


def total(rng: Random) -> Item:
    """Add up three or four small numbers, showing the running sums."""
    numbers = [rng.randint(1, rng.choice((9, 30, 99))) for _ in range(rng.randint(3, 4))]
    prompt, _ = phrase(
        rng,
        ("What is the sum of {x}?", "Add up {x}.", "Add these numbers: {x}.", "What is the total of {x}?"),
        x=_join(numbers),
    )
    steps, so_far = [], numbers[0]
    for n in numbers[1:]:
        steps.append(f"{so_far} + {n} = {so_far + n}")
        so_far += n
    return ask("total", prompt, f"{'; '.join(steps)}. The sum is {so_far}.", _join(numbers))


def parity(rng: Random) -> Item:
    """Say whether a number is even or odd."""
    n = _operand(rng, rng.randint(1, 4))
    prompt, _ = phrase(
        rng,
        ("Is {n} even or odd?", "Is the number {n} odd or even?", "Even or odd: {n}?", "Tell me if {n} is even."),
        n=n,
    )
    return ask("parity", prompt, f"{n} is {'odd' if n % 2 else 'even'}.", None if n < 10 else str(n))


def following(rng: Random) -> Item:
    """Continue an arithmetic or doubling sequence."""
    if rng.random() < 0.2:
        numbers = [rng.randint(1, 12) * 2**i for i in range(1)]
        while len(numbers) < 5:
            numbers.append(numbers[-1] * 2)
    else:
        start, step = rng.randint(0, 60), rng.choice((1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 15, 20, 25, 50, 100))
        numbers = [start + i * step for i in range(rng.randint(4, 6))]
        if rng.random() < 0.3:
            numbers.reverse()
    prompt, _ = phrase(
        rng,
        (
            "What comes next: {x}?",
            "What is the next number in {x}?",
            "Continue the sequence {x}.",
            "{x}, what is next?",
        ),
        x=_join(numbers[:-1]),
    )
    return ask("following", prompt, str(numbers[-1]), _join(numbers))


def count_up(rng: Random) -> Item:
    """Count from one number to another, by ones or by a step."""
    start, step = rng.randint(0, 90), rng.choice((1, 1, 1, 2, 5, 10))
    if rng.random() < 0.3:
        start, step = rng.choice((0, 1)), 1
    end = start + step * rng.randint(3, 11)
    numbers, by = list(range(start, end + 1, step)), f" by {step}s" if step > 1 else ""
    if rng.random() < 0.3:
        numbers.reverse()
        templates = ("Count down from {b} to {a}{by}.", "Count backwards from {b} to {a}{by}.")
    else:
        templates = ("Count from {a} to {b}{by}.", "Count up from {a} to {b}{by}.", "Please count from {a} to {b}{by}.")
    prompt, _ = phrase(rng, templates, a=start, b=end, by=by)
    return ask("count_up", prompt, _join(numbers), None if start < 2 else f"{_join(numbers)}")


def to_words(rng: Random) -> Item:
    """Write a number in words."""
    n = _operand(rng, rng.randint(1, 4))
    prompt, _ = phrase(
        rng,
        ("Write {n} in words.", "How do you write {n} in words?", "Spell out the number {n}.", "What is {n} in words?"),
        n=n,
    )
    return ask("to_words", prompt, spell_number(n), None if n < 21 else str(n))


def to_digits(rng: Random) -> Item:
    """Write number words in digits."""
    n = _operand(rng, rng.randint(1, 4))
    prompt, _ = phrase(
        rng,
        ("Write {w} in digits.", "Write {w} as a number.", "What is {w} in digits?", "Convert {w} to digits."),
        w=spell_number(n),
    )
    return ask("to_digits", prompt, str(n), None if n < 21 else str(n))


def word_problem(rng: Random) -> Item:
    """Solve a one- or two-step problem, with a line of working."""
    who, other = rng.sample(words("names"), 2)
    things, a, b, c = rng.choice(_THINGS), rng.randint(5, 60), rng.randint(2, 40), rng.randint(2, 30)
    kind = rng.randrange(5)
    if kind == 0:
        text = rng.choice(
            ("{o} gives {w} {b} more.", "{w} finds {b} more.", "{w} buys {b} more.", "{w} gets {b} more from {o}.")
        )
        story, working, left = text, f"{a} + {b} = {a + b}.", a + b
    elif kind == 1:
        b = rng.randint(1, a - 1)
        text = rng.choice(("{w} gives {b} to {o}.", "{w} loses {b}.", "{w} gives away {b}.", "{o} takes {b}."))
        story, working, left = text, f"{a} - {b} = {a - b}.", a - b
    elif kind == 2:
        a, b = rng.randint(2, 10), rng.randint(2, 10)
        ask_for = rng.choice(("How many {t} are there in all?", "How many {t} does {w} have in total?"))
        prompt, _ = phrase(rng, ("{w} has {a} boxes with {b} {t} in each. " + ask_for,), w=who, a=a, b=b, t=things)
        return ask("word_problem", prompt, f"{a} × {b} = {a * b}. The answer is {a * b}.", f"{a}*{b}:{things}:{who}")
    elif kind == 3:
        c = rng.randint(1, a + b - 1)
        story, left = "{o} gives {w} {b} more. Then {w} loses {c}.", a + b - c
        working = f"{a} + {b} = {a + b}. {a + b} - {c} = {left}."
    else:
        b = rng.randint(1, a - 1)
        story, left = "{w} gives {b} to {o}. Then {w} finds {c} more.", a - b + c
        working = f"{a} - {b} = {a - b}. {a - b} + {c} = {left}."
    question = rng.choice(
        ("How many {t} does {w} have now?", "How many {t} does {w} have?", "How many does {w} have in the end?")
    )
    prompt, _ = phrase(rng, ("{w} has {a} {t}. " + story + " " + question,), w=who, o=other, a=a, b=b, c=c, t=things)
    return ask("word_problem", prompt, f"{working} The answer is {left}.", f"{kind}:{a}:{b}:{c}:{things}")


def half_double(rng: Random) -> Item:
    """Double or halve a number, or take ten percent of it."""
    n = rng.randint(1, 200)
    kind = rng.randrange(3)
    if kind == 0:
        prompt, _ = phrase(rng, ("What is double {n}?", "Double {n}.", "What is twice {n}?"), n=n)
        return ask("half_double", prompt, f"Double {n} is {2 * n}.", f"d{n}")
    if kind == 1:
        prompt, _ = phrase(rng, ("What is half of {n}?", "Halve {n}.", "Half of {n}?"), n=2 * n)
        return ask("half_double", prompt, f"Half of {2 * n} is {n}.", f"h{n}")
    prompt, _ = phrase(rng, ("What is 10% of {n}?", "10% of {n}", "Calculate 10 percent of {n}."), n=10 * n)
    return ask("half_double", prompt, f"10% of {10 * n} is {n}.", f"p{n}")


TASKS = (
    Task("add", "arithmetic", 2.8, add),
    Task("add_long", "arithmetic_long", 5.5, add_long),
    Task("subtract", "arithmetic", 3.6, subtract),
    Task("subtract_long", "arithmetic_long", 4.0, subtract_long),
    Task("multiply", "numbers", 2.6, multiply),
    Task("divide", "numbers", 1.6, divide),
    Task("compare", "numbers", 0.8, compare),
    Task("extreme", "numbers", 0.8, extreme, plain=True),
    Task("sort", "sort", 5.5, sort, plain=True),
    Task("total", "numbers", 2.0, total),
    Task("parity", "numbers", 0.5, parity, plain=True),
    Task("following", "numbers", 1.0, following, plain=True),
    Task("count_up", "numbers", 1.4, count_up),
    Task("to_words", "numbers", 0.8, to_words, plain=True),
    Task("to_digits", "numbers", 0.8, to_digits, plain=True),
    Task("word_problem", "numbers", 2.6, word_problem),
    Task("half_double", "numbers", 0.5, half_double, plain=True),
)
