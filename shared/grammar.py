# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false
"""From a constraint to a grammar of llguidance, and what is wrong with one that has none."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, assert_never, cast

import orjson
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from shared.constraints import (
    MOST_CALLS,
    TEXT_LIMIT,
    Choice,
    Constraint,
    JsonObject,
    JsonSchema,
    Lark,
    Regex,
    ToolCalls,
)
from shared.endless import is_endless
from shared.pattern_size import written_out

CALL_START, CALL_END = "<tool_call>\n", "\n</tool_call>"

LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=500_000,
    step_max_items=50_000,
    max_lexer_states=100_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""What a grammar may cost; about 20 ms to build it at most."""

# One space where models write one, and no other: a space costs tokens of the budget, and some models never stop.
_LAYOUT: Mapping[str, Any] = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


MOST_WRITTEN_OUT = 20_000
"""Characters of all patterns together, repetitions written out: a matcher's step takes up to 0.2 s for them."""
_BYTES = LLTokenizer("byte")
"""A vocabulary of single bytes: what may come first does not hang on a model's."""
_LARK_PATTERN = re.compile(r"/((?:[^/\\\n]|\\.)+)/")


class InvalidConstraint(ValueError):
    """There is no grammar for it; the message says what is wrong, and is fit for the caller."""


def grammar_of(constraint: Constraint) -> str:
    """Return the grammar; raises `InvalidConstraint` for what cannot be written as one, but see `check`."""
    match constraint:
        case JsonSchema():
            return _of_schema(constraint.json_schema)
        case JsonObject():
            return _of_schema({"type": "object"})
        case Regex():
            # A match is whole anyway, and the engine of the patterns has no anchors.
            return LLMatcher.grammar_from_regex(_without_anchors(constraint.pattern))
        case Choice():
            return LLMatcher.grammar_from_regex("|".join(re.escape(option) for option in constraint.options))
        case Lark():
            return LLMatcher.grammar_from_lark(constraint.lark)
        case ToolCalls():
            return _of_tools(constraint)
        case _:
            assert_never(constraint)


def check(constraint: Constraint) -> None:
    """Raise `InvalidConstraint` if there is no grammar for it, or a costly one. Takes milliseconds, 200 at worst."""
    _check_patterns(constraint)
    is_fault, told = LLMatcher.validate_grammar_with_warnings(grammar_of(constraint), limits=LIMITS)
    if is_fault:
        raise InvalidConstraint(" ".join(" ".join(told).split())[:400])
    _check_ends(constraint)


def _check_ends(constraint: Constraint) -> None:
    """Raise `InvalidConstraint` for what can be seen to have no text at all."""
    match constraint:
        case JsonSchema():
            schemas: Sequence[Mapping[str, Any]] = [constraint.json_schema]
        case ToolCalls():
            schemas = [tool.parameters for tool in constraint.tools]
        case Regex() | Lark():
            schemas = []
            matcher = LLMatcher(_BYTES, grammar_of(constraint), log_level=0, limits=LIMITS)
            if not matcher.is_accepting() and not any(matcher.compute_logit_bias()[:256]):
                raise InvalidConstraint("there is no text that it accepts")
        case Choice() | JsonObject():
            schemas = []
        case _:
            assert_never(constraint)
    if any(map(is_endless, schemas)):
        raise InvalidConstraint("its references lead back to themselves: no finite value fits it")


def _check_patterns(constraint: Constraint) -> None:
    match constraint:
        case Regex():
            patterns = [constraint.pattern]
        case JsonSchema():
            patterns = _patterns_in(constraint.json_schema)
        case ToolCalls():
            patterns = [pattern for tool in constraint.tools for pattern in _patterns_in(tool.parameters)]
        case Lark():
            patterns = [found[1] for found in _LARK_PATTERN.finditer(constraint.lark)]
        case Choice() | JsonObject():
            patterns = []
        case _:
            assert_never(constraint)
    if sum(map(written_out, patterns)) > MOST_WRITTEN_OUT:
        raise InvalidConstraint(f"written out, its patterns are longer than {MOST_WRITTEN_OUT}")


def _patterns_in(value: object) -> list[str]:
    """Return the patterns of a schema, and what else might be taken for one."""
    found, left = list[str](), list[object]([value])
    while left:
        match left.pop():
            case dict() as part:
                for name, inner in cast(dict[str, object], part).items():
                    if name == "pattern" and isinstance(inner, str):
                        found.append(inner)
                    if name == "patternProperties" and isinstance(inner, dict):
                        found += cast(dict[str, object], inner)
                    left.append(inner)
            case list() as parts:
                left += cast(list[object], parts)
            case _:
                pass
    return found


def _of_schema(schema: Mapping[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema({**_checked(schema), "x-guidance": dict(_LAYOUT)})


def _checked(schema: Mapping[str, Any]) -> dict[str, Any]:
    try:
        text = orjson.dumps(schema).decode()
    except (TypeError, ValueError) as error:
        raise InvalidConstraint(f"the schema is not JSON: {error}") from error
    if len(text) > TEXT_LIMIT:
        raise InvalidConstraint(f"the schema has {len(text)} characters; {TEXT_LIMIT} are allowed")
    return orjson.loads(text)


def _without_anchors(pattern: str) -> str:
    pattern = pattern.removeprefix("^")
    escaped = len(pattern) - 1 - len(pattern[:-1].rstrip("\\"))
    return pattern[:-1] if pattern.endswith("$") and escaped % 2 == 0 else pattern


def _of_tools(calls: ToolCalls) -> str:
    bodies: list[dict[str, Any]] = []
    for index, tool in enumerate(calls.tools):
        call = {
            "type": "object",
            "properties": {"name": {"const": tool.name}, "arguments": tool.parameters or {"type": "object"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        if "$defs" in tool.parameters or "definitions" in tool.parameters:
            # References in a schema begin at its root.
            names = [name for name in ("$defs", "definitions") if name in tool.parameters]
            call |= {name: tool.parameters[name] for name in names}
        bodies.append({"name": f"tool_{index}", "json_schema": _checked(call) | {"x-guidance": dict(_LAYOUT)}})
    body = " | ".join(f"@{entry['name']}" for entry in bodies)
    more = f"(LINE call){{0,{MOST_CALLS - 1}}}" if calls.parallel else ""
    lines = [f'call: "{_escaped(CALL_START)}" body "{_escaped(CALL_END)}"', f"body: {body}", 'LINE: "\\n"']
    if calls.required:
        lines.insert(0, f"start: call {more}")
    else:
        lines = [
            f"start: TEXT | opening rest {more}",
            'opening[lazy]: TEXT "<tool_call>"',
            f'rest: "\\n" body "{_escaped(CALL_END)}"',
            r"TEXT: /(.|\n)*/",
            *lines,
        ]
    main = {"name": "calls", "lark_grammar": "\n".join(lines)}
    return orjson.dumps({"grammars": [main, *bodies]}).decode()


def _escaped(text: str) -> str:
    return text.replace("\n", "\\n")
