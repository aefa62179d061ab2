"""From a body's fields to the constraint of its commands, checked before anything is queued."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, cast

import orjson
from pydantic import ValidationError

from api.errors import ApiError, invalid, unsupported
from api.schemas import GenerationBody
from api.structure.tools import Offer
from shared.card import ModelCard
from shared.complaints import complaint_of, path_of
from shared.constraints import Choice, Constraint, JsonObject, JsonSchema, Lark, Regex, ToolCalls
from shared.grammar import InvalidConstraint, check

CAPABILITY = "constraints"
_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_OUTPUTS = ("json", "json_object", "regex", "choice", "grammar")


async def constraint_of(
    body: GenerationBody, card: ModelCard, text: Mapping[str, Any] | None = None, offer: Offer | None = None
) -> Constraint | None:
    """Return what the output must be; `text` is the field of that name of /v1/responses. Raises `ApiError`."""
    asked = list[tuple[str, Constraint]]()
    if body.response_format is not None:
        asked += _of_format("response_format", body.response_format, nested=True)
    if text is not None and text.get("format") is not None:
        asked += _of_format("text.format", text["format"], nested=False)
    for name in _GUIDED:
        value = getattr(body, name)
        if value is not None:
            asked.append((name, _of_guide(name, name.removeprefix("guided_"), value)))
    asked += _of_outputs(body.structured_outputs)
    if offer is not None:
        asked.append(("tools", offer.calls))
    if not asked:
        return None
    field, constraint = asked[0]
    if len(asked) > 1:
        raise invalid(asked[1][0], f"{field} and {asked[1][0]} both say what the output must be; send one of them")
    if CAPABILITY not in card.capabilities:
        raise ApiError(400, "unsupported_parameter", f"{field}: model {card.name} cannot follow a grammar", field)
    _check_ends(body, field, constraint)
    await asyncio.to_thread(_check, field, constraint, () if offer is None else offer.fields)
    return constraint


def _of_format(where: str, value: object, *, nested: bool) -> list[tuple[str, Constraint]]:
    """Read OpenAI's format: in chats a schema lies in `json_schema`, in responses beside `type`."""
    match value:
        case {"type": "text"}:
            return []
        case {"type": "json_object"}:
            return [(where, JsonObject())]
        case {"type": "json_schema"}:
            found = cast(Mapping[str, Any], value)
            inner = found.get("json_schema") if nested else found
            field = f"{where}.json_schema" if nested else where
            schema = cast(Mapping[str, Any], inner).get("schema") if isinstance(inner, dict) else None
            if not isinstance(schema, dict):
                raise invalid(f"{field}.schema", f"{field}.schema must be a JSON schema, an object")
            return [(f"{field}.schema", JsonSchema(json_schema=cast(dict[str, Any], schema)))]
        case _:
            raise invalid(f"{where}.type", f"{where}.type must be text, json_object or json_schema")


def _of_outputs(value: Mapping[str, Any] | None) -> list[tuple[str, Constraint]]:
    """Read vLLM's `structured_outputs`."""
    found = list[tuple[str, Constraint]]()
    for name, part in (value or {}).items():
        field = f"structured_outputs.{name}"
        if name not in _OUTPUTS:
            raise unsupported(field)
        if part is not None and part is not False:
            found.append((field, _of_guide(field, name, part)))
    return found


def _of_guide(field: str, kind: str, value: object) -> Constraint:
    try:
        match kind:
            case "json":
                return JsonSchema(json_schema=_schema(field, value))
            case "json_object":
                return JsonObject()
            case "regex":
                return Regex.model_validate({"pattern": value})
            case "choice":
                return Choice.model_validate({"options": value})
            case _:
                return Lark.model_validate({"lark": value})
    except ValidationError as error:
        found = complaint_of(error, {"pattern": value, "options": value, "lark": value})
        where = field + path_of(found.place[1:])
        raise invalid(where, found.about(where)) from None


def _schema(field: str, value: object) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise invalid(field, f"{field} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise invalid(field, f"{field} must be a JSON schema, an object")
    return cast(dict[str, Any], value)


def _check_ends(body: GenerationBody, field: str, constraint: Constraint) -> None:
    """Refuse what would end a text that is not whole, or go on behind its end."""
    ends: Sequence[str] = ("ignore_eos", "stop_token_ids", "max_repetition_run")
    if not isinstance(constraint, ToolCalls) or constraint.required:
        ends = (*ends, "stop")
    for name in ends:
        if getattr(body, name):
            raise invalid(name, f"{name} does not go with {field}, which tells where the output ends")
    if isinstance(constraint, ToolCalls) and body.replaces is not None:
        raise invalid(body.replaces, f"{body.replaces}: a stream of whole texts does not go with tools")


def _check(field: str, constraint: Constraint, fields: Sequence[str]) -> None:
    if isinstance(constraint, ToolCalls):
        for where, tool in zip(fields, constraint.tools, strict=True):
            _check_one(where, constraint.model_copy(update={"tools": (tool,), "required": True}))
    _check_one(field, constraint)


def _check_one(field: str, constraint: Constraint) -> None:
    try:
        check(constraint)
    except InvalidConstraint as error:
        raise invalid(field, f"{field}: {error}") from None
