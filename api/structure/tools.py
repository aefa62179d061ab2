# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false
"""Tools as OpenAI's clients name them: which may be called, and what the model is told of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import orjson
from pydantic import ValidationError

from api.errors import invalid, unsupported
from shared.complaints import complaint_of, path_of
from shared.constraints import MOST_TOOLS, Tool, ToolCalls
from shared.grammar import CALL_END, CALL_START

_INTRO = "You may call these tools:\n<tools>\n"
_OUTRO = f'\n</tools>\nTo call one, answer with {CALL_START}{{"name": NAME, "arguments": ARGUMENTS}}{CALL_END}'


@dataclass(frozen=True, slots=True)
class Offer:
    """The calls that an answer may make."""

    calls: ToolCalls
    fields: Sequence[str]
    """Where in the body the parameters of each of its tools stand."""


def choose(
    tools: Sequence[Mapping[str, Any]] | None, choice: object, *, parallel: bool, nested: bool = True
) -> Offer | None:
    """Return the calls that an answer may make, None for none; raises `ApiError`.

    `nested`: a function lies in `function`, as in chats; in responses it lies beside `type`.
    """
    known = _read(tools or (), nested)
    required, names = _wanted(choice)
    if choice == "none":
        return None
    if not known:
        if required or names is not None:
            raise invalid("tool_choice", "tool_choice asks for a tool, and tools names none")
        return None
    if names is not None:
        missing = next((name for name in names if name not in known), None)
        if missing is not None:
            raise invalid("tool_choice", f"tool_choice names {missing[:64]!r}, which is not one of the tools")
        known = {name: tool for name, tool in known.items() if name in names}
    allowed = tuple(tool for tool, _ in known.values())
    fields = tuple(field for _, field in known.values())
    return Offer(ToolCalls(tools=allowed, required=required, parallel=parallel), fields)


def shown(tools: Sequence[Mapping[str, Any]] | None, choice: object) -> list[dict[str, Any]] | None:
    """Return the tools that the prompt tells of: none where none may be called."""
    return [dict(tool) for tool in tools] if tools and choice != "none" else None


def _read(tools: Sequence[Mapping[str, Any]], nested: bool) -> dict[str, tuple[Tool, str]]:
    """Return by name each tool, and the field of its parameters."""
    if len(tools) > MOST_TOOLS:
        raise invalid("tools", f"there are {len(tools)} tools; {MOST_TOOLS} are allowed")
    known: dict[str, tuple[Tool, str]] = {}
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.get("type", "function") != "function":
            raise unsupported(f"{where}.type")
        inner: object = tool
        if nested:
            where = f"{where}.function"
            inner = tool.get("function")
        if not isinstance(inner, dict):
            raise invalid(where, f"{where} must be an object with a name")
        told = cast(dict[str, Any], inner)
        parameters = told.get("parameters") or {}
        asked = {"name": told.get("name"), "parameters": parameters}
        try:
            read = Tool.model_validate(asked)
        except ValidationError as error:
            found = complaint_of(error, asked)
            field = f"{where}.{path_of(found.place)}"
            raise invalid(field, found.about(field)) from None
        if read.name in known:
            raise invalid(f"{where}.name", f"there are two tools of the name {read.name}")
        known[read.name] = read, f"{where}.parameters"
    return known


def _wanted(choice: object) -> tuple[bool, Sequence[str] | None]:
    """Return whether a call must come, and the tools that it may be of, None for all."""
    match choice:
        case None | "auto" | "none":
            return False, None
        case "required" | "any":
            return True, None
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return True, [name]
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(listed)}}:
            return mode == "required", _names(listed, "tool_choice.allowed_tools.tools")
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(listed)}:
            return mode == "required", _names(listed, "tool_choice.tools")
        case _:
            raise invalid("tool_choice", "tool_choice must be none, auto, required, a function or allowed_tools")


def _names(listed: Sequence[Any], where: str) -> Sequence[str]:
    names: list[str] = []
    for index, tool in enumerate(listed):
        match tool:
            case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
                names.append(name)
            case _:
                raise invalid(f"{where}[{index}]", f"{where}[{index}] must be a function")
    if not names:
        raise invalid(where, f"{where} names no tool")
    return names


def plain_messages(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages for a template that knows neither tools nor their calls and results."""
    told: list[dict[str, Any]] = []
    for message in messages:
        content = message.get("content") or ""
        match message:
            case {"role": "tool"}:
                told.append({"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"})
            case {"tool_calls": list(calls)}:
                texts = [content] if content else []
                texts += [_call(call["function"]) for call in cast(list[Mapping[str, Any]], calls)]
                told.append({"role": "assistant", "content": "\n".join(texts)})
            case _:
                told.append(dict(message))
    if not tools:
        return told
    intro = _INTRO + "\n".join(orjson.dumps(tool).decode() for tool in tools) + _OUTRO
    if told and told[0]["role"] == "system":
        first = told.pop(0)
        intro = f"{first['content']}\n\n{intro}"
    return [{"role": "system", "content": intro}, *told]


def _call(function: Mapping[str, Any]) -> str:
    return (
        f"{CALL_START}{orjson.dumps({'name': function['name'], 'arguments': function['arguments']}).decode()}{CALL_END}"
    )
