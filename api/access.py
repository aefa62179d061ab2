"""Who may call: API keys, known by their SHA-256, with scopes and limits of their own.

Keys are random and long, so a fast hash is enough. Without a key file everyone may do everything; then the address that
the server listens on is what protects it.
"""

import hashlib
import hmac
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from api.errors import ApiError, render
from shared.complaints import path_of
from shared.telemetry import note

KeyScope = Literal["inference", "admin"]
KEY_PREFIX = "dfk_"
_BEARER = re.compile(r"bearer +(\S+) *", re.IGNORECASE)
_OPEN = re.compile(r"/(health(/.*)?|ping|version|metrics|docs(/.*)?|playground/.*|openapi\.json)?")
"""Paths that need no key: probes, scrapes, the documentation and the playground's own files."""
_ADMIN = re.compile(r"/admin(/.*)?")


def hash_key(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


_GUESSED = frozenset(
    map(hash_key, ("", KEY_PREFIX, "foo", "bar", "test", "key", "api-key", "password", "changeme", "example"))
)
"""Hashes of what stands in examples: who pastes one opens the api to everyone who reads them."""


def _checked_hash(text: str) -> str:
    if not re.fullmatch("[0-9a-f]{64}", text):
        raise PydanticCustomError("hash", "must be the 64 hexadecimal digits that `python -m api.keys` prints")
    if text in _GUESSED:
        raise PydanticCustomError("guessed", "is the hash of a key that anyone guesses; `python -m api.keys` makes one")
    return text


class ApiKey(BaseModel):
    """One entry of the key file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    """Name for logs, limits and stored objects; two keys of one id share them (a key that is being replaced)."""
    sha256: Annotated[str, AfterValidator(_checked_hash)]
    scopes: tuple[KeyScope, ...] = ("inference",)
    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a request is from."""

    id: str = ""
    """Empty: nobody in particular, on a server without keys."""
    scopes: tuple[KeyScope, ...] = ("inference", "admin")
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


class InvalidKeys(ValueError):
    """The key file cannot be read or is not a list of keys; the message names the place, never a value."""


_KEYS = TypeAdapter(tuple[ApiKey, ...])


def load_keys(path: Path) -> tuple[ApiKey, ...]:
    """Read a key file: a JSON list of `ApiKey`; raises `InvalidKeys`."""
    try:
        return _KEYS.validate_json(path.read_bytes())
    except OSError as error:
        raise InvalidKeys(f"{path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        if not first["loc"] and first["type"] == "tuple_type":
            raise InvalidKeys(f"{path}: must be a JSON list of keys, [{{...}}], also of one") from None
        place = path_of(first["loc"])
        raise InvalidKeys(f"{path}: {place}{': ' if place else ''}{first['msg']}") from None


def find_key(keys: Sequence[ApiKey], secret: str) -> ApiKey | None:
    """Return the key; every entry is compared, in constant time."""
    wanted = hash_key(secret)
    found: ApiKey | None = None
    for key in keys:
        if hmac.compare_digest(key.sha256, wanted):
            found = key
    return found


class Guard:
    """ASGI middleware: let only known keys pass, and say in `scope["state"]["caller"]` whose request it is.

    It stands inside the CORS middleware: a preflight has no key, and a refusal needs the CORS headers.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Callable[[], Sequence[ApiKey]] | None,
        default: Caller,
        origins: Sequence[str] = (),
    ) -> None:
        """`keys` tells those of now; None: there are none, and everyone may do everything."""
        self._app = app
        self._keys = keys
        self._default = default
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                caller = self._identify(scope)
            except ApiError as error:
                await render(error)(scope, receive, send)
                return
            state: dict[str, Any] = scope.setdefault("state", {})
            state["caller"] = caller
            if caller.id:
                note(key=caller.id)
        await self._app(scope, receive, send)

    def _identify(self, scope: Scope) -> Caller:
        path: str = scope["path"]
        if self._keys is None and _ADMIN.fullmatch(path):
            self._refuse_foreign_pages(scope)
        if self._keys is None or _OPEN.fullmatch(path):
            return self._default
        match = _BEARER.fullmatch(Headers(scope=scope).get("authorization", ""))
        if match is None:
            raise _unauthorized("send an API key as `Authorization: Bearer ...`")
        key = find_key(self._keys(), match[1])
        if key is None:
            raise _unauthorized("this API key is not known here")
        wanted: KeyScope = "admin" if _ADMIN.fullmatch(path) else "inference"
        if wanted not in key.scopes:
            raise ApiError(403, "permission_denied", f"this API key lacks the scope {wanted}")
        return Caller(
            key.id,
            key.scopes,
            key.requests_per_minute or self._default.requests_per_minute,
            key.tokens_per_minute or self._default.tokens_per_minute,
        )

    def _refuse_foreign_pages(self, scope: Scope) -> None:
        """Raise if a page of another host asks, in the browser of somebody who can reach this address.

        Without keys the address alone protects the administration, and a browser there lends it to any page: a POST
        without a body needs no preflight. No script can lend a key.
        """
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != headers.get("host") and origin not in self._origins:
            message = (
                "pages of other hosts may not administer a fleet without API keys; name their origin in cors_origins"
            )
            raise ApiError(403, "permission_denied", message)


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, "invalid_api_key", message, headers={"WWW-Authenticate": "Bearer"})
