"""Numbers that are JSON and that nothing here can hold."""

import json
import math
from typing import cast

from shared.complaints import path_of


def beyond_range(body: bytes) -> str:
    """Return the path of the first number of a JSON text that no float of 64 bits holds; empty without any."""
    try:
        # Of an integer too: it may have more digits than Python makes one of.
        whole: object = json.loads(body, parse_int=float, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return ""
    open_: list[tuple[tuple[int | str, ...], object]] = [((), whole)]
    while open_:
        place, value = open_.pop()
        match value:
            case float() if math.isinf(value):
                return path_of(place)
            case dict():
                parts = list(cast(dict[str, object], value).items())
            case list():
                parts = list(enumerate(cast(list[object], value)))
            case _:
                continue
        open_ += [((*place, name), part) for name, part in reversed(parts)]
    return ""


def held_by_none(field: str) -> str:
    """Return what to say of a field that `beyond_range` has found."""
    return f"{field} must be a number that 64 bits hold"


def _refuse(name: str) -> None:
    raise ValueError(f"JSON has no {name}")
