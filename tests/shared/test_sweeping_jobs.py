"""The job process sweeps the queues by itself."""

import asyncio
import contextlib
from typing import Any

from api import names
from api.jobs.service import serve
from api.jobs.settings import JobSettings
from shared.client import FleetClient
from shared.events import Failed
from shared.queue import WorkerQueue
from tests.shared.protocol_for_tests import MODEL, card_of, command_for


async def test_jobs_end_what_is_late_at_their_start_and_then_twice_a_minute(redis_url: str, fleet_redis: Any) -> None:
    queue = WorkerQueue.connect(redis_url, MODEL, "w1")
    await queue.publish_card(card_of())
    await queue.close()
    async with FleetClient.connect(redis_url) as fleet, asyncio.timeout(60):
        command = command_for(queue_ms=1)
        await fleet.submit(command)
        await asyncio.sleep(0.05)
        jobs = asyncio.create_task(serve(JobSettings(redis_url=redis_url)))
        try:
            while (end := (await fleet.result(command.id)).end) is None:
                await asyncio.sleep(0.05)
        finally:
            jobs.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await jobs
            fleet_redis.delete(names.JOBS)  # arq's, see there.
    assert isinstance(end, Failed) and end.code == "expired"
