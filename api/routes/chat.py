"""POST /v1/chat/completions, as OpenAI's clients speak it."""

import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Annotated, assert_never

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from api.admission import admit, call_of, name_request
from api.answers import json_response
from api.bundle import Bundle
from api.canvas import canvas_fields, canvas_text
from api.catalog import Catalog, ServedModel
from api.choices import finish_fields, report_fields, usage_fields
from api.deps import ServicesDep, json_body
from api.errors import invalid
from api.frames import Frames
from api.infill import Fill, FillWriter, draft_of, fill_of, writers_of
from api.logprobs import LogprobWriter
from api.openapi import STREAM_RESPONSES, request_body
from api.requests import Call, to_generate
from api.schemas import ChatBody, StreamOptions
from api.sse import KEEPALIVE, EventStream, error_frame, frame
from api.structure.constraints import constraint_of
from api.structure.teller import CallTeller
from api.structure.tools import choose, shown
from api.transcript import Transcript
from shared.commands import Generate
from shared.constraints import ToolCalls
from shared.events import Delta, Finished, Queued, Snapshot, Started
from shared.telemetry import note

router = APIRouter(tags=["openai"])


@router.post("/v1/chat/completions", openapi_extra=request_body(ChatBody), responses=STREAM_RESPONSES)
async def chat(
    body: Annotated[ChatBody, Depends(json_body(ChatBody))], request: Request, services: ServicesDep
) -> Response:
    """Answer a chat. Streams text as it is committed; `diffusion.stream` (frames, replace) and stream_mode `denoise`
    show the canvas too: frames and snapshots in a field `diffusion` beside the choices, which other clients pass over.
    """
    note(stream=bool(body.stream))
    call = call_of(request, services.settings)
    plan = await plan_chat(body, services.catalog, call)
    terms = await admit(request, call, services.limiter, plan.commands, plan.model.card.block_length)
    bundle = await Bundle.open(services.relay, plan.commands, request.receive, terms)
    name_request(request, bundle.follows[0].request_id)
    if body.stream:
        return EventStream(bundle, stream_chat(plan, bundle), error_frame)
    return json_response(await answer_chat(plan, bundle))


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """A chat that is ready to be submitted."""

    body: ChatBody
    model: ServedModel
    commands: list[Generate]
    fill: Fill | None = None

    @property
    def writers(self) -> list[FillWriter]:
        return writers_of(self.fill, self.commands, self.model, self.body.stop or ())

    @property
    def calls_tools(self) -> bool:
        return isinstance(self.commands[0].constraint, ToolCalls)


async def plan_chat(body: ChatBody, catalog: Catalog, call: Call) -> ChatPlan:
    """Raises `ApiError`."""
    model = await catalog.resolve(body.model, body.lora)
    offer = choose(body.tools, body.tool_choice, parallel=body.parallel_tool_calls is not False)
    constraint = await constraint_of(body, model.card, offer=offer)
    messages = [message.for_template() for message in body.messages]
    prompt = await model.encode_chat(
        messages,
        body.add_generation_prompt is not False,
        shown(body.tools, body.tool_choice),
        options=body.chat_template_kwargs,
    )
    fill = await fill_of(body, model)
    commands = to_generate(body, [prompt], model, "messages", call, constraint, fill)
    draft = await draft_of(body, model)
    if draft is not None and constraint is not None:
        raise invalid("prediction", "a prediction cannot be combined with a schema, a grammar or tools")
    commands = [command.model_copy(update={"draft": draft}) for command in commands]
    return ChatPlan(body, model, commands, fill)


async def answer_chat(plan: ChatPlan, bundle: Bundle) -> dict[str, object]:
    """Read to the end, and return the whole answer; raises as `Bundle`."""
    bundle.writers = plan.writers
    transcripts = await bundle.read_to_end()
    content = _head(plan, bundle) | {
        "object": "chat.completion",
        "choices": [_choice(plan, bundle, index, transcript) for index, transcript in enumerate(transcripts)],
        "usage": usage_fields(bundle.follows, transcripts, plan.body.choices),
        "service_tier": "default",
    }
    if plan.body.diffusion and plan.body.diffusion.report:
        content["diffusion"] = [report_fields(transcript, plan.model) for transcript in transcripts]
    return content


def _choice(plan: ChatPlan, bundle: Bundle, index: int, transcript: Transcript) -> dict[str, object]:
    assert transcript.end is not None, "a bundle that was read to its end has seen every end"
    message: dict[str, object] = {"role": "assistant", "content": transcript.text, "refusal": None}
    finish = finish_fields(transcript.end, bundle.told(index))
    if plan.calls_tools:
        teller = CallTeller(bundle.follows[index].request_id)
        message |= teller.message(transcript.text)
        finish |= teller.finish(transcript.end)
    logprobs = None
    if plan.body.logprobs:
        writer = LogprobWriter(plan.model.tokenizer)
        logprobs = writer.chat(writer.of_answer(transcript.deltas, transcript.end))
    return {"index": index, "message": message, "logprobs": logprobs} | finish


async def stream_chat(plan: ChatPlan, bundle: Bundle) -> AsyncGenerator[bytes]:
    """Yield the chunks; raises as `Bundle`."""
    bundle.writers = plan.writers
    options = plan.body.stream_options or StreamOptions()
    include_usage, every_usage = bool(options.include_usage), bool(options.continuous_usage_stats)
    transcripts = [Transcript.of(follow) for follow in bundle.follows]
    canvases = [_canvas(plan, transcript) for transcript in transcripts]
    tellers = [CallTeller(follow.request_id) if plan.calls_tools else None for follow in bundle.follows]
    writers = [LogprobWriter(plan.model.tokenizer) for _ in transcripts]
    head = _head(plan, bundle) | {"object": "chat.completion.chunk"}

    def chunk(choices: list[dict[str, object]], extra: Mapping[str, object] | None = None, last: bool = False) -> bytes:
        payload: dict[str, object] = {**head, "choices": choices, **(extra or {})}
        if last or every_usage:
            payload["usage"] = usage_fields(bundle.follows, transcripts, plan.body.choices)
        elif include_usage:
            payload["usage"] = None
        return frame(payload)

    for index in range(len(transcripts)):
        yield chunk([_delta(index, role="assistant", content="")])
    async for index, event in bundle:
        if event is None:
            yield KEEPALIVE
            continue
        transcripts[index].observe(event)
        teller = tellers[index]
        match event:
            case Queued() | Started():
                pass
            case Delta():
                delta, extra = canvases[index].of_delta(event)
                if teller is not None:
                    delta = teller.push(event.text)
                told: dict[str, object] = {}
                if plan.body.logprobs and (tokens := writers[index].of_delta(event)):
                    told = {"logprobs": writers[index].chat(tokens)}
                if delta or extra or told:
                    yield chunk([_delta(index, **delta) | told], extra)
            case Snapshot():
                delta, extra = canvases[index].of_snapshot(event)
                yield chunk([_delta(index, **delta)], extra)
            case Finished():
                extra = {}
                if plan.body.diffusion and plan.body.diffusion.report:
                    extra = {"diffusion": report_fields(transcripts[index], plan.model)}
                told = {}
                if plan.body.logprobs and (tokens := writers[index].of_end(event)):
                    told = {"logprobs": writers[index].chat(tokens)}
                finish = finish_fields(event, bundle.told(index))
                if teller is not None:
                    if delta := teller.end():
                        yield chunk([_delta(index, **delta)])
                    finish |= teller.finish(event)
                yield chunk([_delta(index) | told | finish], extra)
            case _:
                assert_never(event)
    if include_usage:
        yield chunk([], last=True)


def _head(plan: ChatPlan, bundle: Bundle) -> dict[str, object]:
    """What all objects of one answer share."""
    return {
        "id": f"chatcmpl-{bundle.follows[0].request_id.rpartition('_')[2]}",
        "created": int(time.time()),
        "model": plan.model.name,
        "system_fingerprint": f"fp_{plan.model.card.digest[:12]}",
    }


def _delta(index: int, **delta: object) -> dict[str, object]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


class _Append:
    """Committed text as deltas, and nothing else."""

    def of_delta(self, event: Delta) -> tuple[dict[str, object], dict[str, object]]:
        return ({"content": event.text} if event.text else {}), {}

    def of_snapshot(self, event: Snapshot) -> tuple[dict[str, object], dict[str, object]]:
        return {}, {}


class _Denoise(_Append):
    """The native mode: whole snapshots beside the text."""

    def __init__(self, plan: ChatPlan) -> None:
        self._tokenizer = plan.model.tokenizer
        self._prompt_tokens = len(plan.commands[0].prompt)

    def of_snapshot(self, event: Snapshot) -> tuple[dict[str, object], dict[str, object]]:
        return {}, {"diffusion": canvas_fields(event, self._tokenizer, self._prompt_tokens)}


class _Framed(_Append):
    """Edits of positions beside the text."""

    def __init__(self, plan: ChatPlan) -> None:
        detail = plan.body.diffusion.frame_detail if plan.body.diffusion else None
        self._frames = Frames(plan.model.tokenizer, detail or "tokens")

    def of_delta(self, event: Delta) -> tuple[dict[str, object], dict[str, object]]:
        delta, _ = super().of_delta(event)
        return delta, {"diffusion": self._frames.of_commit(event)}

    def of_snapshot(self, event: Snapshot) -> tuple[dict[str, object], dict[str, object]]:
        return {}, {"diffusion": self._frames.of_snapshot(event)}


class _Replaced(_Append):
    """Mercury's way: every delta is the whole text so far, guesses included."""

    def __init__(self, plan: ChatPlan, transcript: Transcript) -> None:
        self._tokenizer = plan.model.tokenizer
        self._transcript = transcript

    def of_delta(self, event: Delta) -> tuple[dict[str, object], dict[str, object]]:
        return {"content": self._transcript.text}, {}

    def of_snapshot(self, event: Snapshot) -> tuple[dict[str, object], dict[str, object]]:
        return {"content": self._transcript.text + canvas_text(event.token_ids, self._tokenizer)}, {}


def _canvas(plan: ChatPlan, transcript: Transcript) -> _Append:
    mode = plan.body.canvas_stream
    match mode:
        case "append":
            return _Append()
        case "denoise":
            return _Denoise(plan)
        case "frames":
            return _Framed(plan)
        case "replace":
            return _Replaced(plan, transcript)
        case _:
            assert_never(mode)
