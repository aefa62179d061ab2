# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false
"""The body of POST /v1/responses."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, cast

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from api.errors import invalid, unsupported
from api.schemas import GUIDED, GenerationBody

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXT_PARTS = ("input_text", "output_text", "text")
_EFFECTS: Mapping[str, tuple[object, ...]] = {
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
    "max_tool_calls": (),
    "truncation": ("disabled",),
}
"""Fields of this endpoint alone whose effect is not delivered, and the values (besides null) that ask for nothing."""


def _check_input(value: object) -> object:
    """Return a list of items."""
    match value:
        case str() if value:
            return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": value}]}]
        case [_, *_] if all(isinstance(item, dict) for item in value):
            return value
        case _:
            raise PydanticCustomError("input", "must be a string or a list of items, and not empty")


def _check_metadata(value: object) -> object:
    match value:
        case None:
            return value
        case dict() if len(value) <= 16 and all(
            isinstance(key, str) and len(key) <= 64 and isinstance(text, str) and len(text) <= 512
            for key, text in value.items()
        ):
            return value
        case _:
            raise PydanticCustomError("metadata", "must be up to 16 pairs of strings, of up to 64 and 512 characters")


Metadata = Annotated[
    dict[str, str] | None,
    BeforeValidator(_check_metadata),
    WithJsonSchema({"anyOf": [{"type": "object", "additionalProperties": {"type": "string"}}, {"type": "null"}]}),
]


class ResponseBody(GenerationBody):
    model_config = ConfigDict(frozen=True, strict=True, extra="allow")
    delivers: ClassVar[frozenset[str]] = GUIDED

    input: Annotated[
        Any,
        BeforeValidator(_check_input),
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}),
    ]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, description="Unset: 512, or what the context leaves.")
    previous_response_id: str | None = None
    background: bool | None = Field(default=None, description="Answer at once; the response goes on by itself.")
    store: bool | None = Field(default=None, description="Unset: true.")
    metadata: Metadata = None
    text: dict[str, Any] | None = Field(
        default=None,
        description="Its format is text, json_object, or json_schema with a schema that the answer follows.",
    )

    @property
    def wanted_tokens(self) -> tuple[str, int | None]:
        return "max_output_tokens", self.max_output_tokens

    @property
    def stored(self) -> bool:
        return self.store is not False


def check_effects(body: ResponseBody) -> None:
    """Raise `ApiError` for what is not delivered, and for what contradicts itself."""
    extra = body.model_extra or {}
    for name, harmless in _EFFECTS.items():
        value = extra.get(name)
        if value is not None and value not in harmless:
            raise unsupported(name)
    if body.background and not body.stored:
        raise invalid("store", "a background response must be stored: nothing else would tell its end")


def to_messages(items: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return the items as templates take them; raises `ApiError` naming the item."""
    messages: list[dict[str, str]] = []
    for index, item in enumerate(items):
        where = f"input[{index}]"
        kind = item.get("type", "message")
        if kind == "reasoning":
            continue
        if kind != "message":
            raise unsupported(f"{where}.type")
        role = _ROLES.get(cast(str, item.get("role"))) if isinstance(item.get("role"), str) else None
        if role is None:
            raise invalid(f"{where}.role", f"{where}.role must be one of {', '.join(_ROLES)}")
        messages.append({"role": role, "content": _text_of(item.get("content"), where)})
    if not messages:
        raise invalid("input", "input has no message")
    return messages


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
                        raise invalid(f"{where}.content[{number}]", f"{where}.content[{number}] must be a text part")
            return "".join(texts)
        case _:
            raise invalid(f"{where}.content", f"{where}.content must be a string or a list of text parts")


def as_items(items: Sequence[Mapping[str, Any]], response_id: str) -> list[dict[str, Any]]:
    """Return the items as `input_items` lists them: each a message with an id and parts."""
    listed: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        content = item.get("content")
        parts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
        fallback = f"msg_{response_id.rpartition('_')[2]}_{index}"
        listed.append(
            {"type": "message", "status": "completed", **item, "content": parts, "id": item.get("id") or fallback}
        )
    return listed
