# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false
"""The body of POST /v1/responses."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from api.errors import invalid, unsupported
from api.metadata import Metadata
from api.schemas import GUIDED, GenerationBody, refuse_replacing
from shared.commands import COUNT_LIMIT, MOST_LOGPROBS

_LOGPROBS = "message.output_text.logprobs"
_INCLUDES = (
    _LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
"""What a response may be asked to include; all but the first is about items that no response has here."""
_EFFECTS: Mapping[str, tuple[object, ...]] = {
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
    "max_tool_calls": (),
    # An input that is too long is refused in any case, and another one needs no truncation.
    "truncation": ("disabled", "auto"),
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


class ResponseBody(GenerationBody):
    model_config = ConfigDict(frozen=True, strict=True, extra="allow")
    delivers: ClassVar[frozenset[str]] = GUIDED | {"tools", "tool_choice", "top_logprobs"}
    refuses: ClassVar[frozenset[str]] = frozenset(_EFFECTS)

    input: Annotated[
        Any,
        BeforeValidator(_check_input),
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}),
    ]
    instructions: str | None = None
    max_output_tokens: int | None = Field(
        default=None, ge=1, lt=COUNT_LIMIT, description="Unset: 512, or what the context leaves."
    )
    previous_response_id: str | None = None
    background: bool | None = Field(default=None, description="Answer at once; the response goes on by itself.")
    store: bool | None = Field(default=None, description="Unset: true.")
    metadata: Metadata = None
    text: dict[str, Any] | None = Field(
        default=None,
        description="Its format is text, json_object, or json_schema with a schema that the answer follows.",
    )

    tools: list[dict[str, Any]] | None = Field(default=None, description="Functions that the answer may call.")
    tool_choice: Literal["none", "auto", "required", "any"] | dict[str, Any] | None = Field(
        default=None, description="Unset: auto. required, a function or allowed_tools make sure of a call."
    )
    parallel_tool_calls: bool | None = Field(default=None, description="False: one call at most. Unset: true.")
    include: list[str] | None = Field(
        default=None, max_length=16, description=f"{_LOGPROBS}: how probable each token was when it was decided."
    )
    top_logprobs: int | None = Field(
        default=None, ge=0, le=MOST_LOGPROBS, description="Log-probabilities of so many others beside each token."
    )

    @property
    def wanted_logprobs(self) -> int | None:
        asked = _LOGPROBS in (self.include or ())
        return self.top_logprobs or 0 if asked or self.top_logprobs else None

    @property
    def wanted_tokens(self) -> tuple[str, int | None]:
        if self.max_output_tokens is None and self.max_tokens is not None:
            return "max_tokens", self.max_tokens
        return "max_output_tokens", self.max_output_tokens

    @property
    def stored(self) -> bool:
        return self.store is not False


def check_effects(body: ResponseBody) -> None:
    """Raise `ApiError` for what is not delivered, and for what contradicts itself."""
    refuse_replacing(body)
    extra = body.model_extra or {}
    for name, harmless in _EFFECTS.items():
        value = extra.get(name)
        if value is not None and value not in harmless:
            raise unsupported(name)
    for index, name in enumerate(body.include or ()):
        if name not in _INCLUDES:
            raise invalid(f"include[{index}]", f"include[{index}] must be one of {', '.join(_INCLUDES)}")
    if body.background and not body.stored:
        raise invalid("store", "a background response must be stored: nothing else would tell its end")
