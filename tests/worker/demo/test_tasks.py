"""Every task writes answers its own checker accepts, and keeps its held-out items out of training."""

import json
from random import Random

import pytest

from worker.demo.items import HOLDOUT, ask, is_held_out
from worker.demo.mix import Mix, held_out, held_out_draws, redraw, styled
from worker.demo.tables import column, rows
from worker.demo.tasks import TASKS
from worker.demo.tasks.honesty import ANSWERS
from worker.demo.tasks.numbers import spell_number
from worker.demo.tasks.stories import is_consistent
from worker.demo.tasks.text import spell_counting

NAMES = sorted(TASKS)


@pytest.mark.parametrize("name", NAMES)
def test_a_checker_accepts_its_answer_and_rejects_a_corrupted_one(name: str) -> None:
    rng = Random(11)
    for _ in range(60):
        item = TASKS[name].draw(rng)
        assert item.task == name
        assert item.turns[-1][0] in ("user", "tool")
        assert item.turns[-1][1].strip()
        assert item.accepts(item.answer), item
        assert not item.accepts(item.answer + " x")
        assert not item.accepts(item.answer[1:])
        assert not item.accepts("")


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_decides_the_items(name: str) -> None:
    def draw(seed: int) -> list[tuple[object, str]]:
        rng = Random(seed)
        return [(item.turns, item.answer) for item in (TASKS[name].draw(rng) for _ in range(20))]

    assert draw(4) == draw(4)
    assert draw(4) != draw(5)


def test_training_never_draws_a_held_out_item() -> None:
    rng, mix = Random(2), Mix()
    items = [item for _ in range(3000) for item in mix.conversation(rng).items]
    assert not any(is_held_out(item) for item in items)
    known = {(item.task, item.key) for item in items if item.key is not None}
    tested = {(item.task, item.key) for name in ("add", "sort", "story") for item in held_out(TASKS[name], 30, 1)}
    assert len(tested) > 60
    assert not known & tested


def test_about_one_item_of_fifty_is_held_out() -> None:
    rng = Random(3)
    items = [TASKS["sort"].draw(rng) for _ in range(5000)]
    share = sum(map(is_held_out, items)) / len(items)
    assert 0.5 / HOLDOUT < share < 1.6 / HOLDOUT


def test_the_split_is_the_same_in_every_version() -> None:
    numbers = held_out_draws("add_long", 5, seed=1)
    assert all(is_held_out(item) for item in redraw("add_long", 1, numbers))
    operands = {(a, b) for a in range(1000, 1100) for b in range(1000, 1010)}
    kept = [pair for pair in operands if _is_held_out_sum(*pair)]
    assert sorted(kept)[:3] == [(1012, 1002), (1020, 1004), (1022, 1001)]


def _is_held_out_sum(a: int, b: int) -> bool:
    return is_held_out(ask("add_long", "", "", ":".join(map(str, sorted((a, b))))))


def test_everything_a_newcomer_tries_first_is_taught() -> None:
    rng, mix = Random(1), Mix([TASKS["chat"], TASKS["capital"], TASKS["story"]])
    prompts = {item.turns[-1][1] for item in (mix.item(rng) for _ in range(12000))}
    for first in ("hello", "Write a poem", "What can you do?", "What is the capital of France?"):
        assert first in prompts
    assert any("about a fox" in prompt for prompt in prompts)


def test_style_instructions_rewrite_the_answer() -> None:
    assert styled("The sun", "upper") == "THE SUN"
    assert json.loads(styled("Zoë", "json")) == {"answer": "Zoë"}
    rng, mix = Random(4), Mix([TASKS["extreme"]])
    loud = [item for item in (mix.item(rng) for _ in range(400)) if "JSON" in item.turns[0][1]]
    assert loud
    assert all(json.loads(item.answer) and item.accepts(item.answer) for item in loud)


def test_a_story_with_a_changed_name_or_pronoun_is_not_consistent() -> None:
    rng = Random(9)
    for _ in range(40):
        item = TASKS["story"].draw(rng)
        if " named " in item.turns[-1][1] or not is_consistent(item.answer, {}):
            continue
        hero = item.answer.split(" named ")[1].split()[0].strip(".,")
        last = item.answer.rindex(hero) if item.answer.count(hero) > 1 else None
        if last:
            assert not item.accepts(item.answer[:last] + "Somebody" + item.answer[last + len(hero) :])


def test_the_tables_are_complete() -> None:
    assert len(rows("countries")) > 180
    assert [int(number) for number in column("elements", 2)] == list(range(1, 119))
    assert len(rows("definitions")) == 2500
    assert sum(len(row[0].split(" | ")) for row in rows("product")) >= 150
    assert len(set(ANSWERS)) == 20


def test_number_words_and_running_counts() -> None:
    assert spell_number(1105) == "one thousand one hundred and five"
    assert spell_number(40) == "forty"
    assert spell_counting("strawberry", "r") == "s-t-r1-a-w-b-e-r2-r3-y"
