# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false
"""HTTP bodies: what callers may send, checked strictly where it counts.

Unknown fields at the top are ignored, as OpenAI's clients expect; an unknown option inside `diffusion`, and a field
whose effect nobody would deliver (`REFUSED`), is an error that names it.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from api.errors import invalid, of_validation, unsupported
from api.metadata import Metadata
from shared.commands import COUNT_LIMIT, LONGEST_BLOCK, MOST_LOGPROBS, MS_LIMIT
from shared.complaints import complaint_of
from shared.decoding import Confidence, Strategy
from shared.messages import Role, folded, role_for_template

StreamMode = Literal["block_append", "denoise"]
Preset = Literal["fast", "balanced", "quality"]
CanvasStream = Literal["append", "frames", "replace"]
FrameDetail = Literal["text", "tokens", "full"]
ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast"]
MOST_CHOICES = 64
"""Requests that one call may make: choices times prompts."""

StopString = Annotated[str, Field(min_length=1, max_length=256)]
Integer = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""One that 64 bits hold."""

REFUSED: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "regex": (),
    "ebnf": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "use_beam_search": (False,),
    "return_token_ids": (False,),
    "continue_final_message": (False,),
    "chat_template": (),
}
"""Fields whose effect only some endpoints deliver, or none, and the values (besides null) that ask for nothing.

An endpoint that delivers one declares it in its body and names it in `delivers`.
"""

GUIDED = frozenset({"structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"})
STRUCTURED = GUIDED | {"response_format"}


def as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _none_if_empty(value: object) -> object:
    return value or None


def _check_prompt(value: object) -> object:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(item) is int for item in value):
        return _within_64_bits(value)
    raise PydanticCustomError("prompt", "must be a string or a list of token ids")


def _within_64_bits(ids: Sequence[int], place: tuple[int, ...] = ()) -> Sequence[int]:
    """Return token ids as they are; which ones the model has is told later."""
    for index, each in enumerate(ids):
        if not 0 <= each < 2**63:
            raise PydanticCustomError("token_id", "must be a token id, from 0 up", {"at": (*place, index)})
    return ids


def _check_prompts(value: object) -> object:
    """Return a list of prompts, each a string or a list of token ids."""
    match value:
        case str():
            return [value]
        case [_, *_] if all(type(item) is int for item in value):
            return [_within_64_bits(value)]
        case [_, *_] if all(isinstance(item, str) for item in value):
            return value
        case [_, *_] if all(isinstance(item, list) and all(type(part) is int for part in item) for item in value):
            return [_within_64_bits(item, (index,)) for index, item in enumerate(value)]
        case _:
            raise PydanticCustomError(
                "prompt", "must be a string, a list of strings, a list of token ids, or a list of such lists"
            )


_INTEGERS: dict[str, Any] = {"type": "array", "items": {"type": "integer"}}
Prompts = Annotated[
    Any,
    BeforeValidator(_check_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                _INTEGERS,
                {"type": "array", "items": _INTEGERS},
            ]
        }
    ),
]
Prompt = Annotated[
    Any,
    BeforeValidator(_check_prompt),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]}),
]
Content = Annotated[
    str | None,
    BeforeValidator(folded),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "object", "description": "A text part."}},
                {"type": "null"},
            ]
        }
    ),
]


class StrictBody(BaseModel):
    """Types are taken as they are; unknown fields are ignored."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class HoleOption(BaseModel):
    """A place in a template that the model fills."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    hole: str = Field(min_length=1, max_length=64, description="Its name.")
    max_tokens: int = Field(default=16, ge=1, le=4096)


def _check_template(value: object) -> object:
    if not isinstance(value, list):
        raise PydanticCustomError("template", "must be a list of texts and holes")
    pieces = [piece if isinstance(piece, str) else _check_hole(piece, index) for index, piece in enumerate(value)]
    names = [piece.hole for piece in pieces if isinstance(piece, HoleOption)]
    if not names:
        raise PydanticCustomError("template", "must have one hole at least")
    twice = next((name for index, name in enumerate(names) if name in names[:index]), None)
    if twice is not None:
        raise PydanticCustomError("template", "{name} is the name of two holes", {"name": repr(twice)})
    for before, after in pairwise(pieces):
        if isinstance(before, HoleOption) and not (isinstance(after, str) and after):
            raise PydanticCustomError("template", "must have text between two holes")
    return pieces


def _check_hole(value: object, index: int) -> HoleOption:
    try:
        return HoleOption.model_validate(value)
    except ValidationError as error:
        found = complaint_of(error, value)
        raise PydanticCustomError("template", "{told}", {"told": found.told, "at": (index, *found.place)}) from None


Template = Annotated[
    list[str | HoleOption],
    BeforeValidator(_check_template),
    Field(max_length=256),
    WithJsonSchema(
        {"type": "array", "items": {"anyOf": [{"type": "string"}, HoleOption.model_json_schema()]}, "maxItems": 256}
    ),
]


class DiffusionOptions(BaseModel):
    """How the canvas is decoded. What is unset is the model's own default."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    strategy: Strategy | None = Field(default=None, description="Which positions are accepted in a step.")
    remasking: Strategy | Literal["low_confidence"] | None = Field(
        default=None, description="Another word for strategy, with LLaDA's `low_confidence` for low_confidence_static."
    )
    threshold: float | None = Field(default=None, ge=0.0, le=1.0)
    steps: int | None = Field(default=None, ge=1, lt=COUNT_LIMIT, description="Denoise steps of a block.")
    bound: float | None = Field(
        default=None, gt=0.0, description="Entropy bound of `entropy_bounded` and `streaming_window`."
    )
    factor: float | None = Field(default=None, gt=0.0, le=1e6, description="Factor of `factor`.")
    max_parallel: int | None = Field(
        default=None, ge=1, lt=COUNT_LIMIT, description="Most positions that a step of `adaptive_parallel` accepts."
    )
    fallback: Literal["confidence", "leftmost"] | None = None
    tau_add: float | None = Field(
        default=None,
        gt=0.0,
        le=1.0,
        description="`multi_block` begins the next block when this share of the last one is decided.",
    )
    tau_semi: float | None = Field(
        default=None,
        ge=0.0,
        le=1.0,
        description="Share of a block that must be decided before `multi_block` takes the best of the next one where "
        "none is sure.",
    )
    tau_acc: float | None = Field(default=None, ge=0.0, le=1.0, description="How sure is sure for `multi_block`.")
    max_blocks: int | None = Field(default=None, ge=1, le=64, description="Blocks that `multi_block` decides at once.")
    position_penalty: float | None = Field(
        default=None,
        ge=0.0,
        description="What `streaming_window` adds to an entropy for each token from the first undecided one.",
    )
    confidence: Confidence | None = Field(
        default=None,
        description="What ranks positions: model, the model's own probabilities; tempered, those divided by the "
        "temperature; filtered, what top_k and top_p leave of these.",
    )
    filler_rules: bool | None = None
    block_length: int | None = Field(default=None, ge=1, le=LONGEST_BLOCK)
    max_nfe: int | None = Field(default=None, ge=1, lt=COUNT_LIMIT)
    preset: Preset | None = Field(
        default=None,
        description="fast: a lower threshold; balanced: the model's own; quality: one position a step. What is set "
        "beside it wins.",
    )
    early_stop: bool | None = Field(default=None, description="Another word for filler_rules.")
    stream: CanvasStream | None = Field(
        default=None,
        description="append (default): committed text; frames: the canvas too, beside it; replace: every delta is the "
        "whole text so far, guesses included (Mercury's `diffusing`).",
    )
    frame_interval_ms: int | None = Field(
        default=None, ge=0, le=10_000, description="Least time between two frames of a stream."
    )
    frame_detail: FrameDetail | None = Field(
        default=None,
        description="text: the block as text; tokens (default): edits of positions; full: with their confidence.",
    )
    cfg_scale: float | None = Field(
        default=None,
        ge=0.0,
        le=100.0,
        description="Guidance: logits move so many times further away from those of a masked prompt. Doubles the work.",
    )
    canvas_length: int | None = Field(default=None, ge=1, lt=COUNT_LIMIT, description="Not supported.")
    deadline_ms: int | None = Field(
        default=None,
        ge=1,
        lt=MS_LIMIT,
        description="Answer with what there is by then, counted from the submit: one last forward fills the block.",
    )
    template: Template | None = Field(
        default=None,
        description="What stands behind the prompt: texts, which come back as they are, and holes "
        '({"hole": name, "max_tokens": n}), which are filled together. On chats and completions.',
    )
    report: bool | None = Field(default=None, description="Add `diffusion` with costs and times to the answer.")


class StreamOptions(StrictBody):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class AdapterChoice(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    name: str = Field(min_length=1, max_length=96)
    scale: float = Field(default=1.0, ge=-100.0, le=100.0, description="Factor beside the adapter's own.")


MOST_ADAPTERS = 7
"""Of one request, beside the one that its model's name may hold."""
Adapters = Annotated[list[AdapterChoice], Field(max_length=MOST_ADAPTERS)]


class WebhookBody(StrictBody):
    url: str = Field(min_length=1, max_length=2048, description="https://, a host of the public internet.")
    metadata: Metadata = Field(default=None, description="Sent back as it is.")


class GenerationBody(StrictBody):
    """What every generating endpoint takes."""

    delivers: ClassVar[frozenset[str]] = STRUCTURED
    """Fields of `REFUSED` that this body's endpoint acts on."""

    model: str | None = Field(
        default=None, description="May be left out where only one model has workers; `base:adapter` adds an adapter."
    )
    lora: Adapters | None = Field(default=None, description="Adapters whose effects are summed.")
    max_tokens: int | None = Field(
        default=None, ge=1, lt=COUNT_LIMIT, description="Unset: 512, or what the context leaves."
    )
    min_tokens: int | None = Field(default=None, ge=0, lt=COUNT_LIMIT)
    temperature: float | None = Field(default=None, ge=0.0, le=5.0, description="Unset: the model's own default.")
    top_p: float | None = Field(default=None, ge=0.0, le=1.0, description="0 takes the most probable token.")
    top_k: int | None = Field(default=None, ge=-1, lt=COUNT_LIMIT, description="0 or -1 keeps all tokens.")
    min_p: float | None = Field(default=None, ge=0.0, le=1.0)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63, description="Unset: a fresh one for each request.")
    presence_penalty: float | None = Field(
        default=None, ge=-2.0, le=2.0, description="Taken off the logits of tokens that the answer has."
    )
    frequency_penalty: float | None = Field(
        default=None, ge=-2.0, le=2.0, description="Taken off as often as the answer has the token."
    )
    repetition_penalty: float | None = Field(
        default=None, gt=0.0, le=10.0, description="Above 1: what prompt and answer have becomes less likely."
    )
    logit_bias: dict[str, float] | None = Field(
        default=None, max_length=1024, description="Token id to -100 .. 100, added to its logit."
    )
    stop: Annotated[Annotated[list[StopString], Field(max_length=16)] | None, BeforeValidator(as_list)] = None
    stop_token_ids: list[Integer] | None = Field(default=None, max_length=64)
    ignore_eos: bool | None = None
    max_nfe: int | None = Field(default=None, ge=1, lt=COUNT_LIMIT, description="Cap on denoising forwards.")
    max_repetition_run: int | None = Field(
        default=None, ge=1, lt=COUNT_LIMIT, description="End after so many equal tokens in a row."
    )
    block_length: int | None = Field(default=None, ge=1, le=LONGEST_BLOCK)
    cache_prompt: bool | None = Field(
        default=None, description="False: neither use what others have written of this prompt nor let them use this."
    )
    stream: bool | None = None
    stream_mode: StreamMode | None = Field(
        default=None, description="block_append (default): committed text only; denoise: snapshots of the canvas too."
    )
    user: str | None = Field(default=None, max_length=256)
    priority: int | None = Field(
        default=None, ge=-(2**31), lt=2**31, description="Below 0: before the others; above 0: behind them."
    )
    service_tier: ServiceTier | None = Field(default=None, description="priority, or flex for the bulk lane.")
    response_format: dict[str, Any] | None = Field(
        default=None, description="text, json_object, or json_schema with a schema that the answer follows."
    )
    guided_json: dict[str, Any] | str | None = Field(default=None, description="A JSON schema.")
    guided_regex: str | None = Field(default=None, description="A pattern of the whole output.")
    guided_choice: list[str] | None = Field(default=None, description="The output is one of these.")
    guided_grammar: str | None = Field(default=None, description="A grammar in llguidance's dialect of Lark.")
    structured_outputs: dict[str, Any] | None = Field(
        default=None, description="vLLM's word for these: json, json_object, regex, choice or grammar."
    )
    webhook: WebhookBody | None = Field(
        default=None, description="Who is told, signed, once the request has ended; it goes on if its caller leaves."
    )
    diffusing: bool | None = Field(default=None, description="Mercury's word for diffusion.stream `replace`.")
    diffusion: DiffusionOptions | None = None

    @property
    def choices(self) -> int:
        """How many answers to each prompt."""
        return 1

    @property
    def default_max_tokens(self) -> int:
        return 512

    @property
    def wanted_logprobs(self) -> int | None:
        """How many candidates to report with each token; None: no log-probabilities."""
        return None

    @property
    def canvas_stream(self) -> CanvasStream | Literal["denoise"]:
        """What a stream shows of the canvas; `denoise` is the native mode, with whole snapshots."""
        asked = self.diffusion.stream if self.diffusion else None
        if asked is not None:
            return asked
        if self.diffusing:
            return "replace"
        return "denoise" if self.stream_mode == "denoise" else "append"

    @property
    def replaces(self) -> str | None:
        """The field that asks for a stream of whole texts, if one does."""
        if self.canvas_stream != "replace":
            return None
        return "diffusion.stream" if self.diffusion and self.diffusion.stream else "diffusing"

    @property
    def wanted_tokens(self) -> tuple[str, int | None]:
        """The field that bounds the output, and its value."""
        return "max_tokens", self.max_tokens


def refuse_replacing(body: GenerationBody) -> None:
    """Raise `ApiError` for what only chats stream."""
    if body.replaces is not None:
        raise invalid(
            body.replaces, f"{body.replaces}: streams of whole texts are a mode of chats", "unsupported_value"
        )


class GenerateBody(GenerationBody):
    delivers = STRUCTURED | {"logprobs"}

    prompt: Prompt = Field(description="Text, which is not put into a chat template, or token ids.")
    logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MOST_LOGPROBS,
        description="Log-probability of each token when it was decided, and of so many others.",
    )

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs


class CalledFunction(StrictBody):
    name: str
    arguments: str = Field(default="{}", description="JSON text.")


class CalledTool(StrictBody):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """Return the call as templates know it: with arguments as an object, where they are one."""
        try:
            arguments: object = orjson.loads(self.function.arguments)
        except orjson.JSONDecodeError:
            arguments = self.function.arguments
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


class Prediction(StrictBody):
    """What the answer is expected to be, for the most part."""

    type: Literal["content"] = "content"
    content: Content


class ChatMessage(StrictBody):
    role: Role
    content: Content = None
    refusal: str | None = Field(default=None, description="What the assistant has said in the place of content.")
    tool_calls: Annotated[list[CalledTool] | None, BeforeValidator(_none_if_empty)] = Field(
        default=None, description="What the assistant has called."
    )
    tool_call_id: str | None = Field(default=None, description="The call that a message of role tool answers.")
    name: str | None = None

    @model_validator(mode="after")
    def _check_silence(self) -> "ChatMessage":
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("content", "is required", {"at": ("content",)})
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message as templates know it."""
        told: dict[str, Any] = {
            "role": role_for_template(self.role),
            "content": self.content or self.refusal or "",
        }
        if self.tool_calls:
            told["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.role == "tool":
            told |= {"tool_call_id": self.tool_call_id, "name": self.name}
        return told


class CompletionBody(GenerationBody):
    delivers = STRUCTURED | {"n", "best_of", "echo", "logprobs", "suffix"}

    prompt: Prompts = Field(description="Text, token ids, or a list of either; not put into a chat template.")
    n: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    best_of: int | None = Field(default=None, ge=1, le=MOST_CHOICES, description="No other number than `n`.")
    echo: bool | None = Field(default=None, description="Put the prompt before its answers.")
    suffix: str | None = Field(
        default=None,
        max_length=1_000_000,
        description="What stands behind the answer, which is decided with it in view.",
    )
    logprobs: int | None = Field(
        default=None,
        ge=0,
        le=5,
        description="Log-probability of each token when it was decided, and of so many others.",
    )
    stop: Annotated[Annotated[list[StopString], Field(max_length=4)] | None, BeforeValidator(as_list)] = None
    max_tokens: int | None = Field(default=None, ge=1, lt=COUNT_LIMIT, description="Unset: 16, as OpenAI has it.")
    stream_options: StreamOptions | None = None

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def default_max_tokens(self) -> int:
        return 16

    @property
    def wanted_logprobs(self) -> int | None:
        if self.logprobs is not None and self.echo:
            raise invalid("logprobs", "logprobs of an echoed prompt are not supported; leave echo out")
        return self.logprobs


class ChatBody(GenerationBody):
    delivers = STRUCTURED | {"n", "logprobs", "top_logprobs", "tools", "tool_choice"}

    n: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    messages: list[ChatMessage] = Field(min_length=1)
    stop: Annotated[Annotated[list[StopString], Field(max_length=4)] | None, BeforeValidator(as_list)] = None
    max_completion_tokens: int | None = Field(
        default=None, ge=1, lt=COUNT_LIMIT, description="Newer name of max_tokens; wins over it."
    )
    prediction: Prediction | None = Field(
        default=None,
        description="A draft of the answer: tokens that the model would choose itself cost fewer forwards.",
    )
    logprobs: bool | None = Field(default=None, description="Log-probability of each token when it was decided.")
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS, description="Of so many others beside it.")
    stream_options: StreamOptions | None = None
    add_generation_prompt: bool | None = Field(default=None, description="False: without the start of an answer.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, max_length=16, description="What else the model's chat template asks for: enable_thinking, ..."
    )
    tools: list[dict[str, Any]] | None = Field(default=None, description="Functions that the answer may call.")
    tool_choice: Literal["none", "auto", "required", "any"] | dict[str, Any] | None = Field(
        default=None, description="Unset: auto. required, a function or allowed_tools make sure of a call."
    )
    parallel_tool_calls: bool | None = Field(default=None, description="False: one call at most. Unset: true.")

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def wanted_tokens(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().wanted_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs to be true")
        return (self.top_logprobs or 0) if self.logprobs else None


Body = TypeVar("Body", bound=BaseModel)


def parse(kind: type[Body], value: object) -> Body:
    """Check a decoded JSON body; raises `ApiError` naming the field."""
    if not isinstance(value, dict):
        raise invalid(None, "the body must be a JSON object")
    fields: dict[str, object] = value
    delivered: frozenset[str] = getattr(kind, "delivers", frozenset())
    for name, harmless in REFUSED.items():
        if name not in delivered and not _asks_nothing(fields.get(name), harmless):
            raise unsupported(name)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise of_validation(_within_range(kind, fields, error), fields) from None


def _within_range(kind: type[BaseModel], fields: dict[str, object], error: ValidationError) -> ValidationError:
    """Return the error, or one that names the range, of an integer beyond 64 bits: orjson makes a float of that."""
    if not _restore_integers(fields):
        return error
    try:
        kind.model_validate(fields)
    except ValidationError as exact:
        return exact
    return error


def _restore_integers(value: object) -> bool:
    """Make integers beyond 64 bits of the floats that may have been such, and tell whether there were any.

    Rounding may have brought one back to the edge, so those near it become twice as large: that no range holds them is
    all that is left to say of them. All still have a float.
    """
    found = False
    open_: list[Any] = [value]
    while open_:
        inner = open_.pop()
        match inner:
            case dict():
                places: list[Any] = list(inner)
            case list():
                places = list(range(len(inner)))
            case _:
                continue
        for place in places:
            part: object = inner[place]
            if isinstance(part, float) and abs(part) >= 2**63 and part.is_integer():
                inner[place], found = int(part) * (2 if abs(part) < 2**65 else 1), True
            elif isinstance(part, dict | list):
                open_.append(part)
    return found


def known_fields(kind: type[BaseModel]) -> frozenset[str]:
    """Return the names in a body that have an effect, or whose effect is refused where it is asked for."""
    effects: frozenset[str] = getattr(kind, "refuses", frozenset())
    return frozenset(kind.model_fields) | REFUSED.keys() | effects


def _asks_nothing(value: object, harmless: tuple[object, ...]) -> bool:
    # `True == 1` in Python, and not in JSON.
    return value is None or any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in harmless
    )
