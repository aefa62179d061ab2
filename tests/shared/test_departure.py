"""Forgetting a model: nothing of it stays, nobody who waits is left behind, and one that is served is kept."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

import shared.client
from shared import keys as names
from shared.client import FleetClient, UnknownModel
from shared.connection import Link
from shared.departure import Forgotten, StillServed, forget
from shared.heart import Heart
from shared.keys import Keys
from shared.lora import AdapterRecord, AdapterRegistry
from shared.queue import WorkerQueue
from shared.roster import WorkerInfo
from tests.shared.protocol_for_tests import MODEL, card_of, command_for

CARD = replace(card_of(), partitions=2, digest="")
FOX = AdapterRecord("fox", "team/fox", "0" * 64, 4, 100, 1)


@pytest.fixture
async def fleet(redis_url: str) -> AsyncIterator[FleetClient]:
    """Its model was announced once, and its worker has left."""
    queue = WorkerQueue.connect(redis_url, MODEL, "former", partitions=2)
    await queue.publish_card(CARD)
    assert await queue.take(1) == []
    await queue.close()
    async with FleetClient.connect(redis_url) as fleet:
        yield fleet


async def test_nothing_of_a_forgotten_model_stays(fleet: FleetClient, link: Link, fleet_redis: Any) -> None:
    await AdapterRegistry(link).add(MODEL, FOX)
    fleet_redis.xadd(Keys(f"{MODEL}.1").dead_letters(), {"id": "r", "att": 4, "why": "alone", "lost": "w1"})
    assert await forget(fleet, link, MODEL) == Forgotten(("fox",), 1)
    assert fleet_redis.keys("df:*") == []
    with pytest.raises(UnknownModel):
        await fleet.submit(command_for())
    with pytest.raises(UnknownModel):
        await forget(fleet, link, MODEL)


@pytest.mark.parametrize("why", ["worker", "request", "webhook"])
async def test_a_model_is_kept_while_somebody_serves_it_or_waits_for_it(
    why: str, redis_url: str, fleet: FleetClient, link: Link, fleet_redis: Any
) -> None:
    if why == "worker":
        with closing(Heart.connect(redis_url, "w1", MODEL)) as heart:
            heart.beat({}, WorkerInfo("w1", MODEL, "draining"))
    elif why == "request":
        await fleet.submit(command_for())
    else:
        fleet_redis.zadd(Keys(f"{MODEL}.1").hooks(), {"r": 1})
        fleet_redis.expire(Keys(f"{MODEL}.1").hooks(), 60)
    before = sorted(fleet_redis.keys("df:*"))
    with pytest.raises(StillServed, match=f"{MODEL} .*(w1|1 open request|1 webhook)"):
        await forget(fleet, link, MODEL)
    assert sorted(fleet_redis.keys("df:*")) == before


async def test_a_request_that_comes_meanwhile_keeps_the_model(
    fleet: FleetClient, link: Link, fleet_redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await AdapterRegistry(link).add(MODEL, FOX)
    before = fleet_redis.hgetall(names.card(MODEL))
    # What this client has read it takes for the card in force.
    monkeypatch.setattr(shared.client, "CARD_FRESH_S", 3600.0)
    await fleet.card(MODEL)
    forgetting = asyncio.create_task(forget(fleet, link, MODEL))
    async with asyncio.timeout(60):
        while fleet_redis.exists(names.card(MODEL)):
            await asyncio.sleep(0.01)
    await fleet.submit(command_for())
    with pytest.raises(StillServed, match="1 open request"):
        await forgetting
    assert fleet_redis.hgetall(names.card(MODEL)) == before
    assert await fleet.models() == [MODEL] and await fleet.adapters(MODEL) == [FOX] and await fleet.depth(MODEL) == 1
