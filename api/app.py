"""The application: middleware, routes, and what they share."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from api import errors
from api.catalog import Catalog
from api.deps import Services
from api.metrics import Metrics
from api.middleware import BodyLimit, LastResort, RequestLog
from api.ports import Fleet
from api.relay import Relay
from api.routes import chat, generate, health, models
from api.settings import ApiSettings
from shared.client import FleetClient

ROUTERS = (generate.router, chat.router, models.router, health.router)


def create_app(settings: ApiSettings, client: Fleet | None = None) -> FastAPI:
    """Build the front. A `client` that is given belongs to the caller; else the app connects to `redis_url`."""
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        async with AsyncExitStack() as stack:
            fleet = client or await stack.enter_async_context(FleetClient.connect(settings.redis_url))
            relay = Relay(fleet, settings, metrics)
            stack.push_async_callback(relay.aclose)
            app.state.services = Services(settings, metrics, fleet, Catalog(fleet), relay)
            yield

    app = FastAPI(
        title="Diffleet",
        description="A serving fleet for diffusion language models.",
        lifespan=lifespan,
        # Outermost first. Errors and streams need the request id and the CORS headers, so these stand outside.
        middleware=[
            Middleware(RequestLog, metrics=metrics),
            Middleware(
                CORSMiddleware,
                allow_origins=settings.cors_origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "openai-processing-ms", "retry-after"],
            ),
            Middleware(LastResort),
            Middleware(BodyLimit, limit=settings.max_body_bytes),
        ],
    )
    errors.install(app)
    for router in ROUTERS:
        app.include_router(router)
    return app
