import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.constraints import Constraint, JsonSchema, Lark, Regex, Tool, ToolCalls
from shared.grammar import InvalidConstraint, check
from shared.pattern_size import written_out


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        ("", 0),
        ("abc", 3),
        (r"\d{3}-\d{4}", 8),
        ("(a{10}){100}", 1000),
        ("a{1000}{1000}", 1_000_000),
        ("(ab|c)*d+e?", 5),
        ("a{3,}b{2,5}", 8),
        ("[a-z]{1,64}@[]x]{2}", 67),
        (r"\{9\}[{5}]", 4),
        ("((((a{100}){100}){100}){100})", 10**8),
    ],
)
def test_repetitions_are_written_out(pattern: str, size: int) -> None:
    assert written_out(pattern) == size


@given(st.recursive(st.sampled_from("ab"), lambda inner: st.tuples(inner, inner) | st.tuples(inner, st.integers(1, 4))))
def test_it_is_the_length_of_the_only_match(tree: object) -> None:
    def pattern(node: object) -> str:
        match node:
            case (left, int(times)):
                return f"({pattern(left)}){{{times}}}"
            case (left, right):
                return pattern(left) + pattern(right)
            case _:
                return str(node)

    def match_of(node: object) -> str:
        match node:
            case (left, int(times)):
                return match_of(left) * times
            case (left, right):
                return match_of(left) + match_of(right)
            case _:
                return str(node)

    text = match_of(tree)
    assert re.fullmatch(pattern(tree), text) and written_out(pattern(tree)) == len(text)


@given(st.text(alphabet="()[]{}|*+?^$\\a1,9", max_size=40))
def test_no_pattern_is_too_wrong_to_be_measured(pattern: str) -> None:
    assert written_out(pattern) >= 0


COSTLY = "a{1000}{1000}"


@pytest.mark.parametrize(
    "constraint",
    [
        Regex(pattern=COSTLY),
        Regex(pattern="x" * 30_000),
        Lark(lark=f"start: /{COSTLY}/"),
        JsonSchema(json_schema={"type": "object", "properties": {"a": {"type": "string", "pattern": COSTLY}}}),
        JsonSchema(json_schema={"type": "object", "patternProperties": {COSTLY: {"type": "null"}}}),
        ToolCalls(tools=(Tool(name="f", parameters={"anyOf": [{"type": "string", "pattern": COSTLY}]}),)),
    ],
    ids=lambda constraint: constraint.kind,
)
def test_a_costly_pattern_is_refused_before_anybody_runs_it(constraint: Constraint) -> None:
    began = time.process_time()
    with pytest.raises(InvalidConstraint, match="written out"):
        check(constraint)
    assert time.process_time() - began < 1
