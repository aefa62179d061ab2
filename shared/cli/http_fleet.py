"""A fleet behind its HTTP api, as the command line asks it."""

import contextlib
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import httpx
import orjson

from shared.cli.canvas import Canvas, Cell
from shared.cli.exits import Exit, Stop
from shared.cli.question import Question
from shared.cli.sse import sse_data

KEY_VARIABLE = "DIFFLEET_API_KEY"
"""Not an option: every user of a machine can read a command line."""

_TIMEOUT = httpx.Timeout(connect=5.0, read=120.0, write=30.0, pool=5.0)
_LOOPBACK = {"127.0.0.1", "localhost", "::1"}


def server_of(url: str) -> str:
    """Return the address of a server; what OpenAI's clients call its base URL ends with /v1."""
    return url.rstrip("/").removesuffix("/v1")


@contextlib.asynccontextmanager
async def connected(url: str) -> AsyncGenerator[httpx.AsyncClient]:
    """Yield a client of the api at `url`; raises `Stop` for a bad address, and for what goes wrong on the way.

    It shows the key in `DIFFLEET_API_KEY`, if there is one.
    """
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise Stop(Exit.USAGE, f"{url!r} is not an http:// or https:// address")
    # A proxy from the environment is for the world outside, not for this machine.
    proxied = parts.hostname not in _LOOPBACK
    try:
        key = os.environ.get(KEY_VARIABLE)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with httpx.AsyncClient(
            base_url=server_of(url), timeout=_TIMEOUT, trust_env=proxied, headers=headers
        ) as client:
            yield client
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise Stop(
            Exit.UNREACHABLE, f"no fleet answers at {url}: start one with `diffleet up`, or name one with --url"
        ) from error
    except httpx.TimeoutException as error:
        raise Stop(Exit.FAILED, f"the fleet at {url} was silent for {_TIMEOUT.read:.0f} s") from error
    except httpx.HTTPError as error:
        raise Stop(Exit.FAILED, f"the connection to {url} broke: {str(error) or type(error).__name__}") from error


@contextlib.asynccontextmanager
async def ask(url: str, question: Question, *, frames: bool) -> AsyncGenerator[AsyncGenerator[Canvas]]:
    """Yield the growing answer; `frames` asks for the canvas between commits too. Raises `Stop`.

    Leaving early closes the connection, which ends the request in the fleet.
    """
    path, body = request_of(question, frames)
    advance = {"/generate": after_native, "/v1/completions": after_completion}.get(path, after_chat)
    async with connected(url) as client, client.stream("POST", path, json=body) as response:
        if response.status_code != 200:
            raise refusal(response.status_code, await response.aread())
        async with contextlib.aclosing(_states(response, advance)) as states:
            yield states


def request_of(question: Question, frames: bool) -> tuple[str, dict[str, object]]:
    """Return path and body: a chat, or for a raw prompt the native route, or with holes that of completions."""
    body: dict[str, object] = {
        "model": question.model,
        "max_tokens": question.max_tokens,
        "temperature": question.temperature,
        "seed": question.seed,
        "block_length": question.block_length,
        "stream": True,
        "stream_mode": "denoise" if frames else "block_append",
    }
    body = {name: value for name, value in body.items() if value is not None}
    if question.loras:
        body["lora"] = [{"name": name, "scale": scale} for name, scale in question.loras]
    if question.json_schema is not None:
        body["guided_json"] = question.json_schema
    diffusion = question.decoding
    counts = {"include_usage": True, "continuous_usage_stats": True}
    if question.infill is not None:
        diffusion["template"] = question.infill.template
        if question.raw:
            del body["stream_mode"]
            if frames:
                diffusion |= {"stream": "frames", "frame_detail": "full"}
            raw = {"prompt": question.prompt, "stream_options": counts, "diffusion": diffusion}
            return "/v1/completions", {**body, **raw}
    if diffusion:
        body["diffusion"] = diffusion
    if question.raw:
        return "/generate", {**body, "prompt": question.prompt}
    return "/v1/chat/completions", {**body, "messages": question.messages, "stream_options": counts}


def after_chat(canvas: Canvas, chunk: Mapping[str, Any]) -> Canvas:
    """Return the canvas after one chunk of a chat stream; raises `Stop` for an error frame."""
    if error := chunk.get("error"):
        raise _failure(error)
    usage: Mapping[str, int] = chunk.get("usage") or {}
    tokens, nfe = usage.get("completion_tokens", canvas.tokens), usage.get("nfe", canvas.nfe)
    for choice in chunk["choices"]:
        if view := chunk.get("diffusion"):
            canvas = _denoised(canvas, view)
        if text := choice["delta"].get("content"):
            canvas = canvas.committed(text, tokens - canvas.tokens, nfe)
        canvas = _ended(canvas, choice)
    return canvas.finished(canvas.finish, tokens, nfe) if canvas.finish else canvas


def after_completion(canvas: Canvas, chunk: Mapping[str, Any]) -> Canvas:
    """Return the canvas after one chunk of a completion, whose frames are edits; raises `Stop` for an error frame."""
    if error := chunk.get("error"):
        raise _failure(error)
    usage: Mapping[str, int] = chunk.get("usage") or {}
    tokens, nfe = usage.get("completion_tokens", canvas.tokens), usage.get("nfe", canvas.nfe)
    for choice in chunk["choices"]:
        if (view := chunk.get("diffusion")) and view["step"] is not None:
            canvas = _edited(canvas, view, nfe)
        if text := choice.get("text"):
            canvas = canvas.committed(text, tokens - canvas.tokens, nfe)
        canvas = _ended(canvas, choice)
    return canvas.finished(canvas.finish, tokens, nfe) if canvas.finish else canvas


def _ended(canvas: Canvas, choice: Mapping[str, Any]) -> Canvas:
    if not choice.get("finish_reason"):
        return canvas
    canvas = canvas.finished(choice.get("finish_detail") or choice["finish_reason"])
    told: Mapping[str, Any] = choice.get("diffusion") or {}
    return replace(canvas, holes=told.get("holes"))


def _edited(canvas: Canvas, view: Mapping[str, Any], nfe: int) -> Canvas:
    """Return the canvas with those positions of its active block changed that a frame names; a full one names all."""
    cells = {} if view["full"] else dict(enumerate(canvas.active, view["offset"]))
    for position, token, text, _, sure in view["edits"]:
        cells[position] = Cell(None if token is None else text, sure)
    return canvas.denoised(tuple(cells[position] for position in sorted(cells)), view["step"], nfe)


def after_native(canvas: Canvas, event: Mapping[str, Any]) -> Canvas:
    """Return the canvas after one event of the native stream; raises `Stop` for an error event."""
    match event["event"]:
        case "buffer_snapshot":
            return _denoised(canvas, event)
        case "append":
            return canvas.committed(event["text"], len(event["token_ids"]), event["nfe"])
        case "final":
            return canvas.finished(event["finish_detail"], event["usage"]["completion_tokens"], event["nfe"])
        case "error":
            raise _failure(event["error"])
        case _:
            # A newer api may tell more than this program knows.
            return canvas


def _denoised(canvas: Canvas, view: Mapping[str, Any]) -> Canvas:
    confidence = [*view["confidence"], *[0.0] * len(view["tokens"])]
    cells = (Cell(text, sure) for text, sure in zip(view["tokens"], confidence, strict=False))
    return canvas.denoised(tuple(cells), view["step"], view["nfe"])


async def _states(
    response: httpx.Response, advance: Callable[[Canvas, Mapping[str, Any]], Canvas]
) -> AsyncGenerator[Canvas]:
    canvas = Canvas()
    async for data in sse_data(response.aiter_bytes()):
        if data == b"[DONE]":
            return
        canvas = advance(canvas, orjson.loads(data))
        yield canvas
    raise Stop(Exit.FAILED, "the connection ended before the answer did")


async def fleet_models(url: str) -> list[str]:
    """Return the names of the models that the fleet knows; raises `Stop`."""
    return [model["id"] for model in (await _told(url, "/v1/models"))["data"]]


async def chats(url: str, model: str) -> bool:
    """Return whether a model answers chats: it has a template for them. Raises `Stop`."""
    return "chat" in (await _told(url, f"/v1/models/{model}"))["capabilities"]


async def _told(url: str, path: str) -> Any:
    """Return what a fleet answers there; raises `Stop`."""
    async with connected(url) as client:
        response = await client.get(path)
        if response.status_code != 200:
            raise refusal(response.status_code, response.content)
        return orjson.loads(response.content)


def refusal(status: int, body: bytes) -> Stop:
    """Return what an error response says, with the field that it names."""
    try:
        error = orjson.loads(body)["error"]
        stop = _failure(error)
    except (orjson.JSONDecodeError, KeyError, TypeError):
        stop = Stop(Exit.FAILED, f"HTTP {status}: {body[:200].decode(errors='replace')}")
    stop.exit_code = Exit.REFUSED if 400 <= status < 500 and status != 429 else Exit.FAILED
    return stop


def _failure(error: Mapping[str, Any]) -> Stop:
    message, param = str(error["message"]), error.get("param")
    field = f" ({param})" if param and param not in message else ""
    return Stop(Exit.REFUSED if error.get("type") == "invalid_request_error" else Exit.FAILED, f"{message}{field}")
