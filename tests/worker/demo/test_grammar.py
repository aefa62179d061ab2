"""A grammar recognises exactly what it can write."""

from random import Random

import pytest

from worker.demo.grammar import Grammar


def test_what_is_written_is_recognised() -> None:
    grammar = Grammar("{name} [ran|walked [slowly|fast]|] home. {name} was [tired|glad].")
    pattern = grammar.pattern({"name": ["Ada", "Adam"]})
    rng = Random(1)
    texts = {grammar.write(rng, {"name": name}) for name in ("Ada", "Adam") for _ in range(200)}
    assert len(texts) == 16
    assert all(pattern.fullmatch(text) for text in texts)
    assert not pattern.fullmatch("Ada ran home. Adam was glad.")
    assert not pattern.fullmatch("Ada ran home. Ada was sad.")


def test_slots_are_listed_and_broken_templates_refused() -> None:
    assert Grammar("[{a}|{b}] {a}").slots() == {"a", "b"}
    with pytest.raises(ValueError, match="branch mark"):
        Grammar("one] two")
