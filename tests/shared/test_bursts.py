"""What many requests cost together: counted, not timed."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from shared.client import FleetClient
from shared.commands import Generate, Limits
from shared.connection import Link
from shared.flights import Flights
from shared.keys import Keys, new_request_id
from shared.memory import MemoryGauge
from shared.queue import WorkerQueue
from shared.text import Tokenizer
from tests.shared.protocol_for_tests import MODEL, block_of, card_of, command_for
from tests.shared.tokenizers_for_tests import byte_level_files


@pytest.fixture
async def queue(redis_url: str) -> AsyncIterator[WorkerQueue]:
    queue = WorkerQueue.connect(redis_url, MODEL, "w1", reap_every_ms=0)
    await queue.publish_card(card_of())
    yield queue
    await queue.close()


async def test_a_queued_request_takes_less_than_four_kilobytes(
    redis_url: str, queue: WorkerQueue, fleet_redis: Any
) -> None:
    def command() -> Generate:
        prompt = tuple(range(40_000, 40_256))
        return Generate(id=new_request_id(MODEL), model=MODEL, prompt=prompt, limits=Limits(max_tokens=64))

    async with FleetClient.connect(redis_url) as fleet:
        await fleet.submit(command())
        before = fleet_redis.info("memory")["used_memory"]
        for _ in range(200):
            await fleet.submit(command(), queue_limit=1000)
        assert (fleet_redis.info("memory")["used_memory"] - before) / 200 < 4000


async def test_a_log_lives_as_long_as_its_request(redis_url: str, queue: WorkerQueue, fleet_redis: Any) -> None:
    command = command_for(total_ms=60_000)
    async with FleetClient.connect(redis_url) as fleet:
        await fleet.submit(command, retention_ms=120_000)
    [claim] = await queue.take(1)
    await queue.emit([block_of(claim, 0)])
    keys = Keys.of(claim.id)
    request_ms, log_ms = fleet_redis.pttl(keys.request(claim.id)), fleet_redis.pttl(keys.log(claim.id))
    assert 0 < log_ms <= 180_000 and abs(request_ms - log_ms) < 5_000


async def test_a_burst_reads_a_card_once(redis_url: str, queue: WorkerQueue, fleet_redis: Any) -> None:
    async with FleetClient.connect(redis_url) as fleet:
        fleet_redis.config_resetstat()
        cards = await asyncio.gather(*(fleet.card(MODEL) for _ in range(500)))
        assert {card.name for card in cards} == {MODEL}
        assert fleet_redis.info("commandstats")["cmdstat_hgetall"]["calls"] == 1


async def test_a_burst_asks_for_the_models_once(redis_url: str, queue: WorkerQueue, fleet_redis: Any) -> None:
    async with FleetClient.connect(redis_url) as fleet:
        fleet_redis.config_resetstat()
        answers = await asyncio.gather(*(fleet.models() for _ in range(500)))
        assert answers == [[MODEL]] * 500
        assert fleet_redis.info("commandstats")["cmdstat_smembers"]["calls"] == 1


async def test_a_burst_builds_a_tokenizer_once(
    redis_url: str, queue: WorkerQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[int] = []
    from_files = Tokenizer.from_files

    def build(files: Mapping[str, bytes]) -> Tokenizer:
        built.append(1)
        return from_files(files)

    monkeypatch.setattr(Tokenizer, "from_files", build)
    async with FleetClient.connect(redis_url) as fleet:
        card = dataclasses.replace(card_of(), files=byte_level_files())
        made = await asyncio.gather(*(fleet.tokenizer(card) for _ in range(50)))
        assert len(built) == 1 and all(one is made[0] for one in made)


async def test_a_call_goes_on_for_the_others_when_one_leaves_and_is_made_again_after_a_fault() -> None:
    flights, calls, gate = Flights[int](), list[int](), asyncio.Event()

    async def call() -> int:
        calls.append(1)
        await gate.wait()
        if len(calls) == 1:
            raise ValueError("once")
        return 7

    leaver, stayer = (asyncio.create_task(flights.join("k", call)) for _ in range(2))
    await asyncio.sleep(0)
    leaver.cancel()
    gate.set()
    with pytest.raises(ValueError, match="once"):
        await stayer
    assert await flights.join("k", call) == 7 and len(calls) == 2


async def test_a_burst_asks_for_the_memory_once(redis_url: str, queue: WorkerQueue, fleet_redis: Any) -> None:
    link = Link.open(redis_url)
    gauge = MemoryGauge(link)
    fleet_redis.config_resetstat()
    shares = await asyncio.gather(*(gauge.share(Keys(f"{MODEL}.0")) for _ in range(100)))
    assert any(0 < share < 1 for share in shares)
    assert fleet_redis.info("commandstats")["cmdstat_evalsha"]["calls"] == 1
    await link.close()
