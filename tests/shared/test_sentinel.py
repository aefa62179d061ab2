"""A primary, its replica and three sentinels, of the binary that is bundled: a failover loses nothing acknowledged."""

import asyncio
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.admission import Admission
from shared.client import FleetClient
from shared.connection import FleetUnavailable, open_sync_client
from shared.heart import Heart
from shared.queue import WorkerQueue
from shared.roster import WorkerInfo
from shared.sentinel import Sentinels
from tests.fleet.processes import until
from tests.servers import Servers, free_port
from tests.shared.protocol_for_tests import MODEL, card_of, command_for, finish

SERVICE = "fleet"


class Replicated:
    """A primary, its replica and three sentinels."""

    def __init__(self, servers: Servers) -> None:
        self.primary, self.replica = free_port(), free_port()
        plain = "save ''\nappendonly no\nrepl-diskless-sync-delay 0\n"
        self.primary_process = servers.start(self.primary, plain)
        servers.start(self.replica, f"{plain}replicaof 127.0.0.1 {self.primary}\n")
        until(lambda: self.info(self.replica).get("master_link_status") == "up", "the replica has its data")
        self.sentinels = [free_port() for _ in range(3)]
        watch = (
            f"sentinel monitor {SERVICE} 127.0.0.1 {self.primary} 2\nsentinel down-after-milliseconds {SERVICE} 700\n"
            f"sentinel failover-timeout {SERVICE} 4000\n"
        )
        for port in self.sentinels:
            servers.start(port, watch, "--sentinel")
        until(lambda: all(self._peers(port) == (1, 2) for port in self.sentinels), "the sentinels know each other")

    @property
    def url(self) -> str:
        return f"redis+sentinel://{','.join(f'127.0.0.1:{port}' for port in self.sentinels)}/{SERVICE}"

    def kill_primary(self) -> None:
        self.primary_process.send_signal(signal.SIGKILL)

    def info(self, port: int) -> dict[str, Any]:
        client = open_sync_client(f"redis://127.0.0.1:{port}/0")
        try:
            return client.info("replication")  # type: ignore[return-value]
        except Exception:
            return {}
        finally:
            client.close()

    def _peers(self, port: int) -> tuple[int, int]:
        client = open_sync_client(f"redis://127.0.0.1:{port}/0")
        try:
            state: Any = client.sentinel_master(SERVICE)
            return state["num-slaves"], state["num-other-sentinels"]
        except Exception:
            return (0, 0)
        finally:
            client.close()


@pytest.fixture
def replicated() -> Iterator[Replicated]:
    folder = Path(tempfile.mkdtemp(prefix="df-"))
    servers = Servers(folder)
    try:
        yield Replicated(servers)
    finally:
        servers.end()
        shutil.rmtree(folder)


async def test_a_failover_under_load_loses_no_request_that_was_acknowledged(replicated: Replicated) -> None:
    queue = WorkerQueue.connect(replicated.url, MODEL, "w1", lease_ms=2000, reap_every_ms=100)
    heart = Heart.connect(replicated.url, "w1", MODEL, 2000)
    await queue.publish_card(card_of())
    accepted: list[str] = []
    unclear: set[str] = set()
    async with FleetClient.connect(replicated.url, admission=Admission(replicas=1, replica_wait_ms=300)) as fleet:

        async def submit(count: int) -> None:
            for _ in range(count):
                command = command_for()
                try:
                    accepted.append((await fleet.submit(command, queue_limit=100_000)).id)
                except FleetUnavailable:
                    # The replica that is left has none of its own.
                    unclear.add(command.id)
                    return

        await asyncio.gather(*(submit(25) for _ in range(8)))
        before = len(accepted)
        load = [asyncio.create_task(submit(10_000)) for _ in range(8)]
        while len(accepted) < before + 50:
            await asyncio.sleep(0.01)
        old = await Sentinels.from_url(replicated.url).primary()
        replicated.kill_primary()
        await asyncio.wait(load)
        async with asyncio.timeout(60):
            while await Sentinels.from_url(replicated.url).primary() == old:
                await asyncio.sleep(0.05)

        # Every connection finds the new primary, whose cache has none of the scripts.
        waiting = set(accepted)
        async with asyncio.timeout(60):
            while waiting:
                try:
                    claims = await queue.take(32)
                    for claim in claims:
                        await finish(queue, claim)
                        waiting.discard(claim.id)
                    await asyncio.to_thread(heart.beat, {}, WorkerInfo("w1", MODEL, "ready"))
                except FleetUnavailable:
                    await asyncio.sleep(0.1)
        for request_id in accepted:
            assert (await fleet.result(request_id)).state == "done"
        assert [event.t async for event in fleet.stream(accepted[-1])] == ["queued", "delta", "finished"]
    heart.close()
    await queue.close()
    assert len(accepted) >= before + 50


@pytest.mark.parametrize(
    ("url", "hosts", "service", "db", "login"),
    [
        ("redis+sentinel://a/m", (("a", 26379),), "m", 0, (None, None)),
        ("redis+sentinel://a:1,b:2/m/3", (("a", 1), ("b", 2)), "m", 3, (None, None)),
        ("redis+sentinel://u:p%40ss@a/m", (("a", 26379),), "m", 0, ("u", "p@ss")),
        ("redis+sentinel://:p@a/m", (("a", 26379),), "m", 0, (None, "p")),
    ],
)
def test_a_url_names_sentinels_service_and_credentials(
    url: str, hosts: tuple[tuple[str, int], ...], service: str, db: int, login: tuple[str | None, str | None]
) -> None:
    parsed = Sentinels.from_url(url)
    assert (parsed.hosts, parsed.service, parsed.db) == (hosts, service, db)
    assert (parsed.username, parsed.password) == login


@pytest.mark.parametrize("url", ["redis+sentinel://a", "redis+sentinel:///m", "redis+sentinel://a:x/m"])
def test_a_url_that_says_too_little_is_refused(url: str) -> None:
    with pytest.raises(ValueError):
        Sentinels.from_url(url)
