"""A request that kills whatever runs it, beside two dozen that do no harm."""

import asyncio

from redis import Redis

from shared.client import FleetClient
from shared.commands import Generate
from shared.events import Event, Failed
from shared.keys import Keys
from tests.fleet.conftest import SpawnWorker
from tests.fleet.faulty_worker import KILLS
from tests.fleet.processes import WorkerProcess
from tests.fleet.requests_for_tests import assert_whole, collect, sequential

NAME = "poisoned"
SLOTS = 4
INNOCENTS = 24


async def test_a_request_that_kills_its_worker_dies_alone(
    spawn_worker: SpawnWorker, fleet: FleetClient, redis_client: Redis
) -> None:
    def spawn() -> WorkerProcess:
        flags = ("--max-rows", str(SLOTS), "--max-attempts", "3")
        return spawn_worker(NAME, *flags, program="tests.fleet.faulty_worker")

    workers = [spawn() for _ in range(2)]
    for worker in workers:
        worker.wait_ready()
    deaths = 0

    async def replace_the_dead() -> None:
        nonlocal deaths
        while True:
            for index, worker in enumerate(workers):
                if not worker.alive:
                    deaths += 1
                    workers[index] = spawn()
            await asyncio.sleep(0.05)

    async def follow(request: Generate) -> list[Event]:
        return await collect(fleet.run(request))

    poison = sequential(NAME, 8, prompt=(KILLS, 5))
    requests = [sequential(NAME, 12, seed=seed) for seed in range(INNOCENTS)]
    requests.insert(INNOCENTS // 2, poison)
    supervisor = asyncio.create_task(replace_the_dead())
    streams = await asyncio.gather(*map(follow, requests))
    supervisor.cancel()

    end = streams.pop(requests.index(poison))[-1]
    assert isinstance(end, Failed) and end.code == "poison"
    for events in streams:
        assert_whole(events)
    # Twice among others, then in a group of two unless it was the only suspect just then, and alone.
    assert deaths in (3, 4)
    [letter] = await fleet.dead_letters(NAME)
    assert (letter.id, letter.attempts, len(letter.lost_workers)) == (poison.id, deaths, deaths)
    assert redis_client.xlen(Keys.of(poison.id).lane("std")) == 0
