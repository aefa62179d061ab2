"""What is wrong with what somebody asks for: pydantic's findings in JSON's words, with the path of the field."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from pydantic import ValidationError


@dataclass(frozen=True, slots=True)
class Complaint:
    """What is wrong with a part of a body."""

    place: tuple[int | str, ...]
    told: str
    code: str

    def about(self, field: str) -> str:
        return about(field, self.told)


def about(field: str, told: str) -> str:
    """Return a sentence about a field, or the field's name before what is told as one."""
    return f"{field} {told}" if told.startswith(("must ", "is ")) else f"{field}: {told}"


def complaint_of(error: ValidationError, body: object) -> Complaint:
    """Return the first complaint about a body, in JSON's words."""
    first = error.errors(include_url=False, include_input=False)[0]
    return complaint_in(first, _place(first["loc"], body, missing=first["type"] == "missing"))


def complaint_in(first: Mapping[str, Any], place: tuple[int | str, ...]) -> Complaint:
    """Return what an entry of `ValidationError.errors()` says of a place."""
    context = first.get("ctx", {})
    place = (*place, *context.get("at", ()))
    match first["type"]:
        case "missing":
            return Complaint(place, "is required", "missing_required_parameter")
        case "extra_forbidden":
            return Complaint(place, "is not a known option", "unknown_parameter")
        case kind if kind in _WORDS:
            return Complaint(place, _WORDS[kind].format(**context), "invalid_value")
        case _:
            return Complaint(place, first["msg"].replace("Input should", "must", 1), "invalid_value")


_WORDS: Mapping[str, str] = {
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "dict_type": "must be an object",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "string_type": "must be a string",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "too_short": "must have at least {min_length} items",
    "too_long": "must have at most {max_length} items",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "union_tag_invalid": "must have one of {expected_tags} as its {discriminator}",
    "union_tag_not_found": "must have a {discriminator}",
}
"""JSON's words where pydantic has Python's."""


def _place(location: tuple[int | str, ...], body: object, missing: bool) -> tuple[int | str, ...]:
    """Return as much of a location as leads through the body: pydantic adds the branches of unions to it."""
    for depth, part in enumerate(location):
        match body:
            case dict() if part in body or (missing and depth == len(location) - 1):
                body = cast(dict[int | str, object], body).get(part)
            case list() | tuple() if isinstance(part, int) and part < len(cast(Sequence[object], body)):
                body = cast(Sequence[object], body)[part]
            case _:
                return location[:depth]
    return location


def path_of(location: tuple[int | str, ...]) -> str:
    """Return `messages[0].content` for ("messages", 0, "content")."""
    parts = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return parts.removeprefix(".")
