"""Arguments of the client, checked before anything is sent: what is wrong is told as the HTTP api tells it."""

import operator
from collections.abc import Iterable, Mapping
from typing import Any, SupportsIndex, TypeVar, cast

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticCustomError

from shared.complaints import about, complaint_of, path_of
from shared.messages import ROLES, folded, role_for_template
from shared.vocabulary import find_foreign

_A_PROMPT = "must be a string, a list of token ids, or a list of messages"

Part = TypeVar("Part", bound=BaseModel)


class InvalidArgument(ValueError):
    """An argument is wrong. `field` is its name, or leads into it as far as the fault is: `stop[0]`."""

    def __init__(self, field: str, told: str) -> None:
        """`told`: what to say of the field, without its name."""
        super().__init__(about(field, told))
        self.field = field


def checked(kind: type[Part], given: Mapping[str, object]) -> Part:
    """Return the part of a command that arguments make; raises `InvalidArgument`."""
    try:
        # As strict as JSON's reader is: a text is no number, and true is not 1.
        return kind.model_validate(given, strict=True)
    except ValidationError as error:
        first = complaint_of(error, given)
        raise InvalidArgument(path_of(first.place), first.told) from None


def check_count(field: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidArgument(field, f"must be an integer of at least {least}")


def check_text(field: str, value: object) -> None:
    if not isinstance(value, str):
        raise InvalidArgument(field, "must be a string")


def prompt_parts(prompt: object, vocab_size: int) -> list[int] | list[dict[str, Any]]:
    """Return the token ids, or the messages, of a prompt that is no text; raises `InvalidArgument`."""
    if isinstance(prompt, bytes | bytearray | Mapping) or not isinstance(prompt, Iterable):
        raise InvalidArgument("prompt", _A_PROMPT)
    parts = list(cast(Iterable[object], prompt))
    if parts and isinstance(parts[0], Mapping):
        return [_message(f"prompt[{index}]", part) for index, part in enumerate(parts)]
    token_ids = [_token_id(f"prompt[{index}]", part) for index, part in enumerate(parts)]
    if foreign := find_foreign(token_ids, vocab_size):
        index, told = foreign
        raise InvalidArgument(f"prompt[{index}]", told)
    return token_ids


def _token_id(field: str, part: object) -> int:
    if isinstance(part, SupportsIndex) and not isinstance(part, bool):  # NumPy's integers too
        return operator.index(part)
    raise InvalidArgument(field, f"is no token id: prompt {_A_PROMPT}")


def _message(field: str, part: object) -> dict[str, Any]:
    if not isinstance(part, Mapping):
        raise InvalidArgument(field, "must be a message, as the first one is")
    message = dict(cast(Mapping[str, Any], part))
    role = message.get("role")
    if role is None:
        raise InvalidArgument(f"{field}.role", "is required")
    if role not in ROLES:
        raise InvalidArgument(f"{field}.role", f"must be one of {', '.join(ROLES)}")
    message["role"] = role_for_template(role)
    try:
        content = folded(message.get("content"))
    except PydanticCustomError as error:
        at = (error.context or {}).get("at", ())
        raise InvalidArgument(f"{field}.content{path_of(at)}", error.message()) from None
    if content is None and role != "assistant":
        raise InvalidArgument(f"{field}.content", "is required")
    message["content"] = content or ""
    return message
