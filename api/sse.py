"""Server-sent events, framed by hand over orjson bytes.

OpenAI's client trips over `id:`, `retry:` and events without data; comments and plain `data:` lines are safe. A stream
ends with `[DONE]`, always; a failed one has a frame with a nested error object before it, because clients take a
stream that just ends for a success.
"""

import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Protocol

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.errors import ApiError, ClientGone, internal, of_exception
from shared.telemetry import note

logger = logging.getLogger("diffleet.api")

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keep-alive\n\n"


def frame(payload: Mapping[str, object]) -> bytes:
    """Return one event; JSON has no raw line breaks, so one `data:` line is enough."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def error_frame(error: ApiError) -> bytes:
    """Return the frame that OpenAI's clients raise as an error: nested, for a flat one they pass over."""
    return frame({"error": error.body})


class Source(Protocol):
    async def aclose(self) -> None: ...


class EventStream(Response):
    """Send `frames`, made from the events of `source`, which is closed at the end however that comes about."""

    media_type = "text/event-stream"

    def __init__(
        self,
        source: Source,
        frames: AsyncGenerator[bytes],
        error_frame: Callable[[ApiError], bytes],
        done: bytes = DONE,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache, no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._source = source
        self._frames = frames
        self._error_frame = error_frame
        self._done = done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                async with aclosing(self._frames) as frames:
                    async for part in frames:
                        await _send_part(send, part)
            except ClientGone:
                return
            except Exception as error:
                await _send_part(send, self._error_frame(_foreseen(error)))
            await _send_part(send, self._done, last=True)
        finally:
            await self._source.aclose()


def _foreseen(error: Exception) -> ApiError:
    known = of_exception(error)
    if known is None:
        logger.error("stream failed", exc_info=error)
        known = internal()
    note(code=known.code)
    return known


async def _send_part(send: Send, part: bytes, last: bool = False) -> None:
    await send({"type": "http.response.body", "body": part, "more_body": not last})
