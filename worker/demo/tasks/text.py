"""Letters and words: reversing, spelling, counting, changing case, lists."""

import string
from random import Random

from worker.demo.items import Item, Task, ask, phrase
from worker.demo.tables import column, words


def _word(rng: Random) -> str:
    return rng.choice(words("words")) if rng.random() < 0.6 else rng.choice(column("definitions"))


def _words(rng: Random, least: int, most: int) -> list[str]:
    return rng.sample(words("words"), rng.randint(least, most))


def _letters(rng: Random) -> str:
    return "".join(rng.choice(string.ascii_lowercase) for _ in range(rng.randint(3, 8)))


def _sentence(rng: Random) -> str:
    a, b = rng.sample(words("words")[:160], 2)
    adjective = rng.choice(
        ("happy", "quiet", "small", "large", "bright", "brave", "gentle", "green", "blue", "white", "cold")
    )
    return rng.choice(words("sentences")).format(a=a, b=b, adj=adjective)


_REVERSE = (
    "Reverse the word {w}.",
    "Reverse {w}.",
    "Reverse the letters of {w}.",
    "Write {w} backwards.",
    'Reverse the string "{w}".',
    "Spell {w} backwards.",
    "What is {w} backwards?",
    "Please write the word {w} in reverse.",
)


def reverse(rng: Random) -> Item:
    """Reverse a string of random letters."""
    word = _letters(rng)
    prompt, _ = phrase(rng, _REVERSE, w=word)
    return ask("reverse", prompt, word[::-1], word, letters=True)


def reverse_word(rng: Random) -> Item:
    """Reverse an English word."""
    word = _word(rng)
    prompt, index = phrase(rng, _REVERSE, w=word)
    return ask("reverse_word", prompt, word[::-1], f"{word}:{index}", letters=True)


def spell(rng: Random) -> Item:
    """Spell a word or a random string letter by letter."""
    word = _word(rng) if rng.random() < 0.5 else _letters(rng)
    prompt, index = phrase(
        rng, ("Spell {w}.", "How do you spell {w}?", "Spell the word {w}.", "Spell {w} letter by letter."), w=word
    )
    return ask("spell", prompt, "-".join(word), f"{word}:{index}", letters=True)


def end_letter(rng: Random) -> Item:
    """Name the first or last letter of a word."""
    word = _word(rng)
    which = rng.choice(("first", "last"))
    prompt, _ = phrase(
        rng,
        ("What is the {e} letter of {w}?", "Give the {e} letter of the word {w}.", "{w}: {e} letter?"),
        e=which,
        w=word,
    )
    return ask("end_letter", prompt, word[0] if which == "first" else word[-1], f"{word}:{which}")


def count_letters(rng: Random) -> Item:
    """Count the letters of a word, or how often one of them occurs, with a running count beside the spelling."""
    word = _word(rng)
    if rng.random() < 0.4:
        templates = ("How many letters are in {w}?", "How many letters does {w} have?", "Count the letters in {w}.")
        prompt, index = phrase(rng, templates, w=word)
        answer = f"{spell_counting(word, '')}: {len(word)} letters"
        return ask("count_letters", prompt, answer, f"{word}:{index}", letters=True)
    if rng.random() < 0.04:
        word = "strawberry"
    doubled = [letter for letter in word if word.count(letter) > 1] or list(word)
    letter = rng.choice(rng.choice((doubled, word, word, string.ascii_lowercase)))
    templates = (
        "How many times does {c} appear in {w}?",
        "How many {c}'s are in {w}?",
        "How many times is the letter {c} in {w}?",
        "Count the letter {c} in {w}.",
        "How many {c}'s in {w}?",
        "How many {c} are there in the word {w}?",
    )
    prompt, _ = phrase(rng, templates, w=word, c=letter)
    answer = f"{spell_counting(word, letter)}: {word.count(letter)}"
    return ask("count_letters", prompt, answer, None if word == "strawberry" else f"{word}:{letter}", letters=True)


def spell_counting(word: str, letter: str) -> str:
    """Spell a word with a running count after each occurrence of a letter, or after every letter."""
    out, count = [], 0
    for each in word:
        hit = not letter or each == letter
        count += hit
        out.append(f"{each}{count}" if hit else each)
    return "-".join(out)


def count_words(rng: Random) -> Item:
    """Count the words of a sentence."""
    text = _sentence(rng)
    prompt, _ = phrase(
        rng,
        ('How many words are in "{s}"?', "Count the words: {s}", "How many words are there in this sentence: {s}."),
        s=text,
    )
    return ask("count_words", prompt, str(len(text.split())), text)


def change_case(rng: Random) -> Item:
    """Change a phrase to upper, lower, title, snake, kebab or camel case."""
    parts = _words(rng, 2, 4)
    kind = rng.choice(("upper", "upper", "lower", "title", "snake", "kebab", "camel"))
    text = " ".join(parts)
    if kind == "upper":
        templates, answer = (
            ("Write {s} in capital letters.", "Convert to uppercase: {s}", "Make this uppercase: {s}"),
            text.upper(),
        )
    elif kind == "lower":
        text = text.upper() if rng.random() < 0.7 else text.title()
        templates, answer = (
            ("Write {s} in lower case.", "Convert to lowercase: {s}", "Make this lowercase: {s}"),
            text.lower(),
        )
    elif kind == "title":
        templates, answer = (
            ("Write {s} in title case.", "Convert to title case: {s}", "Capitalize each word: {s}"),
            text.title(),
        )
    elif kind == "snake":
        templates, answer = ("Write {s} in snake case.", "Convert to snake_case: {s}"), "_".join(parts)
    elif kind == "kebab":
        templates, answer = ("Write {s} in kebab case.", "Convert to kebab-case: {s}"), "-".join(parts)
    else:
        templates = ("Write {s} in camel case.", "Convert to camelCase: {s}")
        answer = parts[0] + "".join(part.title() for part in parts[1:])
    prompt, _ = phrase(rng, templates, s=text)
    return ask("change_case", prompt, answer, f"{kind}:{text}")


def alphabetical(rng: Random) -> Item:
    """Put words in alphabetical order."""
    parts = _words(rng, 3, 6)
    prompt, _ = phrase(
        rng,
        (
            "Put these words in alphabetical order: {x}.",
            "Sort alphabetically: {x}.",
            "Sort these words: {x}.",
            "Order these words from A to Z: {x}.",
        ),
        x=", ".join(parts),
    )
    return ask("alphabetical", prompt, ", ".join(sorted(parts)), ",".join(parts))


def nth_word(rng: Random) -> Item:
    """Pick a word of a sentence by its place."""
    text = _sentence(rng)
    parts = text.split()
    place = rng.randrange(min(5, len(parts)))
    if rng.random() < 0.2:
        place, name = len(parts) - 1, "last"
    else:
        name = ("first", "second", "third", "fourth", "fifth")[place]
    prompt, _ = phrase(
        rng,
        ('What is the {n} word of "{s}"?', "Give me the {n} word: {s}", "Find the {n} word in this sentence: {s}."),
        n=name,
        s=text,
    )
    return ask("nth_word", prompt, parts[place], f"{name}:{text}")


def replace_word(rng: Random) -> Item:
    """Replace one word of a sentence by another."""
    text, new = _sentence(rng), rng.choice(words("words"))
    old = rng.choice([part for part in text.split() if part in words("words")])
    prompt, _ = phrase(
        rng,
        ('Replace {o} with {n} in "{s}".', "Replace the word {o} by {n}: {s}", "Change {o} to {n}: {s}"),
        o=old,
        n=new,
        s=text,
    )
    return ask(
        "replace_word", prompt, " ".join(new if part == old else part for part in text.split()), f"{old}:{new}:{text}"
    )


def copy(rng: Random) -> Item:
    """Repeat a word or a sentence exactly."""
    if rng.random() < 0.5:
        word, n = _word(rng) if rng.random() < 0.6 else _letters(rng), rng.randint(2, 6)
        prompt, _ = phrase(
            rng, ("Write {w} {n} times.", "Repeat the word {w} {n} times.", "Say {w} {n} times."), w=word, n=n
        )
        return ask("copy", prompt, " ".join([word] * n), f"{word}:{n}")
    text = _sentence(rng) if rng.random() < 0.7 else f"{_letters(rng)} {rng.randint(0, 9999)} {_letters(rng)}"
    prompt, _ = phrase(
        rng, ("Repeat after me: {s}", "Copy this text: {s}", 'Say "{s}".', "Repeat exactly: {s}"), s=text
    )
    return ask("copy", prompt, text, text)


def acronym(rng: Random) -> Item:
    """Make an acronym of a phrase."""
    parts = _words(rng, 3, 5)
    prompt, _ = phrase(
        rng,
        ("Make an acronym of {s}.", "What is the acronym of {s}?", "Give the initials of {s}."),
        s=" ".join(parts).title(),
    )
    return ask("acronym", prompt, "".join(part[0] for part in parts).upper(), " ".join(parts), letters=True)


def bullets(rng: Random) -> Item:
    """Turn a comma list into a bullet or numbered list, or back."""
    parts = _words(rng, 3, 6)
    kind = rng.choice(("bullet", "bullet", "numbered", "commas"))
    listed = ", ".join(parts)
    if kind == "bullet":
        templates = ("Make a bullet list: {x}.", "Turn this into bullet points: {x}.", "Write {x} as a bulleted list.")
        answer = "\n".join(f"- {part}" for part in parts)
    elif kind == "numbered":
        templates = ("Make a numbered list: {x}.", "Turn this into a numbered list: {x}.", "Number these: {x}.")
        answer = "\n".join(f"{i}. {part}" for i, part in enumerate(parts, 1))
    else:
        templates = ("Turn this list into one line with commas:\n{x}", "Join with commas:\n{x}")
        answer, listed = listed, "\n".join(f"- {part}" for part in parts)
    prompt, _ = phrase(rng, templates, x=listed)
    return ask("bullets", prompt, answer, f"{kind}:{','.join(parts)}")


TASKS = (
    Task("reverse", "reverse", 3.4, reverse),
    Task("reverse_word", "text", 1.8, reverse_word),
    Task("spell", "text", 1.4, spell),
    Task("end_letter", "text", 0.6, end_letter),
    Task("count_letters", "text", 3.0, count_letters),
    Task("count_words", "text", 0.6, count_words, plain=True),
    Task("change_case", "text", 1.6, change_case),
    Task("alphabetical", "text", 1.8, alphabetical),
    Task("nth_word", "text", 0.6, nth_word),
    Task("replace_word", "text", 0.7, replace_word),
    Task("copy", "text", 1.4, copy),
    Task("acronym", "text", 0.5, acronym),
    Task("bullets", "text", 0.9, bullets),
)
