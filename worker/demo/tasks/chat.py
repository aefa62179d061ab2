"""Small talk and the first things a newcomer types."""

from random import Random

from worker.demo.items import Item, Task, Turn, ask, exact, one_of
from worker.demo.tables import rows, words


def chat(rng: Random) -> Item:
    """Greet, thank, introduce, joke."""
    prompts, answers = rng.choice(rows("chat"))
    prompt = rng.choice(prompts.split(" | "))
    known = [answer.replace("\\n", "\n") for answer in answers.split(" | ")]
    tail = rng.choice(("", "", "", "!", ".", " :)", " please", "?"))
    varied = prompt + tail if tail and prompt[-1].isalnum() else prompt
    # Only the varied forms can be held out: everybody's first "hello" must be taught.
    key = varied if varied != prompt else None
    return ask("chat", varied, rng.choice(known), key, accepts=one_of(known))


def remember_name(rng: Random) -> Item:
    """Greet by name, and know the name when asked."""
    name = rng.choice(words("names"))
    said = rng.choice(("My name is {n}.", "I am {n}.", "Hello, my name is {n}.", "Hi, I am {n}!", "my name is {n}"))
    said, hello = said.format(n=name), f"Nice to meet you, {name}! How can I help you?"
    asked, answer = rng.choice(("What is my name?", "Who am I?", "Do you know my name?")), f"Your name is {name}."
    kind, key = rng.randrange(3), f"{said}:{asked}"
    if kind == 0:
        return ask("remember_name", said, hello, said)
    if kind == 1:
        return ask("remember_name", f"{said} {asked}", answer, key)
    turns: tuple[Turn, ...] = (("user", said), ("assistant", hello), ("user", asked))
    return Item("remember_name", turns, answer, exact(answer), key)


TASKS = (
    Task("chat", "chat", 3.2, chat),
    Task("remember_name", "chat", 0.6, remember_name),
)
