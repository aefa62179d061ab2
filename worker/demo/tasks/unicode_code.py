"""Text outside ASCII, and a handful of Python functions."""

import json
from random import Random

from worker.demo.items import Item, Task, ask, phrase
from worker.demo.tables import paragraphs, words

_NAMES = (
    "José,Zoë,Renée,Søren,Łukasz,Jürgen,Noël,Chloé,Ángel,Björn,François,Šárka,İpek,Nuño,Håkon,Мария,Иван,Ольга,Дмитрий,"
    "Анна,田中,王芳,李明,佐藤,김민수,이서연,محمد,فاطمة,दीपा,राहुल,Νίκος,Ελένη,שרה,דוד"
).split(",")
_PLACES = (
    "Zürich,São Paulo,Kraków,Málaga,Malmö,Århus,Москва,Київ,東京,北京,서울,القاهرة,दिल्ली,Αθήνα,Reykjavík,"
    "Côte d'Azur,Besançon"
).split(",")
_EMOJI = "😀 😂 😍 🎉 🚀 🌍 🐱 🐶 🦊 🍕 🍎 ⭐ 🌙 ☀️ 🔥 💡 📚 🎵 ✅ ❌ ❤️ 👍 🙏 🌈".split()


def _phrase_of(rng: Random) -> str:
    return " ".join(
        rng.choice((_NAMES, _PLACES, _EMOJI, words("words"))[rng.randrange(4)]) for _ in range(rng.randint(1, 5))
    )


def copy_unicode(rng: Random) -> Item:
    """Copy or extract accented, Cyrillic, CJK and other names, and emoji."""
    if rng.random() < 0.55:
        text = _phrase_of(rng)
        prompt, _ = phrase(
            rng, ("Repeat after me: {s}", "Copy this text: {s}", 'Say "{s}".', "Repeat exactly: {s}"), s=text
        )
        return ask("copy_unicode", prompt, text, text)
    name, city, age = rng.choice(_NAMES), rng.choice(_PLACES), rng.randint(5, 95)
    sentence = rng.choice(("{n} is {a} years old and lives in {c}.", "{n} lives in {c} and is {a}.")).format(
        n=name, a=age, c=city
    )
    prompt, _ = phrase(
        rng, ("Extract name, age and city as JSON: {s}", "Return name, age and city as JSON. {s}"), s=sentence
    )
    answer = json.dumps({"name": name, "age": age, "city": city}, ensure_ascii=False)
    return ask("copy_unicode", prompt, answer, prompt)


def function(rng: Random) -> Item:
    """Write one of the known Python functions, under the name asked for."""
    head, body = rng.choice(paragraphs("functions")).split("\n", 1)
    templates = head.split(" | ")
    index = rng.randrange(len(templates))
    prompt, name = templates[index], "f"
    if "{f}" in body and rng.random() < 0.7:
        name = "_".join(rng.sample(words("words")[:200], rng.choice((1, 2))))
        prompt = f"{prompt.rstrip('.')} {rng.choice(('called', 'named'))} {name}."
    elif rng.random() < 0.2:
        prompt = prompt[0].lower() + prompt[1:]
    code = body.format(f=name)
    return ask("function", prompt, f"```python\n{code}\n```", prompt if name != "f" else None)


TASKS = (
    Task("copy_unicode", "unicode", 1.8, copy_unicode),
    Task("function", "code", 1.0, function),
)
