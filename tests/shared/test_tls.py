"""`rediss://` against a server that speaks nothing but TLS, with an authority of the test's own."""

import asyncio
import gc
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from arq.connections import ArqRedis
from redis import RedisError

from api.jobs.service import open_queue
from shared.client import FleetClient
from shared.connection import FleetUnavailable, Link, open_sync_client
from shared.heart import Heart
from shared.queue import WorkerQueue
from shared.roster import WorkerInfo
from tests.fleet.processes import until
from tests.servers import Servers, free_port, tls_program
from tests.shared.protocol_for_tests import MODEL, card_of, command_for, finish


@dataclass(frozen=True)
class Secured:
    folder: Path
    port: int

    def url(self, host: str = "localhost", **options: str) -> str:
        query = "&".join(f"{name}={value}" for name, value in options.items())
        return f"rediss://{host}:{self.port}/0?{query}"

    @property
    def trusted(self) -> dict[str, str]:
        return {"ssl_ca_certs": f"{self.folder}/ca.crt"}

    @property
    def known(self) -> dict[str, str]:
        """Both ways: the server asks its clients for a certificate as well."""
        return self.trusted | {"ssl_certfile": f"{self.folder}/client.crt", "ssl_keyfile": f"{self.folder}/client.key"}


@pytest.fixture(scope="module")
def secured() -> Iterator[Secured]:
    program = tls_program()
    if program is None or shutil.which("openssl") is None:
        pytest.skip("needs a redis-server that speaks TLS, and openssl")
    folder = Path(tempfile.mkdtemp(prefix="df-"))
    _make_certificates(folder)
    servers, port = Servers(folder), free_port()
    files = f"tls-cert-file {folder}/server.crt\ntls-key-file {folder}/server.key\ntls-ca-cert-file {folder}/ca.crt\n"
    servers.start(port, f"port 0\ntls-port {port}\n{files}tls-auth-clients yes\nsave ''\n", program=program)
    secured = Secured(folder, port)
    try:
        until(lambda: _answers(secured.url(**secured.known)), "the server answers")
        yield secured
    finally:
        servers.end()
        shutil.rmtree(folder)


def _make_certificates(folder: Path) -> None:
    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=30)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.crt", "-days", "2", "-subj", "/CN=authority")
    (folder / "names").write_text("subjectAltName=DNS:localhost\n")
    for name in ("server", "client"):
        openssl("req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signing = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names", "-days", "2")
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.crt", *signing)


def _answers(url: str) -> bool:
    client = open_sync_client(url)
    try:
        return bool(client.ping())
    except (OSError, RedisError):
        return False
    finally:
        client.close()


async def test_a_request_goes_its_whole_way_over_tls(secured: Secured) -> None:
    url = secured.url(**secured.known)
    queue = WorkerQueue.connect(url, MODEL, "w1")
    heart = Heart.connect(url, "w1", MODEL)
    await queue.publish_card(card_of())
    async with FleetClient.connect(url) as fleet, asyncio.timeout(30):
        events = asyncio.create_task(_kinds(fleet))
        claims = await queue.take(1) or await queue.wait(4000)
        await asyncio.to_thread(heart.beat, {claims[0].id: claims[0].epoch}, WorkerInfo("w1", MODEL, "ready"))
        await finish(queue, claims[0], blocks=2)
        assert await events == ["queued", "delta", "delta", "finished"]
        assert [worker.id for worker in await fleet.workers(MODEL)] == ["w1"]
    heart.close()
    await queue.close()


async def _kinds(fleet: FleetClient) -> list[str]:
    return [event.t async for event in fleet.run(command_for())]


async def test_the_queue_of_the_jobs_is_reached_over_tls(secured: Secured) -> None:
    queue: ArqRedis = open_queue(secured.url(**secured.known))
    assert await queue.ping()
    pool: Any = queue.connection_pool
    connection = await pool.get_connection()
    await pool.release(connection)
    assert connection.is_connected
    await queue.aclose()
    assert not connection.is_connected


# asyncio closes the socket of a refused handshake a turn later than the test may last.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("fault", ["unknown authority", "other name", "no client certificate"])
async def test_who_is_not_who_it_should_be_is_refused_by_every_kind_of_connection(
    secured: Secured, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.subscriber.SUBSCRIBE_TIMEOUT_S", 0.5)
    unsigned = {name: value for name, value in secured.known.items() if name != "ssl_ca_certs"}
    url = {
        "unknown authority": secured.url(**unsigned),
        "other name": secured.url(host="127.0.0.1", **secured.known),
        "no client certificate": secured.url(**secured.trusted),
    }[fault]
    link = Link.open(url)
    with pytest.raises(FleetUnavailable):
        await link.command("PING")
    await link.close()
    with pytest.raises(FleetUnavailable):
        heart = Heart.connect(url, "w1", MODEL)
        try:
            heart.beat({}, WorkerInfo("w1", MODEL, "ready"))
        finally:
            heart.close()
    with pytest.raises(FleetUnavailable):
        async with FleetClient.connect(url) as fleet, asyncio.timeout(30):
            await anext(fleet.stream(command_for().id))
    await asyncio.sleep(0.05)
    gc.collect()
