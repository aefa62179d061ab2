"""A model without workers: what has outlived its time is ended or removed all the same."""

import asyncio
from typing import Any

import pytest

from shared.client import FleetClient
from shared.connection import Link
from shared.events import Failed
from shared.keys import Keys
from shared.queue import WorkerQueue
from shared.sweep import Swept, sweep_lanes
from tests.shared.protocol_for_tests import MODEL, card_of, command_for, lengths_of


@pytest.fixture
async def link(redis_url: str, link: Link) -> Link:
    """As everywhere, to a server that knows a model."""
    queue = WorkerQueue.connect(redis_url, MODEL, "w1")
    await queue.publish_card(card_of())
    await queue.close()
    return link


async def test_a_request_past_its_deadline_ends_although_nobody_works_or_follows(redis_url: str, link: Link) -> None:
    async with FleetClient.connect(redis_url) as fleet:
        late, waiting = command_for(queue_ms=1), command_for()
        await fleet.submit(late)
        await fleet.submit(waiting)
        await asyncio.sleep(0.05)
        assert await sweep_lanes(link, MODEL, 1) == Swept(dropped=0, expired=1)
        end = (await fleet.result(late.id)).end
        assert isinstance(end, Failed) and end.code == "expired"
        assert (await fleet.result(waiting.id)).state == "queued"


async def test_entries_without_a_request_do_not_keep_a_pool_awake(redis_url: str, link: Link, fleet_redis: Any) -> None:
    async with FleetClient.connect(redis_url) as fleet:
        commands = [command_for() for _ in range(300)]
        await asyncio.gather(*(fleet.submit(command, queue_limit=1000) for command in commands))
    gone = commands[::2] + commands[-1:]
    fleet_redis.delete(*[Keys.of(command.id).request(command.id) for command in gone])
    assert await sweep_lanes(link, MODEL, 1) == Swept(dropped=len(gone), expired=0)
    assert lengths_of(fleet_redis) == len(commands) - len(gone)
    assert await sweep_lanes(link, MODEL, 1) == Swept(dropped=0, expired=0)


async def test_what_no_submit_has_written_is_left_to_workers(link: Link, fleet_redis: Any) -> None:
    lane = Keys(f"{MODEL}.0").lane("std")
    fleet_redis.xadd(lane, {"other": "x"})
    assert await sweep_lanes(link, MODEL, 1) == Swept(dropped=0, expired=0)
    assert fleet_redis.xlen(lane) == 1
    fleet_redis.delete(lane)
