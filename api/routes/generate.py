"""POST /generate: the native endpoint."""

from collections.abc import AsyncGenerator
from typing import Annotated, assert_never, cast

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from api.admission import admit, call_of, name_request
from api.answers import json_response
from api.canvas import canvas_fields
from api.catalog import ServedModel
from api.deps import ServicesDep, json_body
from api.errors import ApiError
from api.logprobs import LogprobWriter
from api.openapi import ERROR_RESPONSES, STREAM_RESPONSES, request_body
from api.relay import Follow
from api.requests import to_generate
from api.schemas import GenerateBody, refuse_replacing
from api.sse import KEEPALIVE, EventStream, frame
from api.structure.constraints import constraint_of
from api.transcript import Transcript, read_to_end, usage_of
from shared.events import Delta, Failed, Finished, Queued, Snapshot, Started
from shared.telemetry import note

router = APIRouter(tags=["native"])


@router.post("/generate", openapi_extra=request_body(GenerateBody), responses=STREAM_RESPONSES)
async def generate(
    body: Annotated[GenerateBody, Depends(json_body(GenerateBody))], request: Request, services: ServicesDep
) -> Response:
    """Continue a prompt: text, which is not put into a chat template, or token ids.

    With `stream`, server-sent events: `append` for each committed block, `buffer_snapshot` between them in stream_mode
    `denoise`, then `final` or `error`, then `[DONE]`. `logprobs` has an entry for each of `token_ids`; in a stream it
    comes with each `append`.
    """
    note(stream=bool(body.stream))
    refuse_replacing(body)
    model = await services.catalog.resolve(body.model, body.lora)
    prompt = await model.encode(body.prompt) if isinstance(body.prompt, str) else cast(list[int], body.prompt)
    call = call_of(request, services.settings)
    constraint = await constraint_of(body, model.card)
    commands = to_generate(body, [prompt], model, "prompt", call, constraint)
    (command,), (terms,) = commands, await admit(request, call, services.limiter, commands, model.card.block_length)
    follow = await services.relay.open(command, request.receive, terms)
    name_request(request, follow.request_id)
    writer = None if body.logprobs is None else LogprobWriter(model.tokenizer)
    if body.stream:
        return EventStream(
            follow, _frames(follow, model, writer), lambda error: frame(_error(follow.request_id, error))
        )
    transcript, end = await read_to_end(follow, keep_deltas=writer is not None)
    told: dict[str, object] = {}
    if writer is not None:
        told = {"logprobs": [entry for delta in transcript.deltas for entry in writer.native(delta)]}
    return json_response({"id": follow.request_id, "model": model.name} | _result(transcript, end) | told)


@router.get("/generate/{request_id:path}", responses=ERROR_RESPONSES)
async def look(request_id: str, services: ServicesDep) -> Response:
    """Tell what a request has said so far and how it ended, by the id in its `x-diffleet-request` header.

    For those whom a webhook has told of its end, or who left with an Idempotency-Key. Whoever knows an id may use it.
    """
    result = await services.fleet.result(request_id)
    content: dict[str, object] = {
        "id": result.id,
        "object": "request",
        "model": result.model,
        "state": result.state,
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": None,
        "finish_detail": None,
        "usage": None,
        "error": None,
    }
    match result.end:
        case Finished() as end:
            content |= {"finish_reason": end.reason, "finish_detail": end.detail, "usage": usage_of(end.usage)}
        case Failed() as end:
            content["error"] = {"code": end.code, "message": end.message, "param": end.param}
        case None:
            pass
        case _:
            assert_never(result.end)
    return json_response(content)


@router.delete("/generate/{request_id:path}", responses=ERROR_RESPONSES)
async def end(request_id: str, services: ServicesDep) -> Response:
    """End a request by the id in its `x-diffleet-request` header, of several choices the first; what came stays.

    For requests with an Idempotency-Key, which closing the connection does not end. Whoever knows an id may use it: ids
    cannot be guessed. An id holds the model's name, which may have slashes.
    """
    # Asked first, for an abort may also come before its request: strangers must not leave keys of what never was.
    await services.fleet.result(request_id)
    state = await services.fleet.abort(request_id, "cancelled")
    return json_response({"id": request_id, "object": "request", "state": state})


async def _frames(follow: Follow, model: ServedModel, writer: LogprobWriter | None) -> AsyncGenerator[bytes]:
    subject = follow.subject
    transcript = Transcript.of(follow)
    async for event in follow:
        if event is None:
            yield KEEPALIVE
            continue
        transcript.observe(event)
        match event:
            case Queued() | Started():
                pass
            case Delta():
                told: dict[str, object] = {} if writer is None else {"logprobs": writer.native(event)}
                yield frame(_append(event) | told)
            case Snapshot():
                head = {"event": "buffer_snapshot", "id": event.id, "after": event.after, "finished": False}
                yield frame(head | canvas_fields(event, model.tokenizer, subject.prompt_tokens))
            case Finished():
                head = {"event": "final", "id": event.id, "seq": event.seq, "model": model.name, "finished": True}
                yield frame(head | _result(transcript, event))
            case _:
                assert_never(event)


def _append(event: Delta) -> dict[str, object]:
    return {
        "event": "append",
        "id": event.id,
        "seq": event.seq,
        "token_offset": event.offset,
        "text": event.text,
        "token_ids": event.token_ids,
        "nfe": event.nfe,
        "finished": False,
    }


def _result(transcript: Transcript, end: Finished) -> dict[str, object]:
    return {
        "text": transcript.text,
        "token_ids": transcript.token_ids,
        "finish_reason": end.reason,
        "finish_detail": end.detail,
        "nfe": end.usage.nfe,
        "usage": usage_of(end.usage),
        "timings": transcript.timings,
    }


def _error(request_id: str, error: ApiError) -> dict[str, object]:
    return {"event": "error", "id": request_id, "message": error.message, "error": error.body}
