"""POST /v1/completions, OpenAI's older endpoint: raw prompts, several at once."""

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, assert_never, cast

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from api.admission import admit, call_of, name_request
from api.answers import json_response
from api.bundle import Bundle
from api.catalog import Catalog, ServedModel
from api.choices import finish_fields, report_fields, usage_fields
from api.deps import ServicesDep, json_body
from api.errors import unsupported
from api.frames import Frames
from api.infill import Fill, FillWriter, fill_of, writers_of
from api.logprobs import LogprobWriter
from api.openapi import STREAM_RESPONSES, request_body
from api.requests import Call, to_generate
from api.schemas import CompletionBody, StreamOptions, refuse_replacing
from api.sse import KEEPALIVE, EventStream, error_frame, frame
from api.structure.constraints import constraint_of
from api.transcript import Transcript
from shared.commands import Generate
from shared.events import Delta, Finished, Queued, Snapshot, Started
from shared.telemetry import note

router = APIRouter(tags=["openai"])


@router.post("/v1/fim/completions", openapi_extra=request_body(CompletionBody), responses=STREAM_RESPONSES, name="fim")
@router.post("/v1/completions", openapi_extra=request_body(CompletionBody), responses=STREAM_RESPONSES)
async def completions(
    body: Annotated[CompletionBody, Depends(json_body(CompletionBody))], request: Request, services: ServicesDep
) -> Response:
    """Continue prompts. The index of a choice is that of its prompt times `n`, plus that of the choice."""
    note(stream=bool(body.stream))
    call = call_of(request, services.settings)
    plan = await plan_completion(body, services.catalog, call)
    terms = await admit(request, call, services.limiter, plan.commands, plan.model.card.block_length)
    bundle = await Bundle.open(services.relay, plan.commands, request.receive, terms)
    name_request(request, bundle.follows[0].request_id)
    if body.stream:
        return EventStream(bundle, stream_completion(plan, bundle), error_frame)
    return json_response(await answer_completion(plan, bundle))


@dataclass(frozen=True, slots=True)
class CompletionPlan:
    """Completions that are ready to be submitted."""

    body: CompletionBody
    model: ServedModel
    commands: list[Generate]
    echoes: Sequence[str]
    """What stands before each choice: the text of its prompt, if that was asked for."""
    fill: Fill | None = None

    @property
    def writers(self) -> list[FillWriter]:
        return writers_of(self.fill, self.commands, self.model, self.body.stop or ())


async def plan_completion(body: CompletionBody, catalog: Catalog, call: Call) -> CompletionPlan:
    """Raises `ApiError`."""
    model = await catalog.resolve(body.model, body.lora)
    refuse_replacing(body)
    if body.best_of not in (None, body.choices):
        raise unsupported("best_of")
    given = cast(list[str | list[int]], body.prompt)
    prompts = [await model.encode(prompt) if isinstance(prompt, str) else prompt for prompt in given]
    constraint = await constraint_of(body, model.card)
    fill = await fill_of(body, model)
    commands = to_generate(body, prompts, model, "prompt", call, constraint, fill)
    texts = [prompt if isinstance(prompt, str) else model.tokenizer.decode(prompt) for prompt in given]
    echoes = [text if body.echo else "" for text in texts for _ in range(body.choices)]
    return CompletionPlan(body, model, commands, echoes, fill)


async def answer_completion(plan: CompletionPlan, bundle: Bundle) -> dict[str, object]:
    """Read to the end, and return the whole answer; raises as `Bundle`."""
    bundle.writers = plan.writers
    transcripts = await bundle.read_to_end()
    choices: list[dict[str, object]] = []
    for index, (echo, transcript) in enumerate(zip(plan.echoes, transcripts, strict=True)):
        assert transcript.end is not None, "a bundle that was read to its end has seen every end"
        told: dict[str, object] = {}
        if plan.body.logprobs is not None:
            writer = LogprobWriter(plan.model.tokenizer)
            told = {"logprobs": writer.completion(writer.of_answer(transcript.deltas, transcript.end))}
        choices.append(
            _choice(index, echo + transcript.text) | told | finish_fields(transcript.end, bundle.told(index))
        )
    usage = usage_fields(bundle.follows, transcripts, plan.body.choices)
    content = _head(plan, bundle) | {"choices": choices, "usage": usage}
    if plan.body.diffusion and plan.body.diffusion.report:
        content["diffusion"] = [report_fields(transcript, plan.model) for transcript in transcripts]
    return content


async def stream_completion(plan: CompletionPlan, bundle: Bundle) -> AsyncGenerator[bytes]:
    """Yield the chunks; raises as `Bundle`."""
    bundle.writers = plan.writers
    options = plan.body.stream_options or StreamOptions()
    include_usage, every_usage = bool(options.include_usage), bool(options.continuous_usage_stats)
    transcripts = [Transcript.of(follow) for follow in bundle.follows]
    detail = plan.body.diffusion.frame_detail if plan.body.diffusion else None
    framed = plan.body.canvas_stream != "append"
    frames = [Frames(plan.model.tokenizer, detail or "tokens") for _ in transcripts]
    writers = [LogprobWriter(plan.model.tokenizer) for _ in transcripts]
    head = _head(plan, bundle)

    def chunk(choices: list[dict[str, object]], extra: Mapping[str, object] | None = None, last: bool = False) -> bytes:
        payload: dict[str, object] = {**head, "choices": choices, **(extra or {})}
        if last or every_usage:
            payload["usage"] = usage_fields(bundle.follows, transcripts, plan.body.choices)
        elif include_usage:
            payload["usage"] = None
        return frame(payload)

    for index, echo in enumerate(plan.echoes):
        if echo:
            yield chunk([_choice(index, echo)])
    async for index, event in bundle:
        if event is None:
            yield KEEPALIVE
            continue
        transcripts[index].observe(event)
        match event:
            case Queued() | Started():
                pass
            case Delta():
                extra = {"diffusion": frames[index].of_commit(event)} if framed else {}
                told: dict[str, object] = {}
                if plan.body.logprobs is not None and (tokens := writers[index].of_delta(event)):
                    told = {"logprobs": writers[index].completion(tokens)}
                if event.text or extra or told:
                    yield chunk([_choice(index, event.text) | told], extra)
            case Snapshot():
                yield chunk([_choice(index, "")], {"diffusion": frames[index].of_snapshot(event)})
            case Finished():
                told = {}
                if plan.body.logprobs is not None and (tokens := writers[index].of_end(event)):
                    told = {"logprobs": writers[index].completion(tokens)}
                yield chunk([_choice(index, "") | told | finish_fields(event, bundle.told(index))])
            case _:
                assert_never(event)
    if include_usage:
        yield chunk([], last=True)


def _head(plan: CompletionPlan, bundle: Bundle) -> dict[str, object]:
    return {
        "id": f"cmpl-{bundle.follows[0].request_id.rpartition('_')[2]}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": plan.model.name,
        "system_fingerprint": f"fp_{plan.model.card.digest[:12]}",
    }


def _choice(index: int, text: str) -> dict[str, object]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None}
