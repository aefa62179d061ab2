"""What an HTTP request says beside its body, and the terms on which its commands are submitted."""

import re
from collections.abc import MutableMapping, Sequence
from functools import partial

from fastapi import Request

from api.access import Caller
from api.errors import invalid
from api.limits import Limiter
from api.relay import Terms
from api.requests import Call
from api.settings import ApiSettings
from api.trace import trace_context, trace_id
from api.webhooks.ask import WebhookDesk
from shared.commands import Generate
from shared.telemetry import note

_IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,256}")


def caller_of(request: Request) -> Caller:
    """Return who the request is from, as `api.access.Guard` has found."""
    return request.state.caller


def headers_of(request: Request) -> MutableMapping[str, str]:
    """Return headers that `api.middleware.RequestLog` will add to the response."""
    headers: MutableMapping[str, str] = request.scope.setdefault("state", {}).setdefault("headers", {})
    return headers


REQUEST_ID_HEADER = "x-diffleet-request"
IGNORED_HEADER = "x-diffleet-ignored"


def name_request(request: Request, request_id: str) -> None:
    """Tell the caller by which id the fleet knows its request: `DELETE /generate/{id}` ends it."""
    headers_of(request)[REQUEST_ID_HEADER] = request_id


def call_of(request: Request, settings: ApiSettings) -> Call:
    """Raises `ApiError` for an Idempotency-Key that cannot be one."""
    key = request.headers.get("idempotency-key")
    if key is not None and not _IDEMPOTENCY_KEY.fullmatch(key):
        raise invalid("Idempotency-Key", "Idempotency-Key must be 1 to 256 visible ASCII characters")
    trace = trace_context(request.headers)
    note(trace_id=trace_id(trace))
    desk: WebhookDesk = request.app.state.services.webhooks
    check = partial(desk.check, caller_of(request).id)
    return Call(settings.request_timeout_s, trace, key, check_webhook=check)


async def admit(
    request: Request,
    call: Call,
    limiter: Limiter,
    commands: Sequence[Generate],
    block_length: int,
    keep: bool = False,
) -> list[Terms]:
    """Reserve what the commands may cost, and return the terms of each. Raises `ApiError` (429).

    `block_length` is the model's own. A request with an idempotency key goes on when its caller leaves, who will come
    back for it; so does one with a webhook.
    """
    caller = caller_of(request)
    reservations = await limiter.reserve(caller, commands, headers_of(request))
    key = call.idempotency_key
    return [
        Terms(
            tenant=caller.id,
            idempotency_key=None if key is None else f"{request.url.path} {key} {index}",
            keep=keep or key is not None or commands[index].webhook is not None,
            reservation=reservation,
            block_length=commands[index].block_length or block_length,
        )
        for index, reservation in enumerate(reservations)
    ]
