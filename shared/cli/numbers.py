"""Numbers that are typed, with complaints in the words of who typed them."""

import math
from collections.abc import Callable

import typer

Reader = Callable[[str], float]


def finite(value: float | None) -> float | None:
    """Return the number of an option; raises `typer.BadParameter` for infinity and NaN, which no JSON holds."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter("must be a finite number")
    return value


def whole(text: str) -> int:
    """Return a whole number; raises ValueError."""
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number") from None


def number(text: str) -> float:
    """Return a finite number; raises ValueError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is not a number")
    return value


def between(read: Reader, low: float, high: float | None = None) -> Reader:
    """Return a reader of numbers from `low` to `high`, both included; None: no end."""

    def bounded(text: str) -> float:
        value = read(text)
        if value < low:
            raise ValueError(f"{text} is below {low}")
        if high is not None and value > high:
            raise ValueError(f"{text} is above {high}")
        return value

    return bounded
