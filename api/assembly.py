"""What an app, or a job process, is put together from."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

from api.catalog import Catalog
from api.deps import Services
from api.limits import Limiter
from api.metrics import Metrics
from api.ports import Fleet
from api.relay import Relay
from api.settings import ApiSettings
from api.stores import Stores
from api.webhooks.ask import WebhookDesk
from shared.administration import Administration
from shared.admission import Admission
from shared.client import FleetClient
from shared.connection import Link
from shared.tracing import open_tracing


@asynccontextmanager
async def open_services(
    settings: ApiSettings,
    metrics: Metrics,
    client: Fleet | None = None,
    service: str = "diffleet-api",
    desk: WebhookDesk | None = None,
) -> AsyncGenerator[Services]:
    """Connect to `redis_url`; a `client` that is given belongs to the caller. Redis need not be there yet.

    Raises `TracingUnavailable`, `InvalidSecrets`.
    """
    async with AsyncExitStack() as stack:
        tracing = open_tracing(service, settings.otlp_endpoint, settings.trace_share)
        stack.push_async_callback(asyncio.to_thread, tracing.close)
        admission = Admission(tenant_limit=settings.tenant_limit, replicas=settings.redis_replicas)
        fleet = client or await stack.enter_async_context(FleetClient.connect(settings.redis_url, admission=admission))
        link = Link.open(settings.redis_url)
        stack.push_async_callback(link.close)
        relay = Relay(fleet, settings, metrics, tracing)
        stack.push_async_callback(relay.aclose)
        stores = Stores.on(link, settings)
        admin = Administration(link)
        desk = desk or WebhookDesk.open(settings)
        yield Services(settings, metrics, fleet, Catalog(fleet), relay, Limiter(link), stores, admin, desk)
