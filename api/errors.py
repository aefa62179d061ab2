"""Errors as OpenAI's clients know them: `{"error": {"message", "type", "param", "code"}}`, for every status."""

import math
from collections.abc import Mapping
from typing import assert_never

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from shared.client import (
    FleetUnavailable,
    IdempotencyConflict,
    QueueFull,
    TenantFull,
    UnknownModel,
    UnknownRequest,
)
from shared.complaints import complaint_in, complaint_of, path_of
from shared.events import Failed
from shared.telemetry import note

CLIENT_GONE = 499
"""Logged and counted where the caller left before the status line; nobody receives it."""
_MOST_RETRY_AFTER_S = 120
"""OpenAI's client does not retry at all if it is told to wait longer."""
_TYPES = {404: "invalid_request_error", 429: "rate_limit_error", 503: "service_unavailable_error"}
_HTTP_CODES = {401: "invalid_api_key", 403: "permission_denied", 404: "not_found", 405: "method_not_allowed"}


class ApiError(Exception):
    """A request that ends with an error response, or with an error frame if its stream has begun."""

    def __init__(
        self, status: int, code: str, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, str | None]:
        fallback = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "message": self.message,
            "type": _TYPES.get(self.status, fallback),
            "param": self.param,
            "code": self.code,
        }


class ClientGone(Exception):
    """The caller closed the connection: nobody reads an answer any more."""


def invalid(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    return ApiError(400, code, message, param)


def unsupported(param: str, how: str = "with this value by this server") -> ApiError:
    """`how` ends the sentence: by whom or where it is not, and what with."""
    return ApiError(400, "unsupported_parameter", f"{param} is not supported {how}", param)


def overloaded(message: str, retry_after_s: float) -> ApiError:
    seconds = min(max(1, math.ceil(retry_after_s)), _MOST_RETRY_AFTER_S)
    return ApiError(503, "server_is_overloaded", message, headers={"Retry-After": str(seconds)})


def shutting_down() -> ApiError:
    return overloaded("this server is shutting down and no longer follows this request; send it again", 1)


def internal() -> ApiError:
    return ApiError(500, "internal_error", "the server failed; the request id tells its operators where to look")


_FIELDS: Mapping[str, str | None] = {
    "decoding": "diffusion.strategy",
    "cfg_scale": "diffusion.cfg_scale",
    "template": "diffusion.template",
    "draft": "prediction",
    "embed": "model",
    "constraint": None,
}
"""Fields of a command that bodies have by another name; a constraint comes from one of many."""


def of_failure(event: Failed) -> ApiError:
    """Return the error of a request that a worker gave up."""
    param = _FIELDS.get(event.param or "", event.param)
    match event.code:
        case "invalid_request":
            return invalid(param, event.message)
        case "unsupported":
            return ApiError(400, "unsupported_parameter", event.message, param)
        case "too_long":
            return ApiError(400, "context_length_exceeded", event.message, param or "prompt")
        case "out_of_memory":
            return overloaded(event.message, 1)
        case "expired":
            return ApiError(504, "timeout", event.message, param)
        case "lost":
            return ApiError(500, "worker_lost", event.message)
        case "poison" | "nan" | "internal":
            return ApiError(500, "internal_error", event.message)
        case _:
            assert_never(event.code)


def of_exception(error: Exception) -> ApiError | None:
    """Return what an expected exception means to a caller; None for what nobody foresaw."""
    match error:
        case ApiError():
            return error
        case TenantFull():
            seconds = str(min(max(1, error.retry_after_s), _MOST_RETRY_AFTER_S))
            message = "this API key has as many requests queued and running as it may"
            return ApiError(429, "rate_limit_exceeded", message, headers={"Retry-After": seconds})
        case QueueFull():
            return overloaded("the queue of this model is full", error.retry_after_s)
        case UnknownModel():
            return ApiError(404, "model_not_found", "no such model", "model")
        case UnknownRequest():
            return ApiError(404, "not_found", "no such request, or it is no longer kept", "request_id")
        case IdempotencyConflict():
            return ApiError(409, "idempotency_conflict", "this Idempotency-Key was used with another request")
        case FleetUnavailable():
            return overloaded("the queue cannot be reached right now", 1)
        case _:
            return None


def of_validation(error: ValidationError, body: object) -> ApiError:
    """Return the first complaint of a body's validation, with the field's path as OpenAI spells it."""
    first = complaint_of(error, body)
    param = path_of(first.place)
    return invalid(param or None, first.about(param or "the body"), first.code)


def render(error: ApiError) -> Response:
    note(code=error.code)
    content = orjson.dumps({"error": error.body})
    return Response(content, error.status, headers=error.headers, media_type="application/json")


def install(app: FastAPI) -> None:
    """Answer every exception of a route in the one shape."""

    def expected(_: Request, error: Exception) -> Response:
        known = of_exception(error)
        assert known is not None
        return render(known)

    def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = _HTTP_CODES.get(error.status_code, "invalid_request" if error.status_code < 500 else "internal_error")
        headers = error.headers or {}
        match error.status_code:
            case 404:
                message = f"there is no path {request.url.path[:120]!r}; /docs lists those that there are"
            case 405:
                message = f"this path does not take {request.method[:16]}; it takes {headers.get('Allow', 'others')}"
            case _:
                message = str(error.detail)
        return render(ApiError(error.status_code, code, message, headers=headers))

    def validation(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        param = path_of(tuple(first["loc"][1:]))
        return render(invalid(param, complaint_in(first, ()).about(param)))

    def gone(_: Request, __: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    for kind in (ClientGone, ClientDisconnect):
        app.add_exception_handler(kind, gone)
    for kind in (ApiError, QueueFull, UnknownModel, UnknownRequest, IdempotencyConflict, FleetUnavailable):
        app.add_exception_handler(kind, expected)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, validation)
