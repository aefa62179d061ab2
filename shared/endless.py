# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
"""JSON schemas that no finite value fits, because they refer to themselves without a way out."""

from collections.abc import Mapping, Sequence
from typing import Any, cast
from urllib.parse import unquote

_MOST_ROUNDS = 32
"""Longer chains of references are taken for finite."""


def is_endless(schema: Mapping[str, Any]) -> bool:
    """Tell whether every value of a schema would have to hold another one, for ever.

    The least fixed point of "has a finite value": references count as endless until their target is seen to be finite.
    What is not known of a schema counts as finite.
    """
    targets = {reference: _find(schema, reference) for reference in _references(schema)}
    finite = {reference for reference, target in targets.items() if target is None}
    for _ in range(_MOST_ROUNDS):
        found = {name for name, target in targets.items() if name not in finite and _is_finite(target, finite)}
        if not found:
            return not _is_finite(schema, finite)
        finite |= found
    return False


def _is_finite(schema: object, finite: set[str]) -> bool:
    match schema:
        case {"$ref": str(reference)} if reference not in finite:
            return False
        case dict():
            parts = cast(dict[str, Any], schema)
            return _combines(parts, finite) and (_admits_others(parts) or _holds(parts, finite))
        case _:
            return True


def _combines(schema: Mapping[str, Any], finite: set[str]) -> bool:
    every, some = _list(schema.get("allOf")), [_list(schema.get(name)) for name in ("anyOf", "oneOf")]
    return all(_is_finite(part, finite) for part in every) and all(
        any(_is_finite(part, finite) for part in parts) for parts in some if parts
    )


def _admits_others(schema: Mapping[str, Any]) -> bool:
    """Tell whether a value may be neither an object nor an array."""
    kinds = schema.get("type")
    if kinds is None:
        return not ({"properties", "items", "prefixItems"} & set(schema))
    return any(kind not in ("object", "array") for kind in ([kinds] if isinstance(kinds, str) else _list(kinds)))


def _holds(schema: Mapping[str, Any], finite: set[str]) -> bool:
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else _list(kinds) or ["object", "array"]
    return any(
        _is_finite_object(schema, finite) if kind == "object" else _is_finite_list(schema, finite) for kind in kinds
    )


def _is_finite_object(schema: Mapping[str, Any], finite: set[str]) -> bool:
    properties = schema.get("properties")
    known = cast(dict[str, Any], properties) if isinstance(properties, dict) else {}
    names = (name for name in _list(schema.get("required")) if isinstance(name, str))
    return all(_is_finite(known.get(name), finite) for name in names)


def _is_finite_list(schema: Mapping[str, Any], finite: set[str]) -> bool:
    least = schema.get("minItems")
    if type(least) is not int or least <= 0:
        return True
    first = _list(schema.get("prefixItems"))[:least]
    rest = [schema.get("items")] if least > len(first) else []
    return all(_is_finite(part, finite) for part in (*first, *rest))


def _references(schema: object) -> set[str]:
    found, left = set[str](), [schema]
    while left:
        match left.pop():
            case dict() as part:
                if isinstance(reference := part.get("$ref"), str):
                    found.add(reference)
                left += part.values()
            case list() as parts:
                left += parts
            case _:
                pass
    return found


def _find(schema: object, reference: str) -> object:
    """Return what a reference within the schema names, None for what is elsewhere or nowhere."""
    if not reference.startswith("#"):
        return None
    for part in unquote(reference[1:]).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        match schema:
            case dict() if key in schema:
                schema = schema[key]
            case list() if key.isdecimal() and int(key) < len(schema):
                schema = schema[int(key)]
            case _:
                return None
    return schema


def _list(value: object) -> Sequence[Any]:
    return cast(list[Any], value) if isinstance(value, list) else ()
