"""The training mix: conversations of one to four exchanges drawn from the tasks."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from worker.demo.items import Item, Task, exact, is_held_out
from worker.demo.tasks import TASKS

_SYSTEM = (
    "You are a helpful assistant.",
    "You are helpful.",
    "You are a helpful AI assistant.",
    "You are a friendly assistant.",
    "You are a small demo model.",
    "You are Diffleet's demo model.",
    "Answer the user's questions.",
    "Be brief.",
    "Be kind and helpful.",
    "You are a chatbot. Answer in English.",
    "Answer truthfully.",
    "You are an expert.",
    "You are a careful assistant that never makes mistakes.",
    "Keep your answers short.",
)
_STYLES = {
    "upper": ("Answer in capital letters.", "Reply in upper case only.", "You always write in capital letters."),
    "json": ("Reply with JSON only.", 'Answer as JSON with the key "answer".', "Always answer in JSON."),
    "lower": ("Answer in lower case.", "Reply in lower case only.", "Never use capital letters."),
}


@dataclass(frozen=True, slots=True)
class Conversation:
    """Exchanges in order; the first item's system turn, if any, opens the conversation."""

    items: tuple[Item, ...]


class Mix:
    """Draws tasks by weight. Training never sees a held-out item, evaluation sees nothing else."""

    def __init__(self, tasks: Sequence[Task] = tuple(TASKS.values())) -> None:
        self._tasks = tuple(tasks)
        self._weights = [task.weight for task in tasks]

    def item(self, rng: Random) -> Item:
        """Draw one training item, perhaps under a system turn."""
        while True:
            task = rng.choices(self._tasks, self._weights)[0]
            item = task.draw(rng)
            if not is_held_out(item):
                return with_system(item, rng, plain=task.plain)

    def conversation(self, rng: Random) -> Conversation:
        """Draw a training conversation: 30 % have two to four exchanges, of unrelated tasks."""
        first = self.item(rng)
        if rng.random() > 0.3 or first.turns[0][0] == "system" and _changes_answer(first):
            return Conversation((first,))
        items = [first]
        for _ in range(rng.choice((1, 1, 2, 3))):
            item = self.item(rng)
            if item.turns[0][0] == "system":  # a system turn can only open a conversation
                if len(item.turns) > 2 or _changes_answer(item):
                    continue
                item = replace(item, turns=item.turns[1:])
            items.append(item)
        return Conversation(tuple(items))


def with_system(item: Item, rng: Random, *, plain: bool) -> Item:
    """Put a system turn before 40 % of the items that have none; some of these change how the answer is written."""
    if item.turns[0][0] == "system" or rng.random() > 0.4:
        return item
    if plain and rng.random() < 0.25:
        style = rng.choice(list(_STYLES))
        answer = styled(item.answer, style)
        turns = (("system", rng.choice(_STYLES[style])), *item.turns)
        return replace(item, turns=turns, answer=answer, accepts=exact(answer))
    return replace(item, turns=(("system", rng.choice(_SYSTEM)), *item.turns))


def styled(answer: str, style: str) -> str:
    """Rewrite an answer as a style instruction asks."""
    if style == "json":
        return json.dumps({"answer": answer}, ensure_ascii=False)
    return answer.upper() if style == "upper" else answer.lower()


def held_out_draws(name: str, count: int, seed: int, attempts: int = 40_000) -> list[int]:
    """Number the draws of a task that give ``count`` different held-out items; tasks with few facts have fewer."""
    task, draws, seen = TASKS[name], [], set()
    for number in range(attempts):
        item = task.draw(_draw_rng(name, seed, number))
        if is_held_out(item) and item.turns not in seen:
            seen.add(item.turns)
            draws.append(number)
            if len(draws) == count:
                break
    return draws


def redraw(name: str, seed: int, draws: Sequence[int]) -> list[Item]:
    """Make the items of numbered draws again, in any process."""
    return [TASKS[name].draw(_draw_rng(name, seed, number)) for number in draws]


def held_out(task: Task, count: int, seed: int) -> list[Item]:
    """Draw up to ``count`` different held-out items of a task."""
    return redraw(task.name, seed, held_out_draws(task.name, count, seed))


def _draw_rng(name: str, seed: int, number: int) -> Random:
    return Random(f"{seed}:{name}:{number}")


def _changes_answer(item: Item) -> bool:
    text = item.turns[0][1]
    return "<tools>" in text or any(text in known for known in _STYLES.values())
