"""What a scrape of the front tells of the queue."""

import asyncio
from collections.abc import Sequence
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from shared.client import FleetUnavailable
from shared.queue_state import LaneState, QueueState
from tests.api.scripted import CARD, Caller, ScriptedFleet, running

MODEL = CARD.name


async def scrape(caller: Caller) -> dict[tuple[str, str], float]:
    text = (await caller.get("/metrics")).body.decode()
    return {
        (sample.name, sample.labels.get("lane", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("model", MODEL) == MODEL
    }


def full() -> dict[str, QueueState]:
    return {MODEL: QueueState((LaneState("rt", 3, 1, 2.5), LaneState("std"), LaneState("bulk", 9, 9, 0.0)), 4)}


async def test_a_scrape_tells_each_lane_and_the_age_of_who_waits() -> None:
    fleet = ScriptedFleet(queues=full(), live=2, replays=7, reconnects=1)
    async with running(fleet) as caller:
        found = await scrape(caller)
    assert found["diffleet_queue_requests", "rt"] == 3
    assert found["diffleet_queue_claimed", "rt"] == 1
    assert found["diffleet_queue_age_seconds", "rt"] == 2.5
    assert found["diffleet_queue_age_seconds", "std"] == 0
    assert found["diffleet_queue_requests", "bulk"] == 9
    assert found["diffleet_dead_letters", ""] == 4
    assert found["diffleet_workers_alive", ""] == 2
    assert found["diffleet_redis_reachable", ""] == 1
    assert (found["diffleet_log_replays", ""], found["diffleet_subscription_reconnects", ""]) == (7, 1)


async def test_without_redis_the_scrape_answers_and_old_numbers_are_gone() -> None:
    fleet = ScriptedFleet(queues=full())
    async with running(fleet) as caller:
        await scrape(caller)
        fleet.down = FleetUnavailable("Redis does not answer")
        found = await scrape(caller)
    assert found["diffleet_redis_reachable", ""] == 0
    assert not [
        name for name, _ in found if name.startswith(("diffleet_queue_re", "diffleet_queue_age", "diffleet_dead"))
    ]


async def test_a_redis_that_hangs_costs_a_scrape_no_more_than_the_probes_patience() -> None:
    class Hanging(ScriptedFleet):
        async def models(self) -> Sequence[str]:
            await asyncio.sleep(3600)
            return []

    async with running(Hanging(), health_timeout_s=0.05) as caller:
        async with asyncio.timeout(10):
            assert (await scrape(caller))["diffleet_redis_reachable", ""] == 0


async def test_scrapes_at_the_same_time_see_all_of_it() -> None:
    class Slow(ScriptedFleet):
        async def queue(self, model: str) -> QueueState:
            await asyncio.sleep(0)
            return await super().queue(model)

    async with running(Slow(queues=full())) as caller:
        answers: list[dict[Any, float]] = await asyncio.gather(*(scrape(caller) for _ in range(8)))
    queues = [{key: value for key, value in found.items() if key[0].startswith("diffleet_queue_")} for found in answers]
    assert len(queues[0]) == 9 and all(queue == queues[0] for queue in queues)
