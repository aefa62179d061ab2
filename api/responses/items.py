# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false
"""The items of an input: as messages that a template takes, and as `input_items` lists them."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from api.errors import invalid, unsupported
from api.schemas import CalledFunction, CalledTool

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXT_PARTS = ("input_text", "output_text", "text")


def to_messages(items: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
    """Return the items as templates take them; `before` is what was said before. Raises `ApiError` naming the item."""
    messages: list[dict[str, Any]] = []
    open_calls = {call["id"] for message in before for call in message.get("tool_calls", ())}
    for index, item in enumerate(items):
        where = f"input[{index}]"
        match item.get("type", "message"):
            case "reasoning":
                pass
            case "message":
                messages.append(_message(item, where))
            case "function_call":
                call = _call(item, where)
                open_calls.add(call["id"])
                # What was said and called in one turn is one message.
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                messages[-1].setdefault("tool_calls", []).append(call)
            case "function_call_output":
                called = _text(item, "call_id", where)
                if called not in open_calls:
                    raise invalid(
                        f"{where}.call_id", f"{where}.call_id: no function_call with that id stands before it"
                    )
                content = _text_of(item.get("output"), f"{where}.output")
                messages.append({"role": "tool", "content": content, "tool_call_id": called, "name": None})
            case _:
                raise unsupported(f"{where}.type")
    if not messages:
        raise invalid("input", "input has no message")
    return messages


def _message(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = _ROLES.get(cast(str, item.get("role"))) if isinstance(item.get("role"), str) else None
    if role is None:
        raise invalid(f"{where}.role", f"{where}.role must be one of {', '.join(_ROLES)}")
    return {"role": role, "content": _text_of(item.get("content"), f"{where}.content")}


def _call(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = CalledFunction(name=_text(item, "name", where), arguments=_text(item, "arguments", where))
    return CalledTool(id=_text(item, "call_id", where), function=function).for_template()


def _text(item: Mapping[str, Any], name: str, where: str) -> str:
    match item.get(name):
        case str(text):
            return text
        case None:
            raise invalid(f"{where}.{name}", f"{where}.{name} is required", "missing_required_parameter")
        case _:
            raise invalid(f"{where}.{name}", f"{where}.{name} must be a string")


def _text_of(content: object, where: str) -> str:
    match content:
        case str():
            return content
        case list():
            texts: list[str] = []
            for number, part in enumerate(content):
                match part:
                    case {"type": str(kind), "text": str(text)} if kind in _TEXT_PARTS:
                        texts.append(text)
                    case {"type": "refusal", "refusal": str(text)}:
                        texts.append(text)
                    case _:
                        raise invalid(f"{where}[{number}]", f"{where}[{number}] must be a text part")
            return "".join(texts)
        case _:
            raise invalid(where, f"{where} must be a string or a list of text parts")


def as_items(items: Sequence[Mapping[str, Any]], response_id: str) -> list[dict[str, Any]]:
    """Return the items as `input_items` lists them: each with a type and an id, messages with parts."""
    listed: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        kind, content = item.get("type", "message"), item.get("content")
        told = {"type": kind, "status": "completed", **item}
        if kind == "message":
            part = "output_text" if item.get("role") == "assistant" else "input_text"
            told["content"] = [{"type": part, "text": content}] if isinstance(content, str) else content
        prefix = {"function_call": "fc", "function_call_output": "fco"}.get(kind, "msg")
        listed.append(told | {"id": item.get("id") or f"{prefix}_{response_id.rpartition('_')[2]}_{index}"})
    return listed
