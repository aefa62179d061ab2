"""arq's worker under supervision: it dies with its connection to Redis, and is started again.

What is to be done is the index of open batches, not arq's queue: a cron job looks for batches that nobody runs, and
enqueues them. So nothing is lost with a queue, a process, or a front that died between two writes.
"""

import asyncio
import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any, cast

from arq.connections import ArqRedis
from arq.cron import cron
from arq.worker import Worker, func

from api import names
from api.assembly import open_services
from api.deps import Services
from api.jobs.runner import BatchRun
from api.jobs.settings import JobSettings
from api.metrics import Metrics
from api.webhooks.ask import WebhookDesk
from api.webhooks.deliverer import Deliverer, DeliveryTerms, deliver_for_ever
from shared.client import UnknownModel
from shared.connection import FleetUnavailable, Link, open_pool, translate
from shared.hook_places import hook_partitions
from shared.keys import Keys
from shared.sweep import sweep_lanes

logger = logging.getLogger("diffleet.jobs")

_SWEEP_S = 2
_LONGEST_PAUSE_S = 10.0
_JOB_SPARE_S = 600
_SWEEP_QUEUES_AT = (7, 37)
"""Seconds of each minute."""
_SERVICES = "services"
_LINK = "link"


async def serve(settings: JobSettings, desk: WebhookDesk | None = None) -> None:
    """Work until cancelled; a lost Redis is waited for. `desk`: unset, that of the settings."""
    pause_s = 0.5
    while True:
        began = asyncio.get_running_loop().time()
        try:
            async with open_services(settings, Metrics(), service="diffleet-jobs", desk=desk) as services:
                await _work(settings, services)
        except Exception as error:
            # Whatever ended it, the way on is the same; only what Redis says of itself quotes nothing of a request.
            cause = translate(error)
            fault = f"{type(error).__name__}: {cause}" if isinstance(cause, FleetUnavailable) else type(error).__name__
            logger.warning("jobs are interrupted", extra={"fault": fault})
        if asyncio.get_running_loop().time() - began > _LONGEST_PAUSE_S:
            pause_s = 0.5
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
        pause_s = min(_LONGEST_PAUSE_S, pause_s * 2)


async def _work(settings: JobSettings, services: Services) -> None:
    link = Link.open(settings.redis_url, connections=2)
    queue = open_queue(settings.jobs_redis_url or settings.redis_url)
    worker = Worker(
        functions=[
            func(
                cast(Any, run_batch),
                timeout=settings.batch_window_s + settings.file_ttl_s + _JOB_SPARE_S,
                keep_result=0,
                max_tries=3,
            )
        ],
        cron_jobs=[
            cron(cast(Any, sweep), second=set(range(0, 60, _SWEEP_S)), run_at_startup=True, keep_result=0),
            cron(cast(Any, sweep_queues), second=set(_SWEEP_QUEUES_AT), run_at_startup=True, keep_result=0),
        ],
        queue_name=names.JOBS,
        redis_pool=queue,
        max_jobs=settings.max_batches + 1,
        ctx={_SERVICES: services, _LINK: link},
        handle_signals=False,
        log_results=False,
    )
    deliverer = asyncio.create_task(deliver_for_ever(_deliverer(settings, services)))
    work = asyncio.create_task(worker.main())
    try:
        await asyncio.wait({work, deliverer}, return_when=asyncio.FIRST_COMPLETED)
        for task in (work, deliverer):
            if task.done():
                task.result()
    finally:
        tasks = [work, deliverer, *worker.tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await queue.aclose(close_connection_pool=True)
        await link.close()


def _deliverer(settings: JobSettings, services: Services) -> Deliverer:
    async def partitions() -> Sequence[Keys]:
        return await hook_partitions(services.fleet)

    terms = DeliveryTerms(settings.webhook_retry_s, settings.webhook_timeout_s, settings.webhook_concurrency)
    desk = services.webhooks
    return Deliverer(services.admin.webhooks, partitions, desk.secrets, desk.rules, terms, services.fleet.result)


async def sweep(context: Mapping[str, Any]) -> None:
    """Enqueue every open batch that nobody runs."""
    services: Services = context[_SERVICES]
    queue: ArqRedis = context["redis"]
    batches = services.stores.batches
    for tenant, batch_id in await batches.open():
        if not await batches.held(tenant, batch_id):
            # A name of its own for each try: arq refuses one that a dead process had begun.
            name = f"{batch_id}:{context['job_id']}"
            await queue.enqueue_job(run_batch.__name__, tenant, batch_id, _job_id=name, _queue_name=names.JOBS)


async def sweep_queues(context: Mapping[str, Any]) -> None:
    """End what is past its deadline, and drop what is left of what has been forgotten, where no worker does."""
    services: Services = context[_SERVICES]
    for name in await services.catalog.names():
        try:
            card = await services.fleet.card(name)
            swept = await sweep_lanes(context[_LINK], name, card.partitions)
        except (UnknownModel, FleetUnavailable) as error:
            logger.warning("a queue was not swept", extra={"model": name, "fault": type(error).__name__})
            continue
        if swept.dropped or swept.expired:
            logger.info("queue swept", extra={"model": name, "dropped": swept.dropped, "expired": swept.expired})


async def run_batch(context: Mapping[str, Any], tenant: str, batch_id: str) -> None:
    services: Services = context[_SERVICES]
    try:
        await BatchRun(services, tenant, batch_id).run()
    except FleetUnavailable:
        logger.warning("a batch waits for Redis", extra={"batch": batch_id})


def open_queue(url: str) -> ArqRedis:
    """Return arq's client for any URL but a Cluster's: arq would not unquote credentials, nor check a certificate."""
    queue = ArqRedis(open_pool(url), default_queue_name=names.JOBS)
    queue.auto_close_connection_pool = True  # the pool is nobody else's: closing the client closes its connections
    return queue
