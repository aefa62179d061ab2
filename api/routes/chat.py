"""POST /v1/chat/completions, as OpenAI's clients speak it."""

import time
from collections.abc import AsyncGenerator
from typing import Annotated, assert_never

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from api.answers import json_response
from api.canvas import canvas_fields
from api.catalog import ServedModel
from api.deps import ServicesDep, json_body
from api.openapi import ERROR_RESPONSES, request_body
from api.relay import Follow
from api.requests import to_generate
from api.schemas import ChatBody, StreamOptions
from api.sse import KEEPALIVE, EventStream, frame
from api.transcript import Transcript, read_to_end, usage_of
from shared.events import Delta, Finished, Queued, Snapshot, Started, Usage
from shared.telemetry import note

router = APIRouter(tags=["openai"])


@router.post("/v1/chat/completions", openapi_extra=request_body(ChatBody), responses=ERROR_RESPONSES)
async def chat(
    body: Annotated[ChatBody, Depends(json_body(ChatBody))], request: Request, services: ServicesDep
) -> Response:
    """Answer a chat. Streams text as it is committed; stream_mode `denoise` adds chunks with an empty delta and the
    canvas in a field `diffusion`, which other clients pass over.
    """
    note(stream=bool(body.stream))
    model = await services.catalog.resolve(body.model)
    prompt = await model.encode_chat([message.for_template() for message in body.messages])
    command = to_generate(body, prompt, model, "messages", services.settings.request_timeout_s)
    follow = await services.relay.open(command, request.receive)
    shape = _Shape(follow, model)
    if body.stream:
        frames = shape.frames(body.stream_options or StreamOptions())
        return EventStream(follow, frames, lambda error: {"error": error.body})
    transcript, end = await read_to_end(follow)
    return json_response(shape.completion(transcript, end))


class _Shape:
    """What all objects of one answer share: id, time, model."""

    def __init__(self, follow: Follow, model: ServedModel) -> None:
        self._follow = follow
        self._model = model
        self._head = {
            "id": f"chatcmpl-{follow.command.id.rpartition('_')[2]}",
            "created": int(time.time()),
            "model": model.card.name,
            "system_fingerprint": f"fp_{model.card.digest[:12]}",
        }

    def completion(self, transcript: Transcript, end: Finished) -> dict[str, object]:
        message = {"role": "assistant", "content": transcript.text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None} | _finish(end)
        return {"object": "chat.completion", **self._head, "choices": [choice], "usage": usage_of(end.usage)}

    async def frames(self, options: StreamOptions) -> AsyncGenerator[bytes]:
        include_usage, every_usage = bool(options.include_usage), bool(options.continuous_usage_stats)
        prompt_tokens = len(self._follow.command.prompt)
        transcript = Transcript.of(self._follow)

        def chunk(choices: list[dict[str, object]], final: Usage | None = None, **extra: object) -> bytes:
            payload: dict[str, object] = {"object": "chat.completion.chunk", **self._head, "choices": choices, **extra}
            if final is not None:
                payload["usage"] = usage_of(final)
            elif every_usage:
                payload["usage"] = usage_of(Usage(prompt_tokens, len(transcript.token_ids), transcript.nfe))
            elif include_usage:
                payload["usage"] = None
            return frame(payload)

        yield chunk([_delta(role="assistant", content="")])
        async for event in self._follow:
            if event is None:
                yield KEEPALIVE
                continue
            transcript.observe(event)
            match event:
                case Queued() | Started():
                    pass
                case Delta():
                    if event.text:
                        yield chunk([_delta(content=event.text)])
                case Snapshot():
                    yield chunk([_delta()], diffusion=canvas_fields(event, self._model.tokenizer, prompt_tokens))
                case Finished():
                    yield chunk([_delta() | _finish(event)])
                    if include_usage:
                        yield chunk([], final=event.usage)
                case _:
                    assert_never(event)


def _delta(**delta: str) -> dict[str, object]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}


def _finish(end: Finished) -> dict[str, object]:
    # OpenAI's words only. An abort from elsewhere cuts the text, which is what `length` tells.
    return {"finish_reason": "stop" if end.reason == "stop" else "length", "finish_detail": end.detail}
