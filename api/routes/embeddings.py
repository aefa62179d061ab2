"""POST /v1/embeddings: texts as vectors, by the same workers that generate."""

import math
from array import array
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from sys import byteorder
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response

from api.admission import admit, call_of
from api.answers import json_response
from api.bundle import Bundle
from api.catalog import Catalog, ServedModel
from api.deps import ServicesDep, json_body
from api.errors import ApiError, invalid
from api.openapi import ERROR_RESPONSES, request_body
from api.requests import Call, check_prompt
from api.schemas import Adapters, Prompts, StrictBody
from shared.commands import COUNT_LIMIT, Generate, Limits
from shared.complaints import path_of

router = APIRouter(tags=["openai"])

MOST_INPUTS = 2048
"""As OpenAI has it."""
_AT_ONCE = 32
"""Inputs of one call that are queued together: the rest waits here, so that a long list does not fill the queue."""
_RETENTION_MS = 60_000
"""A vector is read at once, or computed again."""


class EmbeddingsBody(StrictBody):
    model: str | None = Field(default=None, description="May be left out where only one model has workers.")
    input: Prompts = Field(description="Text, token ids, or a list of either.")
    encoding_format: Literal["float", "base64"] | None = Field(
        default=None, description="base64: little-endian float32."
    )
    dimensions: int | None = Field(
        default=None, ge=1, lt=COUNT_LIMIT, description="Keep so many leading numbers, brought to length 1 again."
    )
    lora: Adapters | None = Field(default=None, description="Adapters whose effects are summed.")
    user: str | None = Field(default=None, max_length=256)


@router.post("/v1/embeddings", openapi_extra=request_body(EmbeddingsBody), responses=ERROR_RESPONSES)
async def embeddings(
    body: Annotated[EmbeddingsBody, Depends(json_body(EmbeddingsBody))], request: Request, services: ServicesDep
) -> Response:
    """Return for each input the mean of the model's final hidden states over its tokens, of length 1."""
    call = call_of(request, services.settings)
    plan = await plan_embeddings(body, services.catalog, call)
    terms = await admit(request, call, services.limiter, plan.commands, plan.model.card.block_length)
    terms = [replace(term, retention_ms=_RETENTION_MS) for term in terms]

    async def open_part(part: slice) -> Bundle:
        return await Bundle.open(services.relay, plan.commands[part], request.receive, terms[part])

    return json_response(await answer_embeddings(plan, open_part))


@dataclass(frozen=True, slots=True)
class EmbeddingsPlan:
    """Embeddings that are ready to be submitted: a command for each input."""

    body: EmbeddingsBody
    model: ServedModel
    commands: list[Generate]


async def plan_embeddings(body: EmbeddingsBody, catalog: Catalog, call: Call) -> EmbeddingsPlan:
    """Raises `ApiError`."""
    model = await catalog.resolve(body.model, body.lora)
    return EmbeddingsPlan(body, model, await _commands(body, model, call))


async def answer_embeddings(plan: EmbeddingsPlan, open_part: Callable[[slice], Awaitable[Bundle]]) -> dict[str, object]:
    """Submit by `open_part` some inputs after the others, and return all vectors; raises as `Bundle`."""
    vectors: list[array[float]] = []
    for first in range(0, len(plan.commands), _AT_ONCE):
        bundle = await open_part(slice(first, first + _AT_ONCE))
        for transcript in await bundle.read_to_end():
            assert transcript.end is not None, "a bundle that was read to its end has seen every end"
            vectors.append(_vector(transcript.end.embedding))
    body = plan.body
    data = [
        {"object": "embedding", "index": index, "embedding": _encode(_cut(vector, body.dimensions), body)}
        for index, vector in enumerate(vectors)
    ]
    tokens = sum(len(command.prompt) for command in plan.commands)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "model": plan.model.name, "data": data, "usage": usage}


async def _commands(body: EmbeddingsBody, model: ServedModel, call: Call) -> list[Generate]:
    """Return a command for each input; raises `ApiError` naming the field."""
    card, given = model.card, body.input
    if not card.embedding_size:
        raise invalid("model", f"model {card.name} has no embeddings", "unsupported_model")
    if body.dimensions is not None and body.dimensions > card.embedding_size:
        raise invalid("dimensions", f"dimensions is {body.dimensions}; this model has {card.embedding_size}")
    if len(given) > MOST_INPUTS:
        raise invalid("input", f"input has {len(given)} items; one call may have {MOST_INPUTS}")
    commands: list[Generate] = []
    for index, text in enumerate(given):
        field = "input" if len(given) == 1 else path_of(("input", index))
        ids: list[int] = await model.encode(text, field=field) if isinstance(text, str) else text
        check_prompt(ids, card, field)
        if len(ids) >= card.max_model_len:
            message = f"{field} is {len(ids)} tokens; this model takes {card.max_model_len - 1}"
            raise ApiError(400, "context_length_exceeded", message, field)
        commands.append(
            Generate(
                id=call.request_id(card, index),
                model=card.name,
                asked=model.other_name,
                prompt=tuple(ids),
                limits=Limits(max_tokens=1, total_ms=round(call.timeout_s * 1000)),
                embed=True,
                lane=call.lane or "std",
                lora=model.adapters,
                user=body.user,
                trace=dict(call.trace),
            )
        )
    return commands


def _vector(encoded: str | None) -> "array[float]":
    if encoded is None:
        raise ApiError(500, "internal_error", "the worker has answered without an embedding")
    vector = array("f")
    vector.frombytes(b64decode(encoded))
    if byteorder == "big":
        vector.byteswap()
    return vector


def _cut(vector: "array[float]", dimensions: int | None) -> "array[float]":
    if dimensions is None or dimensions >= len(vector):
        return vector
    kept = vector[:dimensions]
    length = math.sqrt(sum(value * value for value in kept))
    return array("f", (value / length for value in kept)) if length else kept


def _encode(vector: "array[float]", body: EmbeddingsBody) -> str | Sequence[float]:
    if body.encoding_format != "base64":
        return vector.tolist()
    if byteorder == "big":
        vector = array("f", vector)
        vector.byteswap()
    return b64encode(vector.tobytes()).decode()
