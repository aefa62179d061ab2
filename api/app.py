"""The application: middleware, routes, and what they share."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from api import errors
from api.access import Caller, Guard, load_keys
from api.admission import IGNORED_HEADER, REQUEST_ID_HEADER
from api.assembly import open_services
from api.kept_file import KeptFile
from api.metrics import Metrics
from api.middleware import BodyLimit, ForgivingPath, LastResort, RequestLog
from api.openapi import without_422
from api.ports import Fleet
from api.routes import (
    admin,
    batches,
    chat,
    completions,
    embeddings,
    files,
    generate,
    health,
    models,
    ollama,
    playground,
    reference,
    responses,
    tokens,
    unsupported,
)
from api.settings import ApiSettings
from api.webhooks.ask import WebhookDesk

ROUTERS = (
    generate.router,
    chat.router,
    completions.router,
    embeddings.router,
    responses.router,
    files.router,
    batches.router,
    models.router,
    ollama.router,
    tokens.router,
    health.router,
    admin.router,
    playground.router,
    reference.router,
    # Last: its patterns are wide.
    unsupported.router,
)
EXPOSED_HEADERS = (
    "x-request-id",
    REQUEST_ID_HEADER,
    IGNORED_HEADER,
    "openai-processing-ms",
    "retry-after",
    "retry-after-ms",
    "x-should-retry",
    *(f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
)


def create_app(settings: ApiSettings, client: Fleet | None = None) -> FastAPI:
    """Build the front. A `client` that is given belongs to the caller; else the app connects to `redis_url`.

    Raises `api.access.InvalidKeys`, `api.webhooks.signing.InvalidSecrets`.
    """
    metrics = Metrics(vllm_names=settings.vllm_metrics)
    keys = None if settings.api_keys_file is None else KeptFile(settings.api_keys_file, load_keys)
    desk = WebhookDesk.open(settings)
    anyone = Caller(requests_per_minute=settings.requests_per_minute, tokens_per_minute=settings.tokens_per_minute)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        async with open_services(settings, metrics, client, desk=desk) as services:
            app.state.services = services
            yield

    app = FastAPI(
        title="Diffleet",
        description="A serving fleet for diffusion language models.",
        lifespan=lifespan,
        redirect_slashes=False,
        # FastAPI's own pages load their scripts from another host.
        docs_url=None,
        redoc_url=None,
        # Outermost first. Errors and streams need the request id and the CORS headers, so these stand outside.
        middleware=[
            Middleware(RequestLog, metrics=metrics),
            Middleware(
                CORSMiddleware,
                allow_origins=settings.cors_origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=EXPOSED_HEADERS,
            ),
            Middleware(LastResort),
            Middleware(ForgivingPath),
            Middleware(Guard, keys=keys, default=anyone, origins=settings.cors_origins),
            Middleware(
                BodyLimit,
                limit=settings.max_body_bytes,
                others={files.PATH: settings.max_file_bytes + files.FORM_SPARE_BYTES},
            ),
        ],
    )
    errors.install(app)
    for router in ROUTERS:
        app.include_router(router)
    document = app.openapi
    app.openapi = lambda: without_422(document())
    return app
