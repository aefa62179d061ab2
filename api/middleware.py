"""Plain ASGI middleware: request ids, the access log, the last resort for exceptions, the limit on bodies."""

import logging
import re
import time
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import CLIENT_GONE, ApiError, internal, render
from api.metrics import Metrics
from shared.telemetry import bind, note

logger = logging.getLogger("diffleet.api")

_CLIENT_ID = re.compile(r"[\x21-\x7e]{1,128}")
_SLASHES = re.compile("//+")
_QUIET = ("/health", "/metrics", "/ping", "/load")


class RequestLog:
    """Give each request an id, in and out, and log one line at its end: no prompt, no query string, no body.

    A caller's own X-Request-Id is kept if it is up to 128 visible ASCII characters.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        wanted = Headers(scope=scope).get("x-request-id", "")
        request_id = wanted if _CLIENT_ID.fullmatch(wanted) else f"req_{uuid4().hex}"
        status = CLIENT_GONE
        began = time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                headers["openai-processing-ms"] = str(round((time.perf_counter() - began) * 1000))
                for name, value in scope.get("state", {}).get("headers", {}).items():
                    headers[name] = value
            await send(message)

        with bind(request_id=request_id):
            try:
                await self._app(scope, receive, send_with_id)
            finally:
                self._finish(scope, status, time.perf_counter() - began)

    def _finish(self, scope: Scope, status: int, seconds: float) -> None:
        route = _route_of(scope)
        self._metrics.http_requests.labels(route, _method_of(scope), status).inc()
        self._metrics.http_seconds.labels(route).observe(seconds)
        level = logging.DEBUG if route.startswith(_QUIET) and status < 400 else logging.INFO
        fields = {"method": _method_of(scope), "route": route, "status": status, "ms": round(seconds * 1000, 1)}
        logger.log(level, "request finished", extra=fields)


class LastResort:
    """Turn an exception that nobody foresaw into a 500 of the usual shape; the log gets its type and place."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception:
            logger.exception("request failed")
            note(code="internal_error")
            if not started:
                await render(internal())(scope, receive, send)


class ForgivingPath:
    """Take a path with a slash at its end, or several in a row, for the one without; and HEAD for GET without a body.

    A redirect would lose the body of a POST; doubled slashes come from base URLs that end with one.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if len(scope["path"]) > 1:
            scope["path"] = _SLASHES.sub("/", scope["path"]).rstrip("/") or "/"
        if scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        # The server keeps the scope that it has made, and with it what to do for HEAD.
        inner = {**scope, "method": "GET", "state": scope.setdefault("state", {})}
        try:
            await self._app(inner, receive, send_head)
        finally:
            # The log tells the route.
            scope["route"] = inner.get("route")


class BodyLimit:
    """Refuse bodies over `limit` bytes with 413: by their announced length, and by the bytes that really come.

    `others` are paths with a limit of their own.
    """

    def __init__(self, app: ASGIApp, limit: int, others: Mapping[str, int]) -> None:
        self._app = app
        self._limit = limit
        self._others = others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = self._others.get(scope["path"], self._limit)
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and int(announced[:20]) > limit:
            await render(_too_large(limit))(scope, receive, send)
            return
        taken = 0

        async def counted_receive() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > limit:
                raise _too_large(limit)
            return message

        await self._app(scope, counted_receive, send)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, "body_too_large", f"the body is longer than {limit} bytes")


def _route_of(scope: Scope) -> str:
    """Return the route's pattern, never the path: paths are made by callers and would be labels without end."""
    route: Any = scope.get("route")
    return getattr(route, "path", "unmatched")


def _method_of(scope: Scope) -> str:
    method: str = scope["method"]
    return method if method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS") else "other"
