"""The rule that keeps a canvas to a grammar: whatever is accepted in whatever order, the text can be ended in time."""

import json
import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from shared.constraints import Choice, Constraint, JsonObject, JsonSchema, Lark, Regex, Tool, ToolCalls
from shared.grammar import LIMITS, InvalidConstraint, check, grammar_of
from shared.text import Tokenizer
from tests.bench.structured import SCHEMAS
from worker.bundled import bundled_folder
from worker.constraints.closing import ends, shortest_end
from worker.constraints.filling import Filling
from worker.constraints.guard import GrammarGuard
from worker.constraints.vocabulary import Vocabulary
from worker.engine.plan import UNDECIDED, Fill, Guarded

STOPS = (2, 0)
FILLER = 0
BLOCK = 8
TOKENIZER = Tokenizer.from_folder(bundled_folder("demo-nano"))
VOCABULARY = Vocabulary(TOKENIZER.to_json(), 4096, STOPS)
WORDS = [
    token
    for text in ('{"name": "Tom", "age": 31, "', '": [], ', "x", "}", "ab", "12", " ")
    for token in TOKENIZER.encode(text)
]


def matcher_of(constraint: Constraint) -> LLMatcher:
    check(constraint)
    return LLMatcher(VOCABULARY.tokenizer, grammar_of(constraint), log_level=0, limits=LIMITS)


class Dice:
    """Scores of a model that knows nothing: a few random tokens are likely, and its stop token is."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._best: dict[int, int] = {}

    def best(self, index: int) -> int:
        if index not in self._best:
            self._best[index] = self._random.choice([*WORDS, 2, self._random.randrange(4096)])
        return self._best[index]

    def best_of(self, index: int, allowed: bytes) -> tuple[int, float] | None:
        if allowed[self.best(index)]:
            return self.best(index), 0.97
        known = [token for token in WORDS if allowed[token]] or [i for i, may in enumerate(allowed) if may]
        return (self._random.choice(known), self._random.random()) if known else None

    def share(self, index: int, token_id: int, allowed: bytes) -> float:
        assert allowed[token_id]
        return self._random.random()

    def probability(self, index: int, token_id: int) -> float:
        return self._random.random()


def decode(constraint: Constraint, room: int, random: Random) -> tuple[list[int], GrammarGuard]:
    """Decode blocks, accepting random selections of what the guard proposes; returns the tokens up to the end."""
    guard = GrammarGuard(VOCABULARY, matcher_of(constraint), room, FILLER)
    text: list[int] = []
    while len(text) < room and not guard.finished:
        canvas = [UNDECIDED] * BLOCK
        wanted_end = min(BLOCK, room - len(text))
        frontier = 0
        while frontier < wanted_end and not guard.finished:
            wanted = [index < wanted_end and token == UNDECIDED for index, token in enumerate(canvas)]
            view = Guarded(guard, frontier, tuple(canvas), room - len(text), may_stop=True)
            fill = guard.fill(view, wanted, Dice(random))
            free = [index for index in range(BLOCK) if fill.open[index]]
            assert free and all(wanted[index] for index in free)
            chosen = set(random.sample(free, random.randint(1, min(3, len(free)))))
            if fill.end in chosen and any(index < (fill.end or 0) and index not in chosen for index in free):
                chosen.discard(fill.end)
                chosen |= set(free[:1])
            for index in chosen:
                canvas[index] = fill.tokens[index]
            while frontier < BLOCK and canvas[frontier] != UNDECIDED and not guard.finished:
                if canvas[frontier] in STOPS:
                    assert guard.accepts
                    return text, guard
                guard.push(canvas[frontier])
                text.append(canvas[frontier])
                frontier += 1
    return text, guard


def of_schema(schema: dict[str, Any]) -> Callable[[str], object]:
    return lambda text: jsonschema.validate(json.loads(text), schema)


def of_pattern(pattern: str) -> Callable[[str], object]:
    def match(text: str) -> None:
        assert re.fullmatch(pattern, text, re.DOTALL), text

    return match


CALL = r'<tool_call>\n\{"name": ?"(add|f)", ?"arguments": ?\{.*\}\}\n</tool_call>'
TOOLS = (
    Tool(name="add", parameters={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
    Tool(name="f"),
)
CASES: Sequence[tuple[Constraint, Callable[[str], object]]] = (
    *((JsonSchema(json_schema=schema), of_schema(schema)) for schema in SCHEMAS.values()),
    (JsonObject(), of_schema({"type": "object"})),
    (Regex(pattern=r"[a-z]+@[a-z]{3,}\.(com|org)"), of_pattern(r"[a-z]+@[a-z]{3,}\.(com|org)")),
    (Choice(options=("yes", "no", "not now", "a|b")), of_pattern(r"yes|no|not now|a\|b")),
    (Lark(lark='start: "a" start "b" | "c"'), of_pattern("a*cb*")),
    (ToolCalls(tools=TOOLS, required=True), of_pattern(rf"{CALL}(\n{CALL}){{0,7}}")),
    (ToolCalls(tools=TOOLS, required=True, parallel=False), of_pattern(CALL)),
    (ToolCalls(tools=TOOLS), of_pattern(rf"((?!<tool_call>).)*({CALL}(\n{CALL}){{0,7}})?")),
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(range(len(CASES))), st.integers(0, 2**32), st.integers(0, 60))
def test_any_selection_in_any_order_makes_a_whole_text_that_fits(number: int, seed: int, spare: int) -> None:
    constraint, accepts = CASES[number]
    least = shortest_end(matcher_of(constraint), VOCABULARY, 200)
    assert least is not None
    room = len(least) + spare
    tokens, guard = decode(constraint, room, Random(seed))
    assert guard.accepts and len(tokens) <= room
    accepts(TOKENIZER.decode(tokens))


@pytest.mark.parametrize("seed", range(5))
def test_a_text_without_room_for_its_end_stays_a_beginning(seed: int) -> None:
    constraint = JsonSchema(json_schema=SCHEMAS["nested object"])
    tokens, guard = decode(constraint, 9, Random(seed))
    assert len(tokens) == 9 and not guard.accepts
    fresh = matcher_of(constraint)
    assert fresh.consume_tokens(tokens) and not fresh.is_accepting()


def test_the_shortest_end_closes_what_is_open() -> None:
    matcher = matcher_of(JsonSchema(json_schema=SCHEMAS["recursive"]))
    for text, end in (
        ('{"value": 1, "children": [{"value": 2', ',"children":[]}]}'),
        ('{"value": 1, "children": [', "]}"),
    ):
        state = matcher.deep_copy()
        assert state.consume_tokens(TOKENIZER.encode(text))
        found = shortest_end(state, VOCABULARY, 40)
        assert found is not None and TOKENIZER.decode(found).replace(" ", "") == end
        assert shortest_end(state, VOCABULARY, len(found)) == found
        assert shortest_end(state, VOCABULARY, len(found) - 1) is None


@pytest.mark.parametrize(
    "pattern", [r"\w+@\w+\.com", "[^x]*x[^y]*y", r"https?://[a-z]+\.[a-z]{2,}/.*", r"Answer: .*\n", r"(\w\.)+!"]
)
def test_an_end_is_found_where_it_is_not_a_closing_bracket(pattern: str) -> None:
    found = shortest_end(matcher_of(Regex(pattern=pattern)), VOCABULARY, 40)
    assert found is not None
    assert re.fullmatch(pattern, TOKENIZER.decode([token for token in found if token not in STOPS]))


@given(st.sampled_from(range(len(CASES))), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_what_has_ended_one_text_ends_another_only_if_it_makes_that_whole(number: int, seed: int) -> None:
    constraint, accepts = CASES[number]
    random = Random(seed)
    begun, other = (decode(constraint, 60, Random(random.random()))[0] for _ in range(2))
    kept = random.randint(0, len(begun))
    state, end = matcher_of(constraint), other[random.randint(0, len(other)) :] + [STOPS[0]] * random.randint(0, 1)
    assert not kept or state.consume_tokens(begun[:kept])
    if ends(state, VOCABULARY, end):
        body = [token for token in end if token not in STOPS]
        accepts(TOKENIZER.decode(begun[:kept] + body))
        assert not body or state.consume_tokens(body)
        assert state.is_stopped() != (len(body) < len(end))
    found = shortest_end(state, VOCABULARY, 200)
    assert state.is_stopped() or found is None or ends(state, VOCABULARY, found)


def test_an_open_end_needs_a_stop_token() -> None:
    matcher = matcher_of(Regex(pattern="a*"))
    assert shortest_end(matcher, VOCABULARY, 5) == [STOPS[0]]
    assert shortest_end(matcher_of(Regex(pattern="a")), VOCABULARY, 5) == TOKENIZER.encode("a")


@pytest.mark.parametrize(
    ("constraint", "told"),
    [
        (Regex(pattern="(a"), "unclosed group"),
        (Regex(pattern="(?=a)b"), "look-around"),
        (Lark(lark="start: none"), "none"),
        (JsonSchema(json_schema={"type": "objekt"}), "objekt"),
        (JsonSchema(json_schema={"not": {"type": "string"}}), "not"),
        (JsonSchema(json_schema={"$ref": "#/$defs/none"}), "none"),
        (JsonSchema(json_schema={"enum": ["x" * 70_000]}), "65536"),
    ],
)
def test_what_has_no_grammar_is_refused_with_a_reason(constraint: Constraint, told: str) -> None:
    with pytest.raises(InvalidConstraint, match=told):
        check(constraint)


@pytest.mark.parametrize(
    ("pattern", "text"), [("^a$", "a"), (r"a\$", "a$"), (r"a\\$", "a\\"), ("[ab]{2}", "ab"), (r"\d-é", "7-é")]
)
def test_a_pattern_matches_whole_with_or_without_anchors(pattern: str, text: str) -> None:
    matcher = matcher_of(Regex(pattern=pattern))
    assert matcher.consume_tokens(TOKENIZER.encode(text)) and matcher.is_accepting()


def test_what_is_forced_is_told_and_nothing_else() -> None:
    for constraint, forced in (
        (Choice(options=("apple pie",)), True),
        (Choice(options=("apple pie", "plum pie")), False),
        (JsonSchema(json_schema={"const": "Tom"}), True),
    ):
        guard = GrammarGuard(VOCABULARY, matcher_of(constraint), 40, FILLER)
        fill = guard.fill(Guarded(guard, 0, (UNDECIDED,) * BLOCK, 40, True), [True] * BLOCK, Dice(Random(1)))
        told = [is_forced for is_forced, is_open in zip(fill.forced, fill.open, strict=True) if is_open]
        assert told[0] == forced
        state = matcher_of(constraint)
        for token, is_forced in zip(fill.tokens, told, strict=False):
            if is_forced and token not in STOPS:
                # Another token here could only spell the same text.
                assert state.compute_ff_tokens()
            if not state.consume_token(token):
                break


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=12), st.integers(0, 12))
@example([(False, False, False)] * 4 + [(True, False, False), (True, True, False), (True, False, True)], 6)
def test_what_is_forced_is_accepted_with_what_stands_before_it(
    places: list[tuple[bool, bool, bool]], last: int
) -> None:
    opened, forced, accepted = ([place[part] for place in places] for part in range(3))
    accepted = [may and taken for may, taken in zip(opened, accepted, strict=True)]
    end = last if last < len(places) and opened[last] else None
    fill = Fill([5] * len(places), [1.0] * len(places), opened, end, forced)
    settled = Filling(fills={0: fill}).settle(0, accepted)
    first = next((at for at in range(len(places)) if opened[at] and not settled[at]), len(places))
    for at, taken in enumerate(settled):
        if taken and not accepted[at]:
            assert opened[at] and (at < first) and (forced[at] or end is not None)
        if accepted[at] and not taken:
            assert at == end
    # Nothing forced is left right behind what is decided, but for an end that was taken back.
    assert first == len(places) or not forced[first] or first == end
