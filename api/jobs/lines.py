"""Lines of a batch: read, checked all at once, and run one by one on the bulk lane."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import orjson

from api.bundle import Bundle
from api.catalog import ServedModel
from api.deps import Services
from api.errors import ApiError, internal, invalid, of_exception
from api.numbers import beyond_range, held_by_none
from api.relay import Terms
from api.requests import Call
from api.responses.schemas import ResponseBody
from api.routes.chat import answer_chat, plan_chat
from api.routes.completions import answer_completion, plan_completion
from api.routes.embeddings import MOST_INPUTS, EmbeddingsBody, answer_embeddings, plan_embeddings
from api.routes.responses import answer_response, plan_lone_response
from api.schemas import ChatBody, CompletionBody, parse
from api.trace import trace_context
from shared.client import FleetUnavailable, QueueFull
from shared.commands import Generate
from shared.keys import named_ulid, partition

MOST_LINES = 50_000
_MOST_ERRORS = 100
"""Faults of a file that are listed; the first ones are enough to mend it."""
_LONGEST_PAUSE_S = 10.0


@dataclass(frozen=True, slots=True)
class Line:
    number: int
    """From 1, as editors count."""
    custom_id: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Faults:
    """Why a file cannot be a batch: entries of OpenAI's `errors.data`."""

    entries: list[dict[str, object]]


async def read_lines(content: AsyncIterator[bytes], endpoint: str) -> list[Line] | Faults:
    """Parse a file; every line must be a request for the endpoint, with a `custom_id` of its own."""
    lines: list[Line] = []
    faults: list[dict[str, object]] = []
    seen: set[str] = set()
    number = 0
    async for raw in _split(content):
        number += 1
        if not raw.strip():
            continue
        if number > MOST_LINES:
            faults.append(_fault("too_many_lines", None, f"a batch may have {MOST_LINES} lines", None))
            break
        line = _parse(raw, number, endpoint)
        if isinstance(line, Line) and line.custom_id in seen:
            line = _fault("duplicate_custom_id", number, "this custom_id was used by an earlier line", "custom_id")
        if isinstance(line, Line):
            seen.add(line.custom_id)
            lines.append(line)
        elif len(faults) < _MOST_ERRORS:
            faults.append(line)
    if not lines and not faults:
        faults.append(_fault("empty_file", None, "the file has no line", None))
    return Faults(faults) if faults else lines


def _parse(raw: bytes, number: int, endpoint: str) -> Line | dict[str, object]:
    try:
        value: object = orjson.loads(raw)
    except orjson.JSONDecodeError:
        if field := beyond_range(raw):
            return _fault("invalid_value", number, held_by_none(field), field)
        return _fault("invalid_json_line", number, _why_not_json(raw), None)
    match value:
        case {"custom_id": str(custom_id), "method": "POST", "url": str(url), "body": dict()} if (
            0 < len(custom_id) <= 512
        ):
            if url != endpoint:
                return _fault("mismatched_url", number, f"url must be {endpoint}, as the batch's endpoint", "url")
            return Line(number, custom_id, cast(dict[str, dict[str, Any]], value)["body"])
        case {"custom_id": str(custom_id)} if not 0 < len(custom_id) <= 512:
            return _fault("invalid_value", number, "custom_id must have 1 to 512 characters", "custom_id")
        case dict():
            given = cast(dict[str, object], value)
            field, kind = next(
                ((name, kind) for name, (kind, type_) in _KINDS.items() if not isinstance(given.get(name), type_)),
                ("method", "POST"),
            )
            if field not in given:
                return _fault("missing_required_parameter", number, f"{field} is required", field)
            return _fault("invalid_value", number, f"{field} must be {kind}", field)
        case _:
            return _fault("invalid_value", number, "this line is not a JSON object", None)


_KINDS: Mapping[str, tuple[str, type]] = {
    "custom_id": ("a string", str),
    "url": ("a string", str),
    "body": ("an object", dict),
}
"""Of a line's fields: in JSON's words, and in Python's."""


def _why_not_json(raw: bytes) -> str:
    try:
        text = raw.decode()
    except UnicodeDecodeError as wrong:
        return f"this line is not UTF-8: byte {wrong.start} is no part of a character"
    if text.startswith("\ufeff"):
        return "this line begins with a byte order mark: write the file without one"
    return "this line is not JSON"


def _fault(code: str, line: int | None, message: str, param: str | None) -> dict[str, object]:
    return {"code": code, "line": line, "message": message, "param": param}


async def _split(content: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    held = b""
    async for piece in content:
        *whole, held = (held + piece).split(b"\n")
        for line in whole:
            yield line
    if held:
        yield held


def request_id(model: str, batch: str, number: int, index: int) -> str:
    """Return the id of a line's request: the same every time, so that a line that runs again is submitted once."""
    return f"r_{partition(model)}_{named_ulid(f'{batch} {number} {index}')}"


def request_count(body: Mapping[str, Any]) -> int:
    """Return how many requests a line makes at most: its choices of each of its prompts or inputs."""
    choices, given = body.get("n"), body.get("prompt", body.get("input"))
    prompts = len(cast(list[object], given)) if isinstance(given, list) else 1
    return min(MOST_INPUTS, max(1, prompts) * (choices if type(choices) is int and choices > 0 else 1))


async def run_line(services: Services, endpoint: str, batch: str, line: Line, expires_at: int) -> dict[str, object]:
    """Run one line to its end, and return its line of the output or error file.

    Raises `FleetUnavailable`. A line that is cut short goes on in the fleet; run again, it is found there.
    """
    try:
        left_s = max(1.0, expires_at - time.time())
        timeout_s = min(services.settings.request_timeout_s, left_s)

        def name(model: str, index: int) -> str:
            return request_id(model, batch, line.number, index)

        call = Call(timeout_s, trace_context({}), lane="bulk", name_request=name)
        body = await _run(services, endpoint, line, call, expires_at)
    except FleetUnavailable:
        raise
    except Exception as error:
        known = of_exception(error) or internal()
        return _outcome(batch, line, known.status, {"error": known.body})
    return _outcome(batch, line, 200, body)


async def _run(services: Services, endpoint: str, line: Line, call: Call, expires_at: int) -> dict[str, object]:
    if line.body.get("stream"):
        raise invalid("stream", "stream must not be set in a batch")
    match endpoint:
        case "/v1/chat/completions":
            chat = await plan_chat(parse(ChatBody, line.body), services.catalog, call)
            return await answer_chat(chat, await _open(services, chat.commands, chat.model, expires_at))
        case "/v1/completions":
            completion = await plan_completion(parse(CompletionBody, line.body), services.catalog, call)
            bundle = await _open(services, completion.commands, completion.model, expires_at)
            return await answer_completion(completion, bundle)
        case "/v1/responses":
            response = await plan_lone_response(parse(ResponseBody, line.body), services.catalog, call)
            bundle = await _open(services, [response.command], response.model, expires_at)
            return await answer_response(response, bundle.follows[0])
        case "/v1/embeddings":
            vectors = await plan_embeddings(parse(EmbeddingsBody, line.body), services.catalog, call)

            async def open_part(part: slice) -> Bundle:
                return await _open(services, vectors.commands[part], vectors.model, expires_at)

            return await answer_embeddings(vectors, open_part)
        case _:
            raise ApiError(400, "invalid_value", "batches have no such endpoint", "url")


async def _open(services: Services, commands: Sequence[Generate], model: ServedModel, expires_at: int) -> Bundle:
    """Submit; a full queue is waited for."""
    terms = Terms(keep=True, block_length=model.card.block_length)
    while True:
        try:
            return await Bundle.open(services.relay, commands, None, [terms] * len(commands))
        except QueueFull as full:
            if time.time() > expires_at:
                raise
            await asyncio.sleep(min(_LONGEST_PAUSE_S, full.retry_after_s))


def _outcome(batch: str, line: Line, status: int, body: Mapping[str, object]) -> dict[str, object]:
    name = f"batch_req_{batch.rpartition('_')[2]}_{line.number}"
    response = {"status_code": status, "request_id": name, "body": body}
    return {"id": name, "custom_id": line.custom_id, "response": response, "error": None}


def unfinished(batch: str, line: Line, code: str, message: str) -> dict[str, object]:
    """Return the line of the error file for a request that has not run."""
    name = f"batch_req_{batch.rpartition('_')[2]}_{line.number}"
    return {"id": name, "custom_id": line.custom_id, "response": None, "error": {"code": code, "message": message}}
