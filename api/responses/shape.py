"""Responses in OpenAI's shape, and their events: both follow from what was asked and from the durable events alone.

So any front can tell any part of the stream, with the same sequence numbers, at any time: nothing but the fleet's own
event log is kept for it.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, assert_never

import orjson

from api.errors import ApiError
from api.responses.store import Record
from shared.events import Delta, Failed, Finished, Queued, Snapshot, Started, Usage

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


def response_object(
    record: Record, status: Status, text: str | None = None, end: Finished | Failed | None = None
) -> dict[str, Any]:
    """Return the response; `text` None: its message has not begun."""
    content: dict[str, Any] = {
        "id": record.id,
        "object": "response",
        "created_at": record.created_at,
        "status": status,
        "background": record.background,
        "error": None,
        "incomplete_details": None,
        "model": record.model,
        "output": [] if text is None else [message_item(record, status, text)],
        "parallel_tool_calls": True,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": record.store,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "truncation": "disabled",
        "usage": None,
        **record.echo,
    }
    match end:
        case Finished(reason="length"):
            content["incomplete_details"] = {"reason": "max_output_tokens"}
        case Failed():
            content["error"] = {"code": "server_error", "message": end.message}
        case Finished() | None:
            pass
        case _:
            assert_never(end)
    if isinstance(end, Finished):
        content["usage"] = usage_fields(end.usage)
        content["finish_detail"] = end.detail
    return content


def status_of(end: Finished | Failed) -> Status:
    match end:
        case Failed():
            return "failed"
        case Finished(reason="stop"):
            return "completed"
        case Finished(reason="length"):
            return "incomplete"
        case Finished(reason="aborted"):
            return "cancelled"
        case _:
            raise AssertionError("every reason has a status")


def usage_fields(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "nfe": usage.nfe,
        "blocks": usage.blocks,
    }


def message_item(record: Record, status: Status, text: str | None) -> dict[str, Any]:
    """Return the one output item; `text` None: it has no part yet."""
    match status:
        case "queued" | "in_progress":
            told = "in_progress"
        case "completed":
            told = "completed"
        case "incomplete" | "failed" | "cancelled":
            told = "incomplete"
        case _:
            assert_never(status)
    return {
        "id": f"msg_{record.id.rpartition('_')[2]}",
        "type": "message",
        "role": "assistant",
        "status": told,
        "content": [] if text is None else [_part(text)],
    }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class EventWriter:
    """Turns the events of a request, from its first, into the events of a response, numbered from 0."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._number = 0
        self._running = False
        self._opened = False
        self._texts: list[str] = []

    def begin(self) -> Iterator[dict[str, Any]]:
        """Yield what stands before all news of the request."""
        yield self._whole("response.created", "queued")
        yield self._whole("response.queued", "queued")

    def of(self, event: Queued | Started | Delta | Snapshot | Finished | Failed) -> Iterator[dict[str, Any]]:
        match event:
            case Queued() | Snapshot():
                pass
            case Started():
                yield from self._run()
            case Delta():
                yield from self._open()
                if event.text:
                    self._texts.append(event.text)
                    yield self._numbered("response.output_text.delta", **self._place, delta=event.text, logprobs=[])
            case Finished() | Failed():
                yield from self._close(event)
            case _:
                assert_never(event)

    def frame(self, canvas: Mapping[str, object]) -> dict[str, Any]:
        """Return a frame of the canvas: it may be lost, so it takes no number of its own."""
        return {
            "type": "response.diffusion.frame",
            "sequence_number": max(0, self._number - 1),
            "output_index": 0,
            "diffusion": canvas,
        }

    def error(self, error: ApiError) -> dict[str, Any]:
        """Return the event of a stream that breaks off; the response itself may go on."""
        return self._numbered("error", code=error.code, message=error.message, param=error.param)

    def _run(self) -> Iterator[dict[str, Any]]:
        if not self._running:
            self._running = True
            yield self._whole("response.in_progress", "in_progress")

    def _open(self) -> Iterator[dict[str, Any]]:
        yield from self._run()
        if not self._opened:
            self._opened = True
            item = message_item(self._record, "in_progress", None)
            yield self._numbered("response.output_item.added", output_index=0, item=item)
            yield self._numbered("response.content_part.added", **self._place, part=_part(""))

    def _close(self, end: Finished | Failed) -> Iterator[dict[str, Any]]:
        status, text = status_of(end), "".join(self._texts)
        if isinstance(end, Failed):
            yield from self._run()
            yield self._numbered(
                "response.failed",
                response=response_object(self._record, status, text if self._opened else None, end),
            )
            return
        yield from self._open()
        yield self._numbered("response.output_text.done", **self._place, text=text, logprobs=[])
        yield self._numbered("response.content_part.done", **self._place, part=_part(text))
        item = message_item(self._record, status, text)
        yield self._numbered("response.output_item.done", output_index=0, item=item)
        # OpenAI has no event for a cancelled response; it is one that is not complete.
        kind = "response.completed" if status == "completed" else "response.incomplete"
        yield self._numbered(kind, response=response_object(self._record, status, text, end))

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": f"msg_{self._record.id.rpartition('_')[2]}", "output_index": 0, "content_index": 0}

    def _whole(self, kind: str, status: Status) -> dict[str, Any]:
        return self._numbered(kind, response=response_object(self._record, status))

    def _numbered(self, kind: str, **fields: object) -> dict[str, Any]:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event


def sse(event: Mapping[str, Any]) -> bytes:
    """Return one server-sent event; its name is its type."""
    return b"event: " + event["type"].encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n"
