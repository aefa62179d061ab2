"""Ollama's shapes: /api/generate, /api/chat, /api/tags, /api/show and /api/version, for programs that speak no other.

A stream is one JSON object a line, and streaming is what happens unless `stream` is false. Options that describe a
machine (`num_ctx`, `keep_alive`, ...) are left to the fleet.
"""

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal, assert_never

import orjson
from fastapi import APIRouter, Request
from pydantic import BeforeValidator, Field
from starlette.responses import Response

from api.admission import admit, call_of, name_request
from api.answers import json_response
from api.bundle import Bundle
from api.catalog import ServedModel
from api.deps import Services, ServicesDep, json_body
from api.errors import ApiError, ClientGone, of_exception, unsupported
from api.openapi import ERROR_RESPONSES, request_body
from api.routes.chat import ChatPlan, plan_chat
from api.routes.completions import CompletionPlan, plan_completion
from api.routes.health import get_version
from api.schemas import ChatBody, CompletionBody, StrictBody, as_list, parse
from api.sse import EventStream
from api.transcript import Transcript
from shared.card import ModelCard
from shared.events import Delta, Finished, Queued, Snapshot, Started
from shared.telemetry import note

router = APIRouter(tags=["ollama"])

Tell = Callable[[str], dict[str, object]]
"""Puts text where an endpoint has it."""

_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; unless `stream` is false, one object a line.",
        "content": {"application/json": {"schema": {}}, "application/x-ndjson": {"schema": {"type": "string"}}},
    },
    **ERROR_RESPONSES,
}


_OLLAMAS = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty", "response_format": "format"}
"""Ollama's names by OpenAI's."""
_OPENAIS = re.compile(rf"\b({'|'.join(_OLLAMAS)})\b")


class Options(StrictBody):
    """What of Ollama's `options` has a meaning here; others are left to the fleet."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    num_predict: int | None = Field(default=None, description="Most tokens of the answer; below 1: unset.")
    stop: Annotated[list[str] | None, BeforeValidator(as_list)] = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    def fields(self) -> dict[str, object]:
        """Return them under OpenAI's names."""
        fields: dict[str, object] = self.model_dump(exclude={"num_predict", "repeat_penalty"}, exclude_none=True)
        if self.num_predict is not None and self.num_predict > 0:
            fields["max_tokens"] = self.num_predict
        if self.repeat_penalty is not None:
            fields["repetition_penalty"] = self.repeat_penalty
        return fields


class OllamaBody(StrictBody):
    model: str
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: Options | None = None
    diffusion: dict[str, Any] | None = Field(default=None, description="Options of the canvas, as on /v1.")

    @property
    def streams(self) -> bool:
        return self.stream is not False

    def fields(self) -> dict[str, object]:
        """Return what both endpoints say, under OpenAI's names."""
        fields: dict[str, object] = {"model": self.model.removesuffix(":latest")}
        fields |= self.options.fields() if self.options else {}
        if self.diffusion is not None:
            fields["diffusion"] = self.diffusion
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif isinstance(self.format, dict):
            fields["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "format", "schema": self.format, "strict": True},
            }
        return fields


class OllamaGenerate(OllamaBody):
    delivers: ClassVar[frozenset[str]] = frozenset({"suffix"})

    prompt: str = Field(
        default="",
        description="Put into the model's chat template, unless `raw`; empty: whether it is there.",
    )
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[str] | None = None


class OllamaChat(OllamaBody):
    messages: list[dict[str, Any]] = Field(description="Empty: whether the model is there.")
    tools: list[Any] | None = None


class _RawBody(CompletionBody):
    @property
    def default_max_tokens(self) -> int:
        """A hole is filled as far as it reaches, so it is not made as long as an answer may become."""
        return 64 if self.suffix else 512


class OllamaShow(StrictBody):
    model: str


@router.post("/api/generate", openapi_extra=request_body(OllamaGenerate), responses=_RESPONSES)
async def generate(request: Request, services: ServicesDep) -> Response:
    """Answer a prompt, as Ollama does; with `raw` or a `suffix` it is not put into a chat template."""

    async def plan(call_body: OllamaGenerate) -> ChatPlan | CompletionPlan:
        if call_body.images:
            raise unsupported("images")
        fields = call_body.fields()
        call = call_of(request, services.settings)
        if call_body.raw or call_body.suffix:
            fields |= {"prompt": call_body.prompt, "suffix": call_body.suffix}
            return await plan_completion(parse(_RawBody, fields), services.catalog, call)
        system = [{"role": "system", "content": call_body.system}] if call_body.system else []
        fields["messages"] = [*system, {"role": "user", "content": call_body.prompt}]
        return await plan_chat(parse(ChatBody, fields), services.catalog, call)

    async def answer() -> Response:
        body = await json_body(OllamaGenerate)(request)
        if not body.prompt and not body.suffix:
            return await _loaded(services, body, {"response": ""})
        return await _answer(request, services, body, await plan(body), lambda text: {"response": text})

    return await _in_ollamas_words(answer())


@router.post("/api/chat", openapi_extra=request_body(OllamaChat), responses=_RESPONSES)
async def chat(request: Request, services: ServicesDep) -> Response:
    """Answer a chat, as Ollama does."""

    async def answer() -> Response:
        body = await json_body(OllamaChat)(request)
        if not body.messages:
            return await _loaded(services, body, {"message": {"role": "assistant", "content": ""}})
        if body.tools:
            raise unsupported("tools")
        if any(message.get("images") for message in body.messages):
            raise unsupported("images")
        fields = body.fields() | {"messages": body.messages}
        plan = await plan_chat(parse(ChatBody, fields), services.catalog, call_of(request, services.settings))
        return await _answer(
            request, services, body, plan, lambda text: {"message": {"role": "assistant", "content": text}}
        )

    return await _in_ollamas_words(answer())


@router.get("/api/tags", responses=ERROR_RESPONSES)
async def tags(services: ServicesDep) -> Response:
    """List the models."""

    async def answer() -> Response:
        cards: list[ModelCard] = []
        for name in await services.catalog.names():
            try:
                cards.append(await services.catalog.card(name))
            except ApiError:
                # One unusable or just removed card must not hide the others.
                continue
        models = [
            {"name": card.name, "model": card.name, "digest": card.digest, "details": _details(card)} for card in cards
        ]
        return json_response({"models": models})

    return await _in_ollamas_words(answer())


@router.post("/api/show", openapi_extra=request_body(OllamaShow), responses=ERROR_RESPONSES)
async def show(request: Request, services: ServicesDep) -> Response:
    """Describe a model."""

    async def answer() -> Response:
        body = await json_body(OllamaShow)(request)
        card = await services.catalog.card(body.model.removesuffix(":latest"))
        insert = ["insert"] if "infill" in card.capabilities else []
        info = {"general.architecture": card.family, f"{card.family}.context_length": card.max_model_len}
        return json_response(
            {"details": _details(card), "model_info": info, "capabilities": ["completion", *insert], "template": ""}
        )

    return await _in_ollamas_words(answer())


@router.get("/api/version", responses=ERROR_RESPONSES)
async def version() -> Response:
    """Tell Diffleet's version."""
    return await get_version()


def _details(card: ModelCard) -> dict[str, object]:
    return {"format": "safetensors", "family": card.family, "families": [card.family]}


async def _loaded(services: Services, body: OllamaBody, told: Mapping[str, object]) -> Response:
    """Tell that a model is there, as Ollama does to whoever asks nothing of it; `ollama run` begins so."""
    model = await services.catalog.resolve(body.model.removesuffix(":latest"))
    return json_response({**_head(model), **told, "done": True, "done_reason": "load"})


async def _answer(
    request: Request, services: Services, body: OllamaBody, plan: ChatPlan | CompletionPlan, tell: Tell
) -> Response:
    note(stream=body.streams)
    call = call_of(request, services.settings)
    terms = await admit(request, call, services.limiter, plan.commands, plan.model.card.block_length)
    bundle = await Bundle.open(services.relay, plan.commands, request.receive, terms)
    bundle.writers = plan.writers
    name_request(request, bundle.follows[0].request_id)
    if body.streams:
        stream = EventStream(bundle, _lines(plan, bundle, tell), lambda error: _line({"error": error.message}), b"")
        stream.headers["content-type"] = "application/x-ndjson"
        return stream
    (transcript,) = await bundle.read_to_end()
    assert transcript.end is not None, "a bundle that was read to its end has seen every end"
    return json_response(_head(plan.model) | tell(transcript.text) | _end(transcript, transcript.end))


async def _lines(plan: ChatPlan | CompletionPlan, bundle: Bundle, tell: Tell) -> AsyncGenerator[bytes]:
    transcript = Transcript.of(bundle.follows[0])
    async for _, event in bundle:
        if event is None:
            continue
        transcript.observe(event)
        match event:
            case Delta():
                if event.text:
                    yield _line(_head(plan.model) | tell(event.text) | {"done": False})
            case Finished():
                yield _line(_head(plan.model) | tell("") | _end(transcript, event))
            case Queued() | Started() | Snapshot():
                pass
            case _:
                assert_never(event)


def _head(model: ServedModel) -> dict[str, object]:
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return {"model": model.name, "created_at": now}


def _end(transcript: Transcript, end: Finished) -> dict[str, object]:
    """Return the last object's fields; durations are nanoseconds. Prompt and answer share forwards: one duration."""
    total, queued = transcript.timings["total_ms"] or 0.0, transcript.timings["queue_ms"] or 0.0
    return {
        "done": True,
        "done_reason": "stop" if end.reason == "stop" else "length",
        "total_duration": round(total * 1e6),
        "load_duration": round(queued * 1e6),
        "prompt_eval_count": end.usage.prompt_tokens,
        "prompt_eval_duration": 0,
        "eval_count": end.usage.completion_tokens,
        "eval_duration": round(max(0.0, total - queued) * 1e6),
    }


def _line(content: Mapping[str, object]) -> bytes:
    return orjson.dumps(content) + b"\n"


async def _in_ollamas_words(answer: Awaitable[Response]) -> Response:
    """Return the answer, or an error as Ollama's clients read it: a message, not an object."""
    try:
        return await answer
    except ClientGone:
        raise
    except Exception as error:
        known = of_exception(error)
        if known is None:
            raise
        note(code=known.code)
        told = _OPENAIS.sub(lambda name: _OLLAMAS[name[0]], known.message) if known.param in _OLLAMAS else known.message
        content = orjson.dumps({"error": told})
        return Response(content, known.status, headers=known.headers, media_type="application/json")
