"""A server, a model and worker processes that live as long as the module's tests.

The fleet's tests share a server of their own: the workers stay, so it is not emptied between tests. Each group of tests
serves the model under its own name, which gives it its own lanes.
"""

import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from redis import Redis

from shared.client import FleetClient
from shared.connection import open_sync_client
from shared.embedded import EmbeddedServer
from tests.fleet.models import write_tiny_model
from tests.fleet.processes import WorkerProcess

LEASE_MS = 3000
"""A worker that a busy machine keeps from running for so long counts as gone."""

SpawnWorker = Callable[..., WorkerProcess]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A busy machine takes its time to start workers, which counts for the test that asks for them."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(400))


@pytest.fixture(scope="session")
def fleet_server() -> Iterator[EmbeddedServer]:
    folder = Path(tempfile.mkdtemp(prefix="df-"))
    server = EmbeddedServer(folder)
    server.start()
    yield server
    client = open_sync_client(server.url)
    permanent = ("card", "q:rt", "q:std", "q:bulk", "dlq", "loras", "workers", "df:models")
    leaked = [key for key in client.scan_iter() if client.ttl(key) == -1 and not key.decode().endswith(permanent)]
    client.close()
    server.stop()
    shutil.rmtree(folder)
    assert not leaked, f"keys without a TTL: {leaked}"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def spawn_worker(
    fleet_server: EmbeddedServer, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SpawnWorker]:
    """Start a worker on a model name; all end with the module."""
    folder = tmp_path_factory.mktemp("workers")
    numbers = count()
    workers: list[WorkerProcess] = []

    def spawn(name: str, *flags: str, redis_url: str = fleet_server.url, program: str = "worker") -> WorkerProcess:
        place, lease = folder / str(next(numbers)), ("--lease-ms", str(LEASE_MS))
        workers.append(WorkerProcess(place, redis_url, tiny_model, name, *lease, *flags, program=program))
        return workers[-1]

    yield spawn
    for worker in workers:
        worker.end()


@pytest.fixture
async def fleet(fleet_server: EmbeddedServer) -> AsyncIterator[FleetClient]:
    async with FleetClient.connect(fleet_server.url) as client:
        yield client


@pytest.fixture
def redis_client(fleet_server: EmbeddedServer) -> Iterator[Redis]:
    """A plain client, to look and act behind the protocol's back."""
    client = open_sync_client(fleet_server.url)
    yield client
    client.close()
