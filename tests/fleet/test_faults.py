"""Devices that fail, a queue that is wiped, drains, and commands from the future, with real processes."""

import asyncio
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import orjson
import pytest
from redis import Redis

from shared.client import FleetClient
from shared.commands import Generate
from shared.connection import open_sync_client
from shared.embedded import EmbeddedServer
from shared.events import Delta, Event, Failed, Started
from shared.keys import Keys
from tests.fleet.conftest import SpawnWorker
from tests.fleet.faulty_worker import FILLS_MEMORY, HANGS, NOT_A_NUMBER
from tests.fleet.processes import WorkerProcess, until
from tests.fleet.requests_for_tests import assert_whole, collect, sequential
from worker.exits import ExitCode

NAME = "faulty"


async def follow(fleet: FleetClient, request: Generate) -> list[Event]:
    return await collect(fleet.run(request))


@pytest.fixture(scope="module")
def faulty(spawn_worker: SpawnWorker) -> WorkerProcess:
    return spawn_worker(NAME, "--max-rows", "8", program="tests.fleet.faulty_worker").wait_ready()


@pytest.mark.parametrize(("fault", "code"), [(FILLS_MEMORY, "out_of_memory"), (NOT_A_NUMBER, "nan")])
async def test_a_device_fault_of_one_request_ends_that_request_alone(
    faulty: WorkerProcess, fleet: FleetClient, fault: int, code: str
) -> None:
    bad = sequential(NAME, 64, prompt=(fault,) + (5,) * 40)
    *good, failed = await asyncio.gather(
        *[follow(fleet, sequential(NAME, 40, seed=seed)) for seed in range(4)], follow(fleet, bad)
    )
    end = failed[-1]
    assert isinstance(end, Failed) and end.code == code
    for events in good:
        assert_whole(events)
    assert faulty.alive
    until(lambda: faulty.metrics()["diffleet_kv_pages_free"] == faulty.metrics()["diffleet_kv_pages"], "pages are free")


async def test_a_loop_that_hangs_ends_the_process_and_the_lease_does_the_rest(
    spawn_worker: SpawnWorker, fleet: FleetClient, redis_client: Redis
) -> None:
    flags = ("--stuck-s", "1", "--max-attempts", "1", "--max-rows", "1")
    worker = spawn_worker("hung", *flags, program="tests.fleet.faulty_worker").wait_ready()
    request = sequential("hung", 8, prompt=(HANGS, 5))
    await fleet.submit(request)
    assert await asyncio.to_thread(worker.wait_exit) == ExitCode.STUCK
    assert (await fleet.result(request.id)).state == "running"
    assert await fleet.abort(request.id) == "running"
    await asyncio.to_thread(spawn_worker("hung").wait_ready)
    [*_, end] = await collect(fleet.stream(request.id))
    assert not isinstance(end, Failed)  # whoever takes it over obeys the abort


async def test_fifty_open_streams_survive_the_drain_of_their_worker(
    spawn_worker: SpawnWorker, fleet: FleetClient
) -> None:
    workers = [spawn_worker("drained", "--drain-s", "0", "--max-rows", "50") for _ in range(2)]
    ids = [worker.wait_ready().id for worker in workers]
    owners: dict[str, list[str]] = {}
    victims: list[WorkerProcess] = []
    handovers_s: list[float] = []

    async def watch(request: Generate) -> list[Event]:
        events: list[Event] = []
        heard = time.monotonic()
        async for event in fleet.run(request):
            events.append(event)
            if isinstance(event, Started):
                owners.setdefault(request.id, []).append(event.worker)
                if len(owners[request.id]) > 1:
                    handovers_s.append(time.monotonic() - heard)
            heard = time.monotonic()
            if isinstance(event, Delta) and event.block == 3 and not victims:
                victims.append(workers[ids.index(owners[request.id][0])])
                victims[0].send(signal.SIGTERM)
        return events

    requests = [sequential("drained", 60, seed=seed) for seed in range(50)]
    streams = await asyncio.gather(*map(watch, requests))
    for events in streams:
        assert_whole(events)
    moved = [workers for workers in owners.values() if len(workers) > 1]
    assert moved and all(set(pair) == set(ids) for pair in moved)
    assert victims[0].wait_exit() == ExitCode.CLEAN
    # From the last word of the old owner to the first of the new one; a figure, not a condition.
    last_s = max(handovers_s)
    print(
        f"drained: {len(moved)} of 50 streams moved, next owner after {median(handovers_s):.3f} s, last {last_s:.3f} s"
    )


@pytest.fixture
def wiped_server() -> Iterator[EmbeddedServer]:
    folder = Path(tempfile.mkdtemp(prefix="df-"))
    server = EmbeddedServer(folder)
    server.start()
    yield server
    server.stop()
    shutil.rmtree(folder)


async def test_a_wiped_queue_tells_its_clients_and_is_served_again(
    spawn_worker: SpawnWorker, wiped_server: EmbeddedServer
) -> None:
    worker = spawn_worker("wiped", "--max-rows", "2", redis_url=wiped_server.url).wait_ready()
    redis = open_sync_client(wiped_server.url)
    async with FleetClient.connect(wiped_server.url) as fleet:
        begun = asyncio.Event()

        async def watch(request: Generate) -> list[Event]:
            events: list[Event] = []
            async for event in fleet.run(request):
                events.append(event)
                if isinstance(event, Delta):
                    begun.set()
            return events

        async def wipe() -> None:
            await begun.wait()
            redis.flushall()

        # Two run, two wait.
        requests = [sequential("wiped", 1500) for _ in range(4)]
        streams, _ = await asyncio.gather(asyncio.gather(*map(watch, requests)), wipe())
        for events in streams:
            assert isinstance(events[-1], Failed) and events[-1].code == "lost"
        while "wiped" not in await fleet.models():
            await asyncio.sleep(0.05)
        assert_whole(await follow(fleet, sequential("wiped", 8)))
    assert worker.alive
    redis.close()


async def test_a_command_from_the_future_waits_for_a_newer_worker_and_costs_no_attempt(
    faulty: WorkerProcess, fleet: FleetClient, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    future = sequential(NAME, 8)
    handed_back = faulty.metrics()["diffleet_handed_back_total"]
    envelope = {"v": 1, "kind": "generate", "must": ["telepathy"], "body": future.model_dump(mode="json")}
    monkeypatch.setattr("shared.client.encode_command", lambda command: orjson.dumps(envelope))
    await fleet.submit(future)
    until(lambda: faulty.metrics()["diffleet_handed_back_total"] > handed_back, "it is handed back")
    key = Keys.of(future.id).request(future.id)
    until(lambda: redis_client.hget(key, "st") == b"queued", "it waits")
    assert redis_client.hget(key, "att") == b"0"
    await fleet.abort(future.id)
