"""Responses in OpenAI's shape, and their events: both follow from what was asked and from the durable events alone.

So any front can tell any part of the stream, with the same sequence numbers, at any time: nothing but the fleet's own
event log is kept for it.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, assert_never

import orjson

from api.errors import ApiError
from api.responses.output import Called, Change, Output, Said, Status
from api.responses.store import Record
from shared.client import Result
from shared.events import Delta, Failed, Finished, Queued, Snapshot, Started, Usage
from shared.text import Tokenizer

_IN_PROGRESS = 2
"""Number of `response.in_progress`."""


def output_of(record: Record, tokenizer: Tokenizer | None) -> Output:
    """Return the output before anything has come of it; `tokenizer` of the model, if log-probabilities are told."""
    return Output(record.id.rpartition("_")[2], record.calls, tokenizer)


def response_object(
    record: Record, status: Status, output: Output | None = None, end: Finished | Failed | None = None
) -> dict[str, Any]:
    """Return the response with what has come of its output."""
    content: dict[str, Any] = {
        "id": record.id,
        "object": "response",
        "created_at": record.created_at,
        "completed_at": None,
        "status": status,
        "background": record.background,
        "error": None,
        "incomplete_details": None,
        "model": record.model,
        "output": [] if output is None else output.told(status),
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
    if isinstance(end, Failed):
        content["error"] = {"code": "server_error", "message": end.message}
    if status == "incomplete":
        content["incomplete_details"] = {"reason": "max_output_tokens"}
    if isinstance(end, Finished):
        if status == "completed" and end.ended_ms:
            # Two machines' clocks may differ.
            content["completed_at"] = max(record.created_at, end.ended_ms // 1000)
        content["usage"] = usage_fields(end.usage)
        content["finish_detail"] = end.detail
    return content


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


class EventWriter:
    """Turns the events of a request, from its first, into the events of a response, numbered from 0."""

    def __init__(self, record: Record, tokenizer: Tokenizer | None = None) -> None:
        """`tokenizer` as for `output_of`."""
        self._record = record
        self._number = 0
        self._running = False
        self._output = output_of(record, tokenizer)
        self._opened = 0
        """Items that have been announced; all but the last one of them have been closed."""

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
                yield from self._run()
                for change in self._output.push(event):
                    yield from self._tell(change)
            case Finished() | Failed():
                yield from self._close(event)
            case _:
                assert_never(event)

    @property
    def last_number(self) -> int:
        """Number of the event that was told last."""
        return max(0, self._number - 1)

    def frame(self, canvas: Mapping[str, object]) -> dict[str, Any]:
        """Return a frame of the canvas: it may be lost, so it takes no number of its own."""
        return {
            "type": "response.diffusion.frame",
            "sequence_number": self.last_number,
            "output_index": 0,
            "diffusion": canvas,
        }

    def error(self, error: ApiError) -> dict[str, Any]:
        """Return the event of a stream that breaks off; the response itself may go on.

        It takes no number of its own: who resumes behind it would miss the event that has the number.
        """
        told = {"code": error.code, "message": error.message, "param": error.param}
        return {"type": "error", "sequence_number": self.last_number, **told}

    def _run(self) -> Iterator[dict[str, Any]]:
        if not self._running:
            self._running = True
            yield self._whole("response.in_progress", "in_progress")

    def _tell(self, change: Change) -> Iterator[dict[str, Any]]:
        item, index = change.item, change.index
        if index == self._opened:
            yield from self._close_item("completed")
            self._opened += 1
            begun = item.item("in_progress", begun=False)
            yield self._numbered("response.output_item.added", output_index=index, item=begun)
            if isinstance(item, Said):
                part = Said(item.id).part()
                yield self._numbered("response.content_part.added", **_place(item, index), part=part)
        match item:
            case Said() if change.text:
                logprobs = list(change.logprobs)
                yield self._numbered(
                    "response.output_text.delta", **_place(item, index), delta=change.text, logprobs=logprobs
                )
            case Called() if change.text:
                yield self._numbered(
                    "response.function_call_arguments.delta", item_id=item.id, output_index=index, delta=change.text
                )
            case _:
                pass

    def _close_item(self, status: Status) -> Iterator[dict[str, Any]]:
        """Close the item that was announced last."""
        if not self._opened:
            return
        index = self._opened - 1
        item = self._output.items[index]
        match item:
            case Said():
                place, part = _place(item, index), item.part()
                yield self._numbered("response.output_text.done", **place, text=item.text, logprobs=part["logprobs"])
                yield self._numbered("response.content_part.done", **place, part=part)
            case Called():
                yield self._numbered(
                    "response.function_call_arguments.done",
                    item_id=item.id,
                    output_index=index,
                    name=item.name,
                    arguments=item.arguments,
                )
            case _:
                assert_never(item)
        told = item.item(self._output.item_status(index, status))
        yield self._numbered("response.output_item.done", output_index=index, item=told)

    def _close(self, end: Finished | Failed) -> Iterator[dict[str, Any]]:
        yield from self._run()
        if isinstance(end, Finished):
            for change in self._output.end(end):
                yield from self._tell(change)
        status = self._output.status(end)
        if isinstance(end, Finished):
            yield from self._close_item(status)
        # OpenAI has no event for a cancelled response; it is one that is not complete.
        kind = f"response.{status}" if status in ("completed", "failed") else "response.incomplete"
        yield self._numbered(kind, response=response_object(self._record, status, self._output, end))

    def _whole(self, kind: str, status: Status) -> dict[str, Any]:
        return self._numbered(kind, response=response_object(self._record, status))

    def _numbered(self, kind: str, **fields: object) -> dict[str, Any]:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event


def last_number(record: Record, tokenizer: Tokenizer | None, result: Result) -> int:
    """Return the highest number of an event that anybody can have been told of a response so far."""
    writer = EventWriter(record, tokenizer)
    events = result.deltas if result.end is None else [*result.deltas, result.end]
    for _ in (*writer.begin(), *itertools.chain.from_iterable(map(writer.of, events))):
        pass
    # That it is in progress may have been told before there is a durable event.
    return max(_IN_PROGRESS, writer.last_number)


def _place(item: Said, index: int) -> dict[str, Any]:
    return {"item_id": item.id, "output_index": index, "content_index": 0}


def sse(event: Mapping[str, Any]) -> bytes:
    """Return one server-sent event; its name is its type."""
    return b"event: " + event["type"].encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n"
