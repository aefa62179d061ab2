"""What a worker may say about a request.

Durable events carry `seq`, rising by one from 1 without a hole: they are written to the request's event log and
published, in one script. Previews (`Started`, `Snapshot`) are published only and may be lost. On the wire an event is
the JSON of its dataclass with its type in `t`; unknown fields are ignored.

`epoch` is the fencing token of the claim that wrote the event: it rises when a request moves to another worker.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import orjson
from pydantic import Field, TypeAdapter, ValidationError

FinishReason = Literal["stop", "length", "aborted"]
FinishDetail = Literal[
    "stop_token",
    "stop_string",
    "max_tokens",
    "max_nfe",
    "max_repetition_run",
    "filled",
    "max_model_len",
    "deadline",
    "aborted",
    "embedded",
]
FailCode = Literal[
    "invalid_request",
    "unsupported",
    "too_long",
    "nan",
    "out_of_memory",
    "internal",
    "expired",
    "poison",
    "lost",
]


@dataclass(frozen=True, slots=True)
class Usage:
    """Costs of one request. `nfe` counts denoising forwards (number of function evaluations)."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    nfe: int = 0
    blocks: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose keys another request had written."""
    accepted_draft_tokens: int = 0
    """Tokens of a draft that the output has where the draft had them."""
    rejected_draft_tokens: int = 0
    block_length: int = 0
    """Positions of its blocks; 0: an older worker does not tell."""


@dataclass(frozen=True, slots=True)
class Queued:
    """Seq 1: the request was accepted."""

    id: str
    seq: int = 1
    epoch: int = 0
    t: Literal["queued"] = "queued"


@dataclass(frozen=True, slots=True)
class Started:
    """Preview: a worker has claimed the request; again after a hand-over, with a higher epoch."""

    id: str
    epoch: int
    worker: str
    queued_ms: int | None = None
    """From the submit to the claim."""
    t: Literal["started"] = "started"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How probable a token was in the forward that decided it: natural logarithms of the model's own distribution.

    That is the one before temperature, penalties, bias and filters. The positions of a block are decided given
    different canvases, so the sum over an answer is not the logarithm of its probability.
    """

    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    """(token id, logprob) of the most probable ones, best first."""


@dataclass(frozen=True, slots=True)
class Delta:
    """Durable: one committed block.

    `token_ids` are the produced tokens from `offset` (0 = first after the prompt), filler and stop token excluded.
    `text` is what became certain with them; it may lag the ids (half a character, half a stop string) and is never
    taken back: the concatenation over all deltas is the final text. `nfe` is the total so far.
    """

    id: str
    seq: int
    epoch: int
    block: int
    offset: int
    token_ids: list[int]
    text: str
    nfe: int
    logprobs: list[TokenLogprob] | None = None
    """One for each of `token_ids`, if the request asked for them."""
    block_length: Annotated[int, Field(ge=1, le=4096)] | None = None
    """What a worker has chosen for the request, which whoever goes on with it keeps; None: nothing was chosen."""
    t: Literal["delta"] = "delta"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Preview: the canvas of the active block between commits.

    `token_ids[i]` is the token at produced offset `offset + i`, None while it is masked; `confidence[i]` the
    probability at the moment of acceptance (0 while masked). `after` is the last durable seq before it, `step` the
    denoise step in the block.
    """

    id: str
    after: int
    epoch: int
    block: int
    offset: int
    step: int
    nfe: int
    token_ids: list[int | None]
    confidence: list[float] = field(default_factory=list[float])
    t: Literal["snapshot"] = "snapshot"


@dataclass(frozen=True, slots=True)
class Finished:
    """Durable, terminal: the request ended by its own rules or by an abort."""

    id: str
    seq: int
    epoch: int
    reason: FinishReason
    detail: FinishDetail
    usage: Usage
    embedding: str | None = None
    """Base64 of little-endian float32: what a request for an embedding has asked for."""
    ended_ms: int = field(default=0, compare=False)
    """When its worker wrote that it had ended, in ms since 1970; 0: an older worker, or none, has written it."""
    t: Literal["finished"] = "finished"


@dataclass(frozen=True, slots=True)
class Failed:
    """Durable, terminal: the request cannot be completed. `param` names the field at fault."""

    id: str
    seq: int
    epoch: int
    code: FailCode
    message: str
    param: str | None = None
    t: Literal["failed"] = "failed"


Durable = Queued | Delta | Finished | Failed
Event = Queued | Started | Delta | Snapshot | Finished | Failed

_EVENT: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="t")])


class InvalidEvent(Exception):
    """The bytes are not an event of this version."""


def encode_event(event: Event) -> bytes:
    """Return the event as JSON bytes."""
    return orjson.dumps(event)


def decode_event(payload: bytes) -> Event:
    """Parse one event; raises `InvalidEvent`."""
    try:
        return _EVENT.validate_json(payload)
    except ValidationError as error:
        raise InvalidEvent(str(error.errors(include_input=False, include_url=False)[:1])) from error


def is_terminal(event: Event) -> bool:
    return isinstance(event, Finished | Failed)
