"""What operators ask of workers, adapters in the registry, and requests that workers are unable to run: real server."""

from typing import Any

from shared.administration import Administration
from shared.client import FleetClient
from shared.connection import Link
from shared.keys import Keys, loras
from shared.lora import AdapterRecord
from shared.orders import Orders
from shared.queue import WorkerQueue
from tests.shared.protocol_for_tests import MODEL, card_of, command_for

FOX = AdapterRecord("fox", "team/fox", "0" * 64, 16, 1000, 1_700_000_000)


def queue_of(redis_url: str, name: str) -> WorkerQueue:
    return WorkerQueue.connect(redis_url, MODEL, name, lease_ms=3_600_000, reap_every_ms=0)


async def test_a_request_that_workers_are_unable_to_run_is_passed_on_so_many_times(
    redis_url: str, fleet_redis: Any
) -> None:
    queues = [queue_of(redis_url, f"w{number}") for number in range(3)]
    await queues[0].publish_card(card_of())
    async with FleetClient.connect(redis_url) as fleet:
        command = command_for()
        await fleet.submit(command)
        for number, queue in enumerate(queues):
            (claim,) = await queue.take(1)
            assert (claim.id, claim.attempt) == (command.id, 1)
            assert await queue.pass_on(claim.id, claim.epoch, 0, 3) is (number < 2)
        # It is the last one's to end.
        assert (await queues[2].hand_back(command.id, claim.epoch)).name == "OK"
        link = Link.open(redis_url)
        facts = await Administration(link).inspect(command.id)
        await link.close()
    assert facts is not None and facts.passed_on == 3
    for queue in queues:
        await queue.close()


async def test_a_count_that_nobody_of_ours_has_written_does_not_stop_a_worker(redis_url: str, fleet_redis: Any) -> None:
    queue = queue_of(redis_url, "w1")
    await queue.publish_card(card_of())
    async with FleetClient.connect(redis_url) as fleet:
        command = command_for()
        await fleet.submit(command)
        (claim,) = await queue.take(1)
        fleet_redis.hset(Keys.of(command.id).request(command.id), "unable", "many")
        assert await queue.pass_on(claim.id, claim.epoch, 0, 3) is True
    await queue.close()


async def test_orders_reach_the_worker_they_are_for(redis_url: str, fleet_redis: Any) -> None:
    link = Link.open(redis_url)
    book, one, other = Administration(link).orders, queue_of(redis_url, "w1"), queue_of(redis_url, "w2")
    assert await one.orders() == await other.orders() == Orders()
    await book.drain(MODEL, "w1")
    assert ((await one.orders()).drain, (await other.orders()).drain) == (True, False)
    await book.flush(MODEL)
    first = (await one.orders()).flush
    await book.flush(MODEL)
    assert first and first != (await other.orders()).flush
    assert all(fleet_redis.pttl(name) > 0 for name in fleet_redis.keys("df:*"))
    for each in (one, other, link):
        await each.close()


async def test_the_registry_keeps_what_was_registered_last(redis_url: str, fleet_redis: Any) -> None:
    link = Link.open(redis_url)
    registry = Administration(link).adapters
    assert (await registry.list(MODEL), await registry.find(MODEL, ["fox"])) == ([], {})
    await registry.add(MODEL, FOX)
    newer = AdapterRecord("fox", "team/fox2", "1" * 64, 8, 500, 1_700_000_001)
    await registry.add(MODEL, newer)
    await registry.add(MODEL, AdapterRecord("ape", "a", "2" * 64, 8, 500, 1))
    assert [each.name for each in await registry.list(MODEL)] == ["ape", "fox"]
    assert await registry.find(MODEL, ["fox", "none", "{", "fox"]) == {"fox": newer}
    assert newer.use(0.5).digest == newer.digest
    fleet_redis.hset(loras(MODEL), "odd", b"{")
    fleet_redis.hset(loras(MODEL), "newer", b'{"name": "newer"}')
    assert [each.name for each in await registry.list(MODEL)] == ["ape", "fox"]
    assert [*await registry.find(MODEL, ["newer", "odd", "ape"])] == ["ape"]
    assert (await registry.remove(MODEL, "fox"), await registry.remove(MODEL, "fox")) == (True, False)
    await link.close()
