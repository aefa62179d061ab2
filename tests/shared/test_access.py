"""Rights that are enough for a front and for a worker: what an operator may grant, with everything else refused."""

import asyncio
from typing import Any

import pytest
from redis import exceptions

from shared.administration import Administration
from shared.client import FleetClient
from shared.connection import Link, TurnedAway
from shared.heart import Heart
from shared.keys import Keys
from shared.lora import AdapterRecord
from shared.queue import WorkerQueue
from shared.roster import WorkerInfo
from tests.shared.protocol_for_tests import MODEL, block_of, card_of, command_for, end_of

COMMON = (
    "ping hello client|setinfo client|setname select auth "
    "eval evalsha script|load time exists get set del hget hmget hset hdel hincrby hgetall pexpire "
    "xadd xack xdel xrange publish info"
).split()
API = "xlen smembers zrange zadd zrem zremrangebyscore zcard pttl xrevrange wait subscribe unsubscribe".split()
WORKER = (
    "mget sadd zadd zrem zrange zcard zremrangebyscore xrevrange xreadgroup xautoclaim xclaim xpending xinfo|consumers "
    "xgroup|create xgroup|delconsumer"
).split()


@pytest.fixture
def users(fleet_redis: Any) -> Any:
    # Redis 7.0 does not know this one; its clients then go without.
    known = tuple(map(int, fleet_redis.info("server")["redis_version"].split(".")[:2])) >= (7, 2)
    for name, commands in {"api": COMMON + API, "worker": COMMON + WORKER}.items():
        fleet_redis.acl_setuser(
            name,
            enabled=True,
            reset=True,
            passwords=["+secret"],
            commands=["-@all", *[f"+{command}" for command in commands if known or command != "client|setinfo"]],
            keys=["df:*"],
            channels=["df:*"],
        )
    yield
    fleet_redis.acl_deluser("api", "worker")


async def test_front_and_worker_do_their_part_with_these_rights_alone(redis_url: str, users: None) -> None:
    as_worker = redis_url.replace("unix://", "unix://worker:secret@")
    queue = WorkerQueue.connect(as_worker, MODEL, "w1", lease_ms=3_600_000, reap_every_ms=0)
    heart = Heart.connect(as_worker, "w1", MODEL)
    await queue.publish_card(card_of())
    async with FleetClient.connect(redis_url.replace("unix://", "unix://api:secret@")) as fleet:
        await fleet.submit(command_for())
        await fleet.submit(command_for())
        first, second = await queue.take(2)
        heart.beat({first.id: first.epoch, second.id: second.epoch}, WorkerInfo("w1", MODEL, "ready"))
        await queue.hand_back(second.id, second.epoch)
        assert await fleet.abort(second.id) == "aborted"
        await fleet.abort(first.id)
        assert list(await queue.find_aborted([first.id])) == [first.id]
        await queue.finish(block_of(first, 0), end_of(first, 1))
        async with asyncio.timeout(30):
            assert [event.t async for event in fleet.stream(first.id)] == ["queued", "delta", "finished"]
        assert [worker.id for worker in await fleet.workers(MODEL)] == ["w1"]
        assert (await fleet.models(), await fleet.depth(MODEL)) == ([MODEL], 0)
        assert await queue.wait(1) == []
        link = Link.open(redis_url.replace("unix://", "unix://api:secret@"))
        admin = Administration(link)
        await admin.adapters.add(MODEL, AdapterRecord("fox", "fox", "0" * 64, 4, 100, 1))
        await admin.orders.drain(MODEL, "w1")
        await admin.orders.flush(MODEL)
        assert (await queue.orders()).drain
        assert (await admin.inspect(first.id)) is not None
        assert await fleet.adapters(MODEL) and await admin.adapters.remove(MODEL, "fox")
        assert await admin.dead_letters.list(MODEL, 1, 10) == []
        await link.close()
    heart.close()
    await queue.close()


async def test_a_right_that_is_missing_is_an_error_not_a_retry(redis_url: str, users: None) -> None:
    link = Link.open(redis_url.replace("unix://", "unix://api:secret@"))
    with pytest.raises(exceptions.NoPermissionError):
        await link.read("FLUSHALL")
    await link.close()


@pytest.mark.parametrize("right", ["xrevrange", "hmget"])
async def test_a_right_that_a_worker_lacks_is_an_error_and_costs_no_request(
    redis_url: str, users: None, fleet_redis: Any, right: str
) -> None:
    fleet_redis.acl_setuser("worker", enabled=True, commands=[f"-{right}"])
    queue = WorkerQueue.connect(
        redis_url.replace("unix://", "unix://worker:secret@"), MODEL, "w1", lease_ms=3_600_000, reap_every_ms=0
    )
    try:
        await queue.publish_card(card_of())
        command = command_for()
        async with FleetClient.connect(redis_url) as fleet:
            await fleet.submit(command)
            with pytest.raises(exceptions.ResponseError, match="NOPERM|ACL|can.t run this command"):
                await queue.take(1)
            assert fleet_redis.xlen(Keys.of(command.id).lane(command.lane)) == 1
            assert fleet_redis.hget(Keys.of(command.id).request(command.id), "st") == b"queued"
    finally:
        await queue.close()


@pytest.mark.parametrize("place", ["unix://nobody:secret@{}", "unix://{}?db=99"])
async def test_who_is_turned_away_finds_the_fleet_unavailable_at_once(redis_url: str, place: str) -> None:
    link = Link.open(place.format(redis_url.removeprefix("unix://")))
    with pytest.raises(TurnedAway):
        async with asyncio.timeout(3):
            await link.read("PING")
    await link.close()
