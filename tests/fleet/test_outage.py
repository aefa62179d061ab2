"""Redis goes away in mid-stream and comes back: as it was, or without its last second."""

import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from shared.client import FleetClient
from shared.embedded import EmbeddedServer
from shared.events import Delta, Event
from tests.fleet.conftest import SpawnWorker
from tests.fleet.processes import WorkerProcess
from tests.fleet.requests_for_tests import assert_whole, collect, sequential, text_of, tokens_of

NAME = "steady"


@pytest.fixture(scope="module")
def frail_server() -> Iterator[EmbeddedServer]:
    folder = Path(tempfile.mkdtemp(prefix="df-"))
    server = EmbeddedServer(folder)
    server.start()
    yield server
    server.stop()
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def worker(spawn_worker: SpawnWorker, frail_server: EmbeddedServer) -> WorkerProcess:
    return spawn_worker(NAME, redis_url=frail_server.url).wait_ready()


@pytest.fixture
async def client(frail_server: EmbeddedServer) -> AsyncIterator[FleetClient]:
    async with FleetClient.connect(frail_server.url) as client:
        yield client


def restart(server: EmbeddedServer) -> None:
    server.stop()
    server.start()


def crash(server: EmbeddedServer) -> None:
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    while server.running:
        pass
    server.start()


@pytest.mark.parametrize("disturb", [restart, crash])
async def test_a_stream_survives_a_restart_of_redis(
    worker: WorkerProcess, client: FleetClient, frail_server: EmbeddedServer, disturb: Callable[[EmbeddedServer], None]
) -> None:
    calm = await collect(client.run(sequential(NAME, 400)))
    events: list[Event] = []
    async for event in client.run(sequential(NAME, 400)):
        events.append(event)
        if isinstance(event, Delta) and event.block == 20:
            disturb(frail_server)

    assert_whole(events)
    assert (text_of(events), tokens_of(events)) == (text_of(calm), tokens_of(calm))
    assert worker.alive
    assert worker.metrics()["diffleet_redis_errors_total"] > 0


async def test_a_redis_that_comes_back_empty_is_served_again(
    worker: WorkerProcess, client: FleetClient, frail_server: EmbeddedServer
) -> None:
    frail_server.stop()
    for file in (frail_server.log_path.parent / "appendonlydir").iterdir():
        file.unlink()
    frail_server.start()

    while NAME not in await client.models():
        assert worker.alive
    assert_whole(await collect(client.run(sequential(NAME, 16))))
