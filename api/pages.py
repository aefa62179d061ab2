"""Static pages of this package: a few files, each with its type, under a policy that lets in nothing from elsewhere."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.errors import ApiError

PAGE = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
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
    def read(cls, folder: str, name: str) -> "_Asset":
        content = files("api").joinpath(folder, name).read_bytes()
        return cls(content, media_type(name), f'"{hashlib.sha256(content).hexdigest()[:32]}"')

    def answer(self, request: Request) -> Response:
        headers = {**_HEADERS, "ETag": self.etag}
        if request.headers.get("if-none-match") == self.etag:
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.media_type, headers=headers)


def media_type(name: str) -> str:
    """Return the type of a page's file; raises KeyError for a suffix that pages do not have."""
    return _TYPES[name[name.rindex(".") :]]


def page_router(folder: str, names: tuple[str, ...], path: str, assets_path: str) -> APIRouter:
    """Return a router with the page `PAGE` of `api/<folder>` at `path`, and its other files under `assets_path`."""
    router = APIRouter(include_in_schema=False)
    assets: Mapping[str, _Asset] = {name: _Asset.read(folder, name) for name in (PAGE, *names)}

    @router.get(path)
    @router.head(path)
    async def page(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        return assets[PAGE].answer(request)

    @router.get(f"{assets_path}/{{name}}")
    @router.head(f"{assets_path}/{{name}}")
    async def asset(name: str, request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        if name not in assets:
            raise ApiError(404, "not_found", f"the page has no file {name[:80]!r}")
        return assets[name].answer(request)

    return router
