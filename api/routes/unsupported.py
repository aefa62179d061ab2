"""Routes of OpenAI's API that this server does not have, and says so, so that nobody looks for a typing error."""

from fastapi import APIRouter
from starlette.responses import Response

from api.errors import ApiError

_METHODS = ["GET", "POST", "DELETE", "PUT", "PATCH"]
_FAMILIES = (
    "assistants",
    "audio",
    "beta",
    "chat/completions/{rest:path}",
    "chatkit",
    "containers",
    "conversations",
    "decisions",
    "edits",
    "engines",
    "evals",
    "fine_tuning",
    "images",
    "messages",
    "moderations",
    "realtime",
    "rerank",
    "score",
    "threads",
    "uploads",
    "vector_stores",
    "videos",
)
_INFILL = ("/v1/edit/completions", "/infill")


async def unsupported() -> Response:
    message = "this server has no such endpoint: its models generate text; see /docs for what it serves"
    raise ApiError(404, "unsupported_endpoint", message)


async def infill() -> Response:
    message = "text is filled in by /v1/completions with suffix, or with diffusion.template"
    raise ApiError(404, "unsupported_endpoint", message, "suffix")


def _build() -> APIRouter:
    router = APIRouter(include_in_schema=False)
    for family in _FAMILIES:
        router.add_api_route(f"/v1/{family}", unsupported, methods=_METHODS)
        if "{" not in family:
            router.add_api_route(f"/v1/{family}/{{rest:path}}", unsupported, methods=_METHODS)
    for path in _INFILL:
        router.add_api_route(path, infill, methods=_METHODS)
    return router


router = _build()
