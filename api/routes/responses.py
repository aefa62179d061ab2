"""OpenAI's Responses: stored, resumable, in the foreground or the background."""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, assert_never

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from api.access import Caller
from api.admission import admit, call_of
from api.answers import json_response
from api.catalog import Catalog, ServedModel
from api.deps import CallerDep, Services, ServicesDep, json_body
from api.errors import ApiError, invalid
from api.frames import Frames
from api.openapi import ERROR_RESPONSES, STREAM_RESPONSES, request_body
from api.paging import Order, page
from api.relay import Follow, Subject, Terms
from api.requests import Call, to_generate
from api.responses.items import as_items, to_messages
from api.responses.output import Output
from api.responses.schemas import ResponseBody, check_effects
from api.responses.shape import EventWriter, last_number, output_of, response_object, sse
from api.responses.store import Record
from api.sse import KEEPALIVE, EventStream
from api.structure.constraints import constraint_of
from api.structure.tools import choose, shown
from shared.client import Result
from shared.commands import COUNT_LIMIT, Generate
from shared.constraints import ToolCalls
from shared.events import Delta, Finished, Queued, Snapshot, Started
from shared.keys import named_ulid
from shared.telemetry import note
from shared.text import Tokenizer

router = APIRouter(tags=["openai"])

_CANCEL_WAIT_S = 5.0
_CANCEL_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Plan:
    """What a body asks for."""

    record: Record
    command: Generate
    model: ServedModel

    @property
    def tokenizer(self) -> Tokenizer | None:
        """That of the model, if log-probabilities are told."""
        return self.model.tokenizer if self.record.logprobs else None


async def plan_lone_response(body: ResponseBody, catalog: Catalog, call: Call) -> Plan:
    """Check a body that stands for itself: nothing is stored, so nothing that needs a store may be asked for.

    Raises `ApiError`.
    """
    for name in ("background", "store", "previous_response_id"):
        if getattr(body, name):
            raise invalid(name, f"{name} must not be set in a batch, which stores no responses")
    check_effects(body)
    body = body.model_copy(update={"store": False})
    return await _plan(body, await catalog.resolve(body.model, body.lora), to_messages(body.input), call)


@router.post("/v1/responses", openapi_extra=request_body(ResponseBody), responses=STREAM_RESPONSES)
async def create(
    body: Annotated[ResponseBody, Depends(json_body(ResponseBody))],
    request: Request,
    services: ServicesDep,
    caller: CallerDep,
) -> Response:
    """Answer an input. With `background` the response goes on by itself: poll it, or resume its stream anywhere."""
    note(stream=bool(body.stream), background=bool(body.background))
    check_effects(body)
    model = await services.catalog.resolve(body.model, body.lora)
    call = call_of(request, services.settings)
    plan = await _plan(body, model, await _conversation(body, services, caller), call)
    record, command = plan.record, plan.command
    if command.webhook is not None:
        named = command.webhook.model_copy(update={"kind": "response", "name": record.id, "calls": record.calls})
        command = command.model_copy(update={"webhook": named})
    block = model.card.block_length
    (terms,) = await admit(request, call, services.limiter, [plan.command], block, keep=record.background)
    follow = services.relay.submit(command, request.receive, _retained(terms, services) if body.stored else terms)
    try:
        await follow.wait_for_admission()
        if follow.request_id != record.request_id:
            # An Idempotency-Key has named an earlier call.
            record = replace(record, id=_response_id(follow.request_id), request_id=follow.request_id)
            if body.stored:
                record = await services.stores.responses.find(caller.id, record.id) or record
            plan = replace(plan, record=record)
        if body.stored:
            await services.stores.responses.save(caller.id, record, _life_ms(services))
        if body.background and not body.stream:
            await follow.aclose()
            return json_response(response_object(record, "queued"))
        await follow.wait_for_news()
    except BaseException:
        await follow.aclose()
        raise
    if body.stream:
        return _stream(record, follow, plan.tokenizer, model if record.canvas else None, after=-1)
    return json_response(await answer_response(plan, follow))


@router.post("/v1/responses/input_tokens", openapi_extra=request_body(ResponseBody), responses=ERROR_RESPONSES)
async def count_input(
    body: Annotated[ResponseBody, Depends(json_body(ResponseBody))], services: ServicesDep, caller: CallerDep
) -> Response:
    """Count the tokens of an input as the model would see it."""
    model = await services.catalog.resolve(body.model)
    messages = await _conversation(body, services, caller)
    prompt = await _prompt(body, model, messages)
    return json_response({"object": "response.input_tokens", "input_tokens": len(prompt)})


@router.get("/v1/responses/{response_id}", responses=STREAM_RESPONSES)
async def retrieve(
    response_id: str,
    request: Request,
    services: ServicesDep,
    caller: CallerDep,
    stream: Annotated[bool, Query()] = False,
    starting_after: Annotated[int | None, Query(ge=-1, lt=COUNT_LIMIT)] = None,
) -> Response:
    """Return a stored response, or its events behind `starting_after`: those that are past, then those to come.

    Behind the last event of a response that has ended there is nothing: a stream without an event.
    """
    record = await _find(services, caller, response_id)
    tokenizer = await _tokenizer(services, record)
    if stream:
        if starting_after is not None:
            await _check_start(starting_after, record, tokenizer, services)
        subject = Subject(record.request_id, record.model, record.prompt_tokens)
        follow = services.relay.resume(subject, request.receive)
        try:
            await follow.wait_for_admission()
        except BaseException:
            await follow.aclose()
            raise
        return _stream(record, follow, tokenizer, None, -1 if starting_after is None else starting_after)
    result = await services.fleet.result(record.request_id)
    return json_response(_of_result(record, result, output_of(record, tokenizer)))


@router.delete("/v1/responses/{response_id}", responses=ERROR_RESPONSES)
async def delete(response_id: str, services: ServicesDep, caller: CallerDep) -> Response:
    """Forget a response; one that runs is ended first."""
    record = await _find(services, caller, response_id)
    await services.fleet.abort(record.request_id, "deleted")
    await services.stores.responses.delete(caller.id, record)
    return json_response({"id": record.id, "object": "response", "deleted": True})


@router.post("/v1/responses/{response_id}/cancel", responses=ERROR_RESPONSES)
async def cancel(response_id: str, services: ServicesDep, caller: CallerDep) -> Response:
    """End a background response; one that has ended stays as it is."""
    record = await _find(services, caller, response_id)
    if not record.background:
        raise invalid("response_id", "only a background response can be cancelled; close the connection of another")
    await services.fleet.abort(record.request_id, "cancelled")
    limit = time.monotonic() + _CANCEL_WAIT_S
    result = await services.fleet.result(record.request_id)
    while result.end is None and time.monotonic() < limit:
        await asyncio.sleep(_CANCEL_POLL_S)
        result = await services.fleet.result(record.request_id)
    return json_response(_of_result(record, result, output_of(record, await _tokenizer(services, record))))


@router.get("/v1/responses/{response_id}/input_items", responses=ERROR_RESPONSES)
async def input_items(
    response_id: str,
    services: ServicesDep,
    caller: CallerDep,
    after: Annotated[str | None, Query()] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Annotated[Order, Query()] = "desc",
) -> Response:
    """List what a response was asked."""
    record = await _find(services, caller, response_id)
    return json_response(page(as_items(record.items, record.id), after, limit, order))


async def _plan(body: ResponseBody, model: ServedModel, messages: list[dict[str, Any]], call: Call) -> Plan:
    prompt = await _prompt(body, model, messages)
    offer = choose(body.tools, body.tool_choice, parallel=body.parallel_tool_calls is not False, nested=False)
    constraint = await constraint_of(body, model.card, body.text, offer)
    (command,) = to_generate(body, [prompt], model, "input", call, constraint)
    return Plan(_record(body, command, model, messages), command, model)


async def _prompt(body: ResponseBody, model: ServedModel, messages: list[dict[str, Any]]) -> list[int]:
    """Return the ids of the conversation, with its instructions and what the model is told of tools."""
    instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
    tools = [_nested(tool) for tool in body.tools or ()]
    return await model.encode_chat(instructions + messages, tools=shown(tools, body.tool_choice), field="input")


def _nested(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool as templates know it, and chats have it."""
    told = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": told}


async def _conversation(body: ResponseBody, services: Services, caller: Caller) -> list[dict[str, Any]]:
    """Return the messages of this input, behind those of the response that it continues."""
    if body.previous_response_id is None:
        return to_messages(body.input)
    previous = await services.stores.responses.find(caller.id, body.previous_response_id)
    if previous is None:
        raise ApiError(404, "previous_response_not_found", "no such response", "previous_response_id")
    result = await services.fleet.result(previous.request_id)
    if result.end is None:
        raise invalid("previous_response_id", "that response has not ended yet")
    output = output_of(previous, None)
    _read(output, result)
    before = [*map(dict, previous.messages), output.message()]
    return before + to_messages(body.input, before)


def _response_id(request_id: str) -> str:
    """Return the id of a request's response: always the same one, from which nobody learns the request's."""
    return f"resp_{named_ulid(request_id)}"


def _record(body: ResponseBody, command: Generate, model: ServedModel, messages: list[dict[str, Any]]) -> Record:
    return Record(
        id=_response_id(command.id),
        request_id=command.id,
        model=command.model,
        created_at=int(time.time()),
        prompt_tokens=len(command.prompt),
        background=bool(body.background),
        store=body.stored,
        messages=messages,
        items=body.input,
        echo={
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": model.name,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "temperature": command.sampling.temperature,
            **({"text": body.text} if body.text and body.text.get("format") else {}),
            "tool_choice": body.tool_choice or "auto",
            "tools": [{"description": None, "parameters": None, "strict": True, **tool} for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": command.sampling.top_p if body.top_p is None else body.top_p,
            "user": body.user,
        },
        canvas=body.canvas_stream == "frames",
        calls=isinstance(command.constraint, ToolCalls),
        logprobs=command.logprobs is not None,
    )


async def _tokenizer(services: Services, record: Record) -> Tokenizer | None:
    return (await services.catalog.resolve(record.model)).tokenizer if record.logprobs else None


def _retained(terms: Terms, services: Services) -> Terms:
    return replace(terms, retention_ms=services.settings.response_ttl_s * 1000)


def _life_ms(services: Services) -> int:
    """Return how long a record is kept: as long as the log of its request can be."""
    return round(services.settings.request_timeout_s * 1000) + services.settings.response_ttl_s * 1000


async def _find(services: Services, caller: Caller, response_id: str) -> Record:
    record = await services.stores.responses.find(caller.id, response_id)
    if record is None:
        raise ApiError(404, "not_found", f"there is no response {response_id[:80]!r}", "response_id")
    return record


async def _check_start(after: int, record: Record, tokenizer: Tokenizer | None, services: Services) -> None:
    """Raise `ApiError` for a number that no event has had so far: its stream would keep silent for no told reason."""
    last = last_number(record, tokenizer, await services.fleet.result(record.request_id))
    if after > last:
        raise invalid("starting_after", f"starting_after must be at most {last}: no event has a higher number so far")


def _of_result(record: Record, result: Result, output: Output) -> dict[str, Any]:
    _read(output, result)
    if result.end is not None:
        return response_object(record, output.status(result.end), output, result.end)
    return response_object(record, "queued" if result.state == "queued" else "in_progress", output)


def _read(output: Output, result: Result) -> None:
    """Put what has come of a request into its output."""
    for delta in result.deltas:
        for _ in output.push(delta):
            pass
    if isinstance(result.end, Finished):
        for _ in output.end(result.end):
            pass


async def answer_response(plan: Plan, follow: Follow) -> dict[str, Any]:
    """Read to the end, and return the whole response; raises as `Follow`."""
    record, output = plan.record, output_of(plan.record, plan.tokenizer)
    end: Finished | None = None
    try:
        async for event in follow:
            match event:
                case Delta():
                    for _ in output.push(event):
                        pass
                case Finished():
                    end = event
                    for _ in output.end(event):
                        pass
                case Queued() | Started() | Snapshot() | None:
                    pass
                case _:
                    assert_never(event)
    finally:
        await follow.aclose()
    assert end is not None, "a follow that ends without raising has seen Finished"
    return response_object(record, output.status(end), output, end)


def _stream(
    record: Record, follow: Follow, tokenizer: Tokenizer | None, canvas: ServedModel | None, after: int
) -> EventStream:
    """Send the events with a number above `after`."""
    writer = EventWriter(record, tokenizer)
    frames = None if canvas is None else Frames(canvas.tokenizer, "tokens")

    def wanted(event: Mapping[str, Any]) -> bool:
        return event["sequence_number"] > after

    async def parts() -> AsyncGenerator[bytes]:
        for told in writer.begin():
            if wanted(told):
                yield sse(told)
        async for event in follow.raw():
            if event is None:
                yield KEEPALIVE
                continue
            for told in writer.of(event):
                if wanted(told):
                    yield sse(told)
            if frames is not None and isinstance(event, Snapshot):
                yield sse(writer.frame(frames.of_snapshot(event)))

    return EventStream(follow, parts(), lambda error: sse(writer.error(error)), done=b"")
