"""A request that has lost two workers, and a fleet whose workers are all busy."""

import asyncio
import signal

import pytest
from redis import Redis

from shared.client import FleetClient
from shared.commands import Generate
from shared.events import Delta, Event, Started
from shared.keys import Keys
from tests.fleet.conftest import SpawnWorker
from tests.fleet.faulty_worker import TAKES_ITS_TIME
from tests.fleet.processes import WorkerProcess
from tests.fleet.requests_for_tests import assert_whole, sequential, text_of

pytestmark = pytest.mark.slow

NAME = "wary"
LENGTH = 600
SEED = 3
SLOW = "tests.fleet.faulty_worker"


async def test_what_has_lost_two_workers_goes_on_at_once_and_what_makes_room_for_it_elsewhere(
    spawn_worker: SpawnWorker, fleet: FleetClient, redis_client: Redis
) -> None:
    # Half a second a step on the first two, who have it as long as the others need to get busy.
    suspect = sequential(NAME, LENGTH, seed=SEED, prompt=(TAKES_ITS_TIME, 5))
    blocks: asyncio.Queue[int] = asyncio.Queue()
    owners: dict[str, list[str]] = {}
    ended: list[str] = []

    async def watch(request: Generate) -> list[Event]:
        events: list[Event] = []
        async for event in fleet.run(request):
            events.append(event)
            if isinstance(event, Started):
                owners.setdefault(request.id, []).append(event.worker)
            if isinstance(event, Delta) and request is suspect:
                blocks.put_nowait(event.epoch)
        ended.append(request.id)
        return events

    async def reached(epoch: int) -> None:
        while await blocks.get() != epoch:
            pass

    def spawn_slow() -> WorkerProcess:
        return spawn_worker(NAME, "--max-rows", "1", program=SLOW).wait_ready()

    first = await asyncio.to_thread(spawn_slow)
    streams = [asyncio.create_task(watch(suspect))]
    await reached(1)
    first.send(signal.SIGKILL)
    second = await asyncio.to_thread(spawn_slow)
    await reached(2)
    pair = [spawn_worker(NAME) for _ in range(2)]
    pair_ids = {(await asyncio.to_thread(worker.wait_ready)).id for worker in pair}
    # Long ones, until both have some.
    long: list[Generate] = []
    while {owner for request in long for owner in owners.get(request.id, [])} != pair_ids:
        long.append(sequential(NAME, 1900))
        streams.append(asyncio.create_task(watch(long[-1])))
        while long[-1].id not in owners:
            await asyncio.sleep(0.01)
    second.send(signal.SIGKILL)

    [events, *others] = await asyncio.gather(*streams)
    assert_whole(events)
    assert ended[0] == suspect.id, "it had to wait"
    for stream in others:
        assert_whole(stream)
    made_room = [request.id for request in long if len(owners[request.id]) > 1]
    assert made_room and all(set(owners[one]) <= pair_ids for one in made_room)
    for one in made_room:
        assert redis_client.hget(Keys.of(one).request(one), "att") == b"1", "what makes room loses no attempt"
    again = sequential(NAME, LENGTH, seed=SEED, prompt=suspect.prompt)
    assert text_of(events) == text_of([event async for event in fleet.run(again)])
