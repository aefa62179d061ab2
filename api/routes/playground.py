"""The playground: one static page at /, and the files that it loads, all from this package."""

import hashlib
from dataclasses import dataclass
from importlib.resources import files

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.errors import ApiError

PAGE = "index.html"
MEDIA_TYPES = {
    PAGE: "text/html; charset=utf-8",
    "playground.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "main.js": "text/javascript; charset=utf-8",
    "canvas.js": "text/javascript; charset=utf-8",
    "card.js": "text/javascript; charset=utf-8",
    "client.js": "text/javascript; charset=utf-8",
    "knobs.js": "text/javascript; charset=utf-8",
    "request.js": "text/javascript; charset=utf-8",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class _Asset:
    content: bytes
    media_type: str
    etag: str

    @classmethod
    def read(cls, name: str) -> "_Asset":
        content = files("api").joinpath("playground", name).read_bytes()
        return cls(content, MEDIA_TYPES[name], f'"{hashlib.sha256(content).hexdigest()[:32]}"')

    def answer(self, request: Request) -> Response:
        headers = {**_HEADERS, "ETag": self.etag}
        if request.headers.get("if-none-match") == self.etag:
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.media_type, headers=headers)


def _build() -> APIRouter:
    router = APIRouter(include_in_schema=False)
    assets = {name: _Asset.read(name) for name in MEDIA_TYPES}

    @router.get("/")
    @router.head("/")
    async def page(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        return assets[PAGE].answer(request)

    @router.get("/playground/{name}")
    @router.head("/playground/{name}")
    async def asset(name: str, request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        if name not in assets:
            raise ApiError(404, "not_found", f"the playground has no file {name[:80]!r}")
        return assets[name].answer(request)

    return router


router = _build()
