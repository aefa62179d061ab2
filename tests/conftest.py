"""What several packages' tests need: a real server, empty for every test, and proof that no key was left for ever."""

import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis import Redis

from shared import embedded
from shared.connection import Link, open_sync_client
from shared.embedded import EmbeddedServer
from tests.servers import named_program

# Triton reads this once, when the first of all modules imports it, and transformers does so as well: without a GPU its
# kernels run in its interpreter, whichever test comes first.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

_PERMANENT = re.compile(
    # Each with the reason that `shared.keys` gives.
    rb"df:models"
    rb"|df:\{[^}]+\}:(card|loras|q:(rt|std|bulk)|dlq|workers)"
)


@pytest.fixture(scope="session", autouse=True)
def another_server() -> Iterator[None]:
    """Let `DIFFLEET_TEST_REDIS` stand in for the bundled server."""
    program = named_program()
    with pytest.MonkeyPatch.context() as patch:
        if program is not None:
            patch.setattr(embedded, "_binary", lambda: program)
        yield


@pytest.fixture(scope="session")
def redis_server() -> Iterator[EmbeddedServer]:
    """A server for the whole run (each worker process of xdist has its own)."""
    folder = Path(tempfile.mkdtemp(prefix="df-"))
    server = EmbeddedServer(folder)
    server.start()
    yield server
    server.stop()
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def redis_url(redis_server: EmbeddedServer) -> str:
    """URL of the server; whoever asks for it finds the server empty."""
    return redis_server.url


@pytest.fixture
def fleet_redis(redis_url: str) -> Iterator[Redis]:
    """A plain client, to look behind the protocol's back."""
    client = open_sync_client(redis_url)
    yield client
    client.close()


@pytest.fixture
async def link(redis_url: str) -> AsyncIterator[Link]:
    """A connection as the parts of the queue take it."""
    link = Link.open(redis_url)
    yield link
    await link.close()


@pytest.fixture(autouse=True)
def no_key_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Empty the server before a test that uses it; after it, fail for every key that would live for ever."""
    if "redis_url" not in request.fixturenames:
        yield
        return
    client = open_sync_client(request.getfixturevalue("redis_url"))
    client.flushall()
    yield
    leaked = [key for key in client.scan_iter() if client.ttl(key) == -1 and not _PERMANENT.fullmatch(key)]
    client.close()
    assert not leaked, f"keys without a TTL: {leaked}"
