"""Probes, version, metrics."""

import asyncio
from importlib.metadata import PackageNotFoundError, version

from fastapi import APIRouter
from starlette.responses import Response

from api.answers import json_response
from api.deps import Services, ServicesDep
from api.errors import overloaded
from api.metrics import CONTENT_TYPE
from api.roster import live_workers
from shared.client import FleetUnavailable

router = APIRouter(tags=["operations"])


@router.get("/health/live")
@router.head("/health/live", include_in_schema=False)
async def live() -> Response:
    """Answer while the event loop turns."""
    return json_response({"status": "ok"})


@router.get("/health/ready")
@router.head("/health/ready", include_in_schema=False)
async def ready(services: ServicesDep) -> Response:
    """Answer 200 if Redis is reachable, a worker of some model lives, and the process is not draining; else 503.

    Under `ready_without_workers` no worker need live.
    """
    return await _readiness(services)


@router.get("/health")
@router.head("/health", include_in_schema=False)
async def health(services: ServicesDep) -> Response:
    """Answer as `/health/ready`."""
    return await _readiness(services)


@router.get("/ping")
@router.head("/ping", include_in_schema=False)
async def ping() -> Response:
    """Answer as `/health/live`."""
    return json_response({"status": "ok"})


@router.get("/load")
async def load(services: ServicesDep) -> Response:
    """Tell how many generate requests this process follows right now."""
    return json_response({"server_load": services.relay.open_count, "draining": services.draining})


@router.get("/version")
async def get_version() -> Response:
    try:
        return json_response({"version": version("diffleet")})
    except PackageNotFoundError:
        # Run from a checkout that was not installed.
        return json_response({"version": "unknown"})


@router.get("/metrics")
async def metrics(services: ServicesDep) -> Response:
    """Prometheus exposition; the queue's series are read from Redis now."""
    patience_s = services.settings.health_timeout_s
    await asyncio.gather(
        services.metrics.queue.read(services.fleet, patience_s),
        services.metrics.webhooks.read(services.admin.webhooks, services.fleet, patience_s),
    )
    return Response(services.metrics.exposition(), media_type=CONTENT_TYPE)


async def _readiness(services: Services) -> Response:
    report: dict[str, object] = {"redis": "ok", "draining": services.draining}
    reason: str | None = None
    try:
        async with asyncio.timeout(services.settings.health_timeout_s):
            await services.fleet.ping()
            workers = {name: len(await live_workers(services.fleet, name)) for name in await services.fleet.models()}
        report["workers"] = workers
        if not any(workers.values()) and not services.settings.ready_without_workers:
            reason = "no worker is alive"
    except (FleetUnavailable, TimeoutError):
        report["redis"] = reason = "unreachable"
        reason = "the queue cannot be reached"
    if services.draining:
        reason = "this server is shutting down"
    if reason is None:
        return json_response({"status": "ok"} | report)
    error = overloaded(reason, 1)
    answer = json_response({"status": "unavailable"} | report | {"error": error.body}, error.status)
    answer.headers.update(error.headers)
    return answer
