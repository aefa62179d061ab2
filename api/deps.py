"""What routes ask for by type."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, cast
from urllib.parse import quote

import orjson
from fastapi import Depends, Request

from api.access import Caller
from api.admission import IGNORED_HEADER, caller_of, headers_of
from api.catalog import Catalog
from api.errors import ApiError, invalid
from api.limits import Limiter
from api.metrics import Metrics
from api.numbers import beyond_range, held_by_none
from api.ports import Fleet
from api.relay import Relay
from api.schemas import Body, known_fields, parse
from api.settings import ApiSettings
from api.stores import Stores
from api.webhooks.ask import WebhookDesk
from shared.administration import Administration

_MOST_NAMES = 8
_LONGEST_NAME = 64


@dataclass(slots=True)
class Services:
    """What one app owns while it runs."""

    settings: ApiSettings
    metrics: Metrics
    fleet: Fleet
    catalog: Catalog
    relay: Relay
    limiter: Limiter
    stores: Stores
    admin: Administration
    webhooks: WebhookDesk
    draining: bool = False
    """Set once the process was asked to end: `/health/ready` says so, and requests are still served."""


async def _services(request: Request) -> Services:
    return request.app.state.services


async def _caller(request: Request) -> Caller:
    return caller_of(request)


# Coroutines, for FastAPI calls what is none in a thread of its own.
ServicesDep = Annotated[Services, Depends(_services)]
CallerDep = Annotated[Caller, Depends(_caller)]


def json_body(kind: type[Body]) -> Callable[[Request], Awaitable[Body]]:
    """Return a dependency that reads and checks a JSON body; it raises `ApiError`."""

    async def read(request: Request) -> Body:
        _check_headers(request)
        value = _loads(await request.body())
        body = parse(kind, value)
        given = cast(dict[str, object], value)
        # What is null asks for nothing.
        _tell_unknown(request, [name for name, asked in given.items() if name not in known and asked is not None])
        return body

    known = known_fields(kind)
    return read


def _tell_unknown(request: Request, names: Sequence[str]) -> None:
    """Name the fields that nothing here knows in a header of the answer: whoever misspells one can see it."""
    if names:
        told = [quote(name[:_LONGEST_NAME], safe="") for name in names[:_MOST_NAMES]]
        more = [f"and {len(names) - _MOST_NAMES} more"] if len(names) > _MOST_NAMES else []
        headers_of(request)[IGNORED_HEADER] = ", ".join([*told, *more])


def _loads(body: bytes) -> object:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if field := beyond_range(body):
            raise invalid(field, held_by_none(field)) from error
        message = f"the body is not JSON: {error}"
        try:
            body.decode()
        except UnicodeDecodeError as wrong:
            message = f"the body is not UTF-8: byte {wrong.start} is no part of a character"
        raise ApiError(400, "invalid_json", message) from error


def _check_headers(request: Request) -> None:
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(415, "unsupported_media_type", "the content type must be application/json")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "unsupported_media_type", "compressed bodies are not supported")
