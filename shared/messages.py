"""Chat messages as callers write them, and as templates know them: one rule for the api and the direct client."""

from collections.abc import Sequence
from typing import Literal, cast, get_args

from pydantic_core import PydanticCustomError

Role = Literal["system", "developer", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = get_args(Role)


def role_for_template(role: Role) -> Role:
    """`developer` is the newer name of `system`, which templates know."""
    return "system" if role == "developer" else role


def folded(content: object) -> str | None:
    """Fold a list of text parts into one string, and return any other content as it is.

    Raises `PydanticCustomError`, whose context may have the place as `at`.
    """
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise PydanticCustomError("content", "must be a string or a list of text parts")
    texts: list[str] = []
    for part in cast(Sequence[object], content):
        match part:
            case {"type": "text", "text": str(text)} | {"type": "refusal", "refusal": str(text)}:
                texts.append(text)
            case _:
                at = (len(texts),)
                example = '{"type": "text", "text": "..."}'
                raise PydanticCustomError("content", "must be {example}", {"at": at, "example": example})
    return "".join(texts)
