"""What a front, or any program, may ask of the fleet.

A command travels as JSON in a versioned envelope:

    {"v": 1, "kind": "generate", "must": [], "body": {...}}

Fields that a reader does not know are ignored, so that old workers serve new fronts; a field named in `must` may not be
ignored: a reader that does not know it raises `UnsupportedCommand`, and the request is handed back for a newer worker.
"""

from typing import Annotated, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shared.constraints import Constraint
from shared.decoding import Decoding
from shared.holes import HOLE

WIRE_VERSION = 1

COUNT_LIMIT = 2**31
"""Counts are below it: a payload from anywhere must not overflow a worker's integers."""
MS_LIMIT = 2**41
MOST_LOGPROBS = 20
LONGEST_BLOCK = 4096
"""The longest block that a request may ask for, whatever its model could take."""

_CONSEQUENTIAL = ("embed", "edits", "logprobs", "constraint", "lora", "template")
"""Fields that a worker must know if they are set: without them the answer would be to another question."""

Lane = Literal["rt", "std", "bulk"]
LANES: tuple[Lane, ...] = ("rt", "std", "bulk")


class UnsupportedCommand(Exception):
    """The envelope has a version, kind or must-understand field that this reader does not know."""


class InvalidCommand(Exception):
    """The payload is not a command at all, or one of its fields is out of range; the message names the field."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Sampling(_Part):
    """How a token is drawn from its distribution. Draws are seeded by (seed, absolute position, step in the block)."""

    temperature: float = Field(default=0.0, ge=0.0, le=5.0, description="0 takes the most probable token.")
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(
        default=0, ge=0, lt=COUNT_LIMIT, description="0 keeps all tokens; 1 takes the most probable one."
    )
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    seed: int = Field(default=0, ge=0, lt=2**63)


class LogitEdits(_Part):
    """Edits of the logits before anything is drawn from them, in this order: repetition, presence and frequency, bias.

    What counts as produced is what is decided of the answer when a forward begins, in whatever order it was decided.
    """

    repetition_penalty: float = Field(
        default=1.0,
        gt=0.0,
        le=100.0,
        description="Divides a positive logit, and multiplies a negative one, of each token that the prompt or the "
        "answer has (CTRL, arXiv 1909.05858).",
    )
    presence_penalty: float = Field(
        default=0.0, ge=-100.0, le=100.0, description="Taken off the logit of each token that the answer has."
    )
    frequency_penalty: float = Field(
        default=0.0, ge=-100.0, le=100.0, description="Taken off as often as the answer has the token."
    )
    logit_bias: tuple[tuple[Annotated[int, Field(ge=0)], float], ...] = Field(
        default=(), description="(token id, what is added to its logit)."
    )


class Limits(_Part):
    """When a request ends. Times are milliseconds from the submit."""

    max_tokens: int = Field(default=512, ge=1, lt=COUNT_LIMIT, description="Exact upper bound of produced tokens.")
    min_tokens: int = Field(default=0, ge=0, lt=COUNT_LIMIT)
    max_nfe: int | None = Field(
        default=None,
        ge=1,
        lt=COUNT_LIMIT,
        description="Cap on denoising forwards; what is left is filled in the last.",
    )
    deadline_ms: int | None = Field(
        default=None,
        ge=1,
        lt=MS_LIMIT,
        description="Answer with what there is by then: the block that is being decided is filled in one forward.",
    )
    max_repetition_run: int | None = Field(
        default=None, ge=1, lt=COUNT_LIMIT, description="End after this many equal tokens in a row."
    )
    ignore_eos: bool = False
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    queue_ms: int | None = Field(
        default=None, ge=1, lt=MS_LIMIT, description="Expire if no worker has started by then."
    )
    total_ms: int | None = Field(default=None, ge=1, lt=MS_LIMIT, description="Expire if not finished by then.")


class LoraUse(_Part):
    """A low-rank adapter that a request runs under, with everything that a worker needs to load it.

    The submitter fills it from the registry (`shared.lora`), so that an adapter that is deleted, or replaced, while a
    request waits changes nothing of that request.
    """

    name: str = Field(min_length=1, max_length=96)
    scale: float = Field(default=1.0, ge=-100.0, le=100.0, description="Factor beside the adapter's own alpha / rank.")
    path: str = Field(
        max_length=4096, description="Folder in the model store, which every worker has in its own place."
    )
    digest: str = Field(pattern=r"^[0-9a-f]{64}$", description="sha256 over its files.")
    param: Literal["lora", "model"] = Field(
        default="lora", description="The caller's field that named it, for what is to be told about it."
    )


class Webhook(_Part):
    """Tell a receiver, once the request has ended, how: the record of it is committed together with the end."""

    url: str = Field(min_length=1, max_length=2048)
    kind: Literal["request", "response"] = Field(default="request", description="What the message calls its subject.")
    name: str | None = Field(default=None, max_length=128, description="Id of a subject that is not the request.")
    choice: int = Field(default=0, ge=0, lt=COUNT_LIMIT)
    calls: bool = Field(default=False, description="The subject is incomplete if its text ends within a call.")
    metadata: dict[str, str] = Field(default_factory=dict, max_length=16, description="Sent back as it is.")


class Preview(_Part):
    """Ask for snapshots of the canvas between commits; they are never stored and first to be dropped."""

    interval_ms: int = Field(default=80, ge=0, le=10_000)


class Generate(_Part):
    """Continue `prompt` (token ids). The id is made by the submitter and is never reused."""

    id: str
    model: str
    asked: str | None = Field(
        default=None, max_length=256, description="The name that the caller used for it, where that is another one."
    )
    prompt: tuple[int, ...] = Field(min_length=1)
    sampling: Sampling = Sampling()
    limits: Limits = Limits()
    decoding: Decoding | None = Field(default=None, description="Unset: the model's own default.")
    block_length: int | None = Field(
        default=None, ge=1, le=LONGEST_BLOCK, description="Unset: the model's own default."
    )
    cache: Literal["none", "prefix", "dual"] | None = Field(
        default=None,
        description="Keys that a bidirectional family reuses within a block: none (exact), those before the block, or "
        "all but the block's. Unset: the model's own default.",
    )
    cache_prompt: bool = Field(
        default=True,
        description="Reuse the keys of a text that another request has written, and let others reuse these.",
    )
    lora: tuple[LoraUse, ...] = Field(
        default=(), max_length=8, description="Adapters whose effects are summed; none: the base model."
    )
    embed: bool = Field(
        default=False,
        description="Produce no text: the answer is the mean of the prompt's final hidden states, of length 1.",
    )
    cfg_scale: float = Field(
        default=0.0,
        ge=0.0,
        le=100.0,
        description="Classifier-free guidance: logits move by this factor further away from those of a masked prompt. "
        "Above 0 every forward counts double.",
    )
    template: tuple[Annotated[int, Field(ge=HOLE)], ...] | None = Field(
        default=None,
        min_length=1,
        max_length=65_536,
        description="What stands behind the prompt: token ids, and HOLE (-1) where the model decides. All holes are "
        "decided together, with what stands around them in view. The output is the whole of it.",
    )
    draft: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        default=None,
        max_length=1_000_000,
        description="What the output is expected to be: the model keeps the tokens that it would have chosen itself.",
    )
    edits: LogitEdits | None = None
    logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MOST_LOGPROBS,
        description="Report log-probabilities with each block: the token's, and those of so many most probable ones.",
    )
    constraint: Constraint | None = Field(
        default=None, description="What the output must be; a worker that cannot follow it hands the request back."
    )
    preview: Preview | None = None
    lane: Lane = "std"
    user: str | None = Field(default=None, max_length=256)
    webhook: Webhook | None = None
    trace: dict[str, str] = Field(default_factory=dict, description="W3C trace context.")


class Abort(_Part):
    """End a request. Travels as the abort key, whose value is the reason."""

    id: str
    reason: str = "aborted"


def encode_command(command: Generate, must: tuple[str, ...] = ()) -> bytes:
    """Return the envelope as JSON bytes, what asks for another kind of answer as must-understand."""
    asked = (name for name in _CONSEQUENTIAL if not (getattr(command, name) is None or getattr(command, name) is False))
    must = tuple(dict.fromkeys((*must, *asked)))
    body = command.model_dump(mode="json", exclude_none=True)
    return orjson.dumps({"v": WIRE_VERSION, "kind": "generate", "must": list(must), "body": body})


def decode_command(payload: bytes) -> Generate:
    """Parse an envelope.

    Raises `UnsupportedCommand` for what a newer worker may know, `InvalidCommand` for what nobody can run.
    """
    try:
        envelope = orjson.loads(payload)
        version, kind, must, body = (envelope[key] for key in ("v", "kind", "must", "body"))
        unknown = [name for name in must if name not in Generate.model_fields]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise InvalidCommand("the payload is not a command envelope") from error
    if version != WIRE_VERSION or kind != "generate" or unknown:
        raise UnsupportedCommand(f"version {version!r}, kind {kind!r}, unknown must-understand fields {unknown!r}")
    try:
        return Generate.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise InvalidCommand(f"{field}: {first['msg']}") from error
