"""One live fleet for the session; tests put back what they break."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from openai import OpenAI
from redis import Redis

from shared.card import pack, unpack
from shared.keys import MODELS
from shared.keys import card as card_key
from tests.conformance.fleet import MODEL, Front, LiveFleet
from tests.fleet.processes import WorkerProcess

IDLE = "demo-idle"
"""A model with a card and without a worker: what is asked of it waits."""
TWIN = "demo-twin"
"""A model whose workers are for killing."""
KEYS = {"user": "user-secret", "slow": "slow-secret", "admin": "admin-secret", "tokens": "tokens-secret"}


@pytest.fixture(scope="session")
def fleet() -> Iterator[LiveFleet]:
    live = LiveFleet()
    try:
        live.start()
        client = live.redis
        card = unpack(client.hgetall(card_key(MODEL)))  # pyright: ignore[reportArgumentType]
        client.hset(card_key(IDLE), mapping={**pack(dataclasses.replace(card, name=IDLE, digest=""))})
        client.sadd(MODELS, IDLE)
        client.close()
        yield live
    finally:
        live.stop()


@pytest.fixture
def redis(fleet: LiveFleet) -> Iterator[Redis]:
    client = fleet.redis
    yield client
    client.close()


@pytest.fixture(scope="session")
def base(fleet: LiveFleet) -> str:
    return fleet.front.url


def client_of(url: str, key: str = "none", retries: int = 0) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=retries, timeout=60)


@pytest.fixture(scope="session")
def client(base: str) -> Iterator[OpenAI]:
    with client_of(base) as client:
        yield client


@pytest.fixture(scope="session")
def http(base: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=base, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def strict(fleet: LiveFleet) -> Front:
    """A front with little patience."""
    flags = ("--queue-limit", "1", "--request-timeout-s", "2", "--timeout-grace-s", "0.5", "--keepalive-s", "0.5")
    return fleet.start_front(*flags).wait_live()


@pytest.fixture(scope="session")
def guarded(fleet: LiveFleet, tmp_path_factory: pytest.TempPathFactory) -> tuple[Front, Front]:
    """Two fronts that want API keys."""
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    rates: dict[str, dict[str, object]] = {
        "slow": {"requests_per_minute": 5},
        "tokens": {"tokens_per_minute": 300},
        "admin": {"scopes": ["admin"]},
    }
    entries = [
        {"id": name, "sha256": hashlib.sha256(secret.encode()).hexdigest()} | rates.get(name, {})
        for name, secret in KEYS.items()
    ]
    Path(path).write_text(json.dumps(entries))
    first, second = (fleet.start_front("--api-keys-file", str(path)) for _ in range(2))
    return first.wait_live(), second.wait_live()


@pytest.fixture(scope="session")
def twins(fleet: LiveFleet) -> Callable[[], list[WorkerProcess]]:
    """Return a function that sees to two live workers of their own model."""
    started: list[WorkerProcess] = []

    def both() -> list[WorkerProcess]:
        started[:] = [worker for worker in started if worker.alive]
        while len(started) < 2:
            started.append(fleet.start_worker(TWIN))
        return [worker.wait_ready() for worker in started]

    return both
