"""What a message says: that something has ended, how, and what it has cost. Never a prompt, never an answer.

The shape is that of Standard Webhooks (`type`, `timestamp`, `data`) and of OpenAI's events (`id`, `object`,
`created_at`, `data.id`) at once, so that the verifiers of both take it. It is made from what is stored alone, so each
try sends the same.
"""

from datetime import UTC, datetime
from typing import Any, assert_never

import orjson

from api.responses.shape import usage_fields
from api.transcript import usage_of
from shared.events import Failed, Finished, InvalidEvent, decode_event
from shared.keys import model_of
from shared.webhooks import Taken


class Unreadable(Exception):
    """Nobody of this version has written the message."""


def message_id(subject_id: str) -> str:
    """Return the id by which a receiver tells a repeat: one for each end, without a full stop."""
    return f"evt_{subject_id.rpartition('_')[2]}"


def render(message: Taken, cut: bool = False) -> bytes:
    """Return the body, as JSON; `cut`: the answer has ended within a call. Raises `Unreadable`."""
    status, data = _subject(message, cut)
    at = datetime.fromtimestamp(message.ended_ms / 1000, UTC)
    return orjson.dumps(
        {
            "id": message_id(message.id),
            "object": "event",
            "type": f"{message.to.kind}.{status}",
            "created_at": message.ended_ms // 1000,
            "timestamp": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "data": data,
        }
    )


def _subject(message: Taken, cut: bool) -> tuple[str, dict[str, Any]]:
    match message.to.kind:
        case "request":
            end = _end(message)
            status = _status(end)
            data = _head(message, message.id, status)
            if isinstance(end, Finished):
                data |= {"finish_reason": end.reason, "finish_detail": end.detail, "usage": usage_of(end.usage)}
            return status, data | {"error": _error(end), "metadata": message.to.metadata}
        case "response":
            end = _end(message)
            status = _status(end)
            if isinstance(end, Finished) and (end.reason == "length" or (end.reason == "stop" and cut)):
                status = "incomplete"
            data = _head(message, message.to.name or message.id, status)
            if isinstance(end, Finished):
                data |= {"finish_detail": end.detail, "usage": usage_fields(end.usage)}
            return status, data | {"error": _error(end), "metadata": message.to.metadata}
        case "batch":
            try:
                facts = orjson.loads(message.end)
                status = str(facts["status"])
            except (orjson.JSONDecodeError, KeyError, TypeError) as error:
                raise Unreadable from error
            return status, {"id": message.id, "object": "batch", **facts, "metadata": message.to.metadata}
        case _:
            assert_never(message.to.kind)


def _head(message: Taken, name: str, status: str) -> dict[str, Any]:
    try:
        model = message.to.model or model_of(message.id)
    except ValueError as error:
        raise Unreadable from error
    kind = message.to.kind
    return {
        "id": name,
        "object": kind,
        "request_id": message.id,
        "model": model,
        "status": status,
        "choice": message.to.choice,
    }


def _end(message: Taken) -> Finished | Failed:
    try:
        end = decode_event(message.end)
    except InvalidEvent as error:
        raise Unreadable from error
    if not isinstance(end, Finished | Failed):
        raise Unreadable
    return end


def _status(end: Finished | Failed) -> str:
    match end:
        case Finished(reason="aborted"):
            return "cancelled"
        case Finished():
            return "completed"
        case Failed():
            return "failed"
        case _:
            assert_never(end)


def _error(end: Finished | Failed) -> dict[str, str | None] | None:
    return {"code": end.code, "message": end.message, "param": end.param} if isinstance(end, Failed) else None
