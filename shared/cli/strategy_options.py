"""`--set` of `diffleet generate`: options of a decoding strategy, checked before anything is asked."""

import json
import math
from collections.abc import Sequence

from pydantic import ValidationError

from shared.complaints import complaint_of
from shared.decoding import KINDS


def options_from(settings: Sequence[str], strategy: str | None) -> dict[str, object]:
    """Return the options that `NAME=VALUE` make, for this strategy; None: for any, since it is the model's own.

    Raises ValueError, which names the option and, where it is none, those that there are.
    """
    options: dict[str, object] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise ValueError(f"{setting!r} is not NAME=VALUE")
        if name in options:
            raise ValueError(f"{name} is given twice")
        options[name] = _checked(name, _value(text), strategy)
    return options


def _checked(name: str, value: object, strategy: str | None) -> object:
    """Return the value if a strategy takes it."""
    # Whether there is a strategy of that name is for the fleet to say.
    kind = KINDS.get(strategy or "")
    kinds = tuple(KINDS.values()) if kind is None else (kind,)
    known = {field for kind in kinds for field in kind.model_fields} - {"strategy"}
    if name not in known:
        who = "the strategies have" if kind is None else f"strategy {strategy} has"
        raise ValueError(f"{name!r} is none of the options that {who}: {', '.join(sorted(known))}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number")
    told = ""
    for kind in kinds:
        if name not in kind.model_fields:
            continue
        try:
            kind.model_validate({name: value}, strict=True)
            return value
        except ValidationError as error:
            told = complaint_of(error, {name: value}).about(name)
    raise ValueError(told)


def _value(text: str) -> object:
    """Return what JSON makes of a text: a number or a truth value; else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
