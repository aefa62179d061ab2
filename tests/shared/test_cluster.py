"""Three primaries and their replicas, of the binary that is bundled: the same protocol, each partition on its node."""

import asyncio
import shutil
import signal
import socket
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis.crc import key_slot

from shared.client import FleetClient
from shared.cluster import ClusterUrl, Slots, key_of
from shared.commands import Generate, Limits
from shared.connection import FleetUnavailable, Link, open_sync_client
from shared.heart import Heart
from shared.keys import Keys, new_request_id, partition
from shared.queue import WorkerQueue
from shared.roster import WorkerInfo
from tests.fleet.processes import until
from tests.servers import Servers, free_port
from tests.shared.protocol_for_tests import MODEL, card_of, finish

NODES = 3
PARTITIONS = 12


class Cluster:
    """Primaries 0 to 2, and a replica of each."""

    def __init__(self, servers: Servers) -> None:
        self.ports = [free_port() for _ in range(2 * NODES)]
        config = "cluster-enabled yes\ncluster-node-timeout 1000\nsave ''\nrepl-diskless-sync-delay 0\n"
        self.processes: list[subprocess.Popen[bytes]] = [servers.start(port, config) for port in self.ports]
        until(lambda: all(self.ask(port, "PING") for port in self.ports), "the nodes answer")
        for number, port in enumerate(self.ports[:NODES]):
            share = (number * 16384 // NODES, (number + 1) * 16384 // NODES - 1)
            self.ask(port, "CLUSTER", "ADDSLOTSRANGE", *share)
            self.ask(port, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for port in self.ports[1:]:
            self.ask(self.ports[0], "CLUSTER", "MEET", "127.0.0.1", port)
        until(lambda: all(self.knows(port) == 2 * NODES for port in self.ports), "the nodes know each other")
        for number, port in enumerate(self.ports[NODES:]):
            primary = self.ask(self.ports[number], "CLUSTER", "MYID").decode()
            until(lambda: self.ask(port, "CLUSTER", "REPLICATE", primary), "a replica follows")  # noqa: B023
        until(self.whole, "the Cluster is whole")

    @property
    def url(self) -> str:
        return f"redis+cluster://{','.join(f'127.0.0.1:{port}' for port in self.ports)}"

    def ask(self, port: int, *command: Any) -> Any:
        client: Any = open_sync_client(f"redis://127.0.0.1:{port}/0", timeout_s=1)
        try:
            return client.execute_command(*command)
        except Exception:
            return None
        finally:
            client.close()

    def knows(self, port: int) -> int:
        return len((self.ask(port, "CLUSTER", "NODES") or b"").splitlines())

    def replicated(self) -> bool:
        primary, replica = (self.ask(port, "INFO", "replication") for port in (self.ports[0], self.ports[NODES]))
        return replica["slave_repl_offset"] >= primary["master_repl_offset"]

    def whole(self) -> bool:
        replicas = [self.ask(port, "INFO", "replication") or "" for port in self.ports[NODES:]]
        states = [str(self.ask(port, "CLUSTER", "INFO")) for port in self.ports]
        return all("up" in str(replica) for replica in replicas) and all("state:ok" in state for state in states)


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    folder = Path(tempfile.mkdtemp(prefix="df-"))
    servers = Servers(folder)
    try:
        yield servers
    finally:
        servers.end()
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def cluster(servers: Servers) -> Cluster:
    return Cluster(servers)


def commands(model: str, count: int) -> list[Generate]:
    """Return requests that go round over the partitions."""
    return [
        Generate(id=new_request_id(model, i % PARTITIONS), model=model, prompt=(1,), limits=Limits(max_tokens=16))
        for i in range(count)
    ]


def queue_of(cluster: Cluster, name: str, model: str = MODEL, lease_ms: int = 3000) -> WorkerQueue:
    return WorkerQueue.connect(cluster.url, model, name, lease_ms, partitions=PARTITIONS, reap_every_ms=100)


async def published(queue: WorkerQueue, model: str) -> None:
    await queue.publish_card(replace(card_of(model), partitions=PARTITIONS))


async def test_requests_of_all_partitions_go_their_whole_way(cluster: Cluster) -> None:
    queue = queue_of(cluster, "w1")
    heart = Heart.connect(cluster.url, "w1", MODEL, partitions=PARTITIONS)
    await published(queue, MODEL)
    asked = commands(MODEL, 2 * PARTITIONS)
    async with FleetClient.connect(cluster.url) as fleet, asyncio.timeout(60):
        streams = [asyncio.create_task(_kinds(fleet, command)) for command in asked]
        waiting = {command.id for command in asked}
        while waiting:
            claims = await queue.take(4) or await queue.wait(1000)
            held = {claim.id: claim.epoch for claim in claims}
            answers = await asyncio.to_thread(heart.beat, held, WorkerInfo("w1", MODEL, "ready"))
            assert {answer.state.value for answer in answers.values()} <= {"ok"}
            for claim in claims:
                await finish(queue, claim, blocks=2)
                waiting.discard(claim.id)
        assert await asyncio.gather(*streams) == [["queued", "delta", "delta", "finished"]] * len(asked)
        assert await fleet.depth(MODEL) == 0
        assert [worker.id for worker in await fleet.workers(MODEL)] == ["w1"]
    nodes = Counter(min(NODES - 1, key_slot(Keys.of(c.id).lane("std").encode()) * NODES // 16384) for c in asked)
    assert len(nodes) == NODES, "the partitions lie on all nodes"
    heart.close()
    await queue.close()


async def _kinds(fleet: FleetClient, command: Generate) -> list[str]:
    return [event.t async for event in fleet.run(command)]


async def test_a_waiting_worker_hears_of_any_partition_long_before_its_time_is_over(cluster: Cluster) -> None:
    queue = queue_of(cluster, "w1", "waits")
    await published(queue, "waits")
    assert await queue.take(1) == []
    async with FleetClient.connect(cluster.url) as fleet:
        for command in commands("waits", PARTITIONS):
            # The test's own limit is 120 s: reads that were not called off would take 12 x 4 s and one of them more.
            wait = asyncio.create_task(queue.wait(4000))
            await asyncio.sleep(0.02)
            await fleet.submit(command)
            async with asyncio.timeout(3.5):
                (claim,) = await wait
            assert claim.id == command.id
            await finish(queue, claim)
    await queue.close()


async def test_aborts_and_hand_backs_find_their_node(cluster: Cluster) -> None:
    queue = queue_of(cluster, "w1", "moves")
    await published(queue, "moves")
    asked = commands("moves", PARTITIONS)
    async with FleetClient.connect(cluster.url) as fleet:
        for command in asked:
            await fleet.submit(command)
        claims = [claim for _ in range(PARTITIONS) for claim in await queue.take(PARTITIONS)]
        assert len(claims) == PARTITIONS
        await asyncio.gather(*(fleet.abort(claim.id, "gone") for claim in claims[:6]))
        assert await queue.find_aborted([c.id for c in claims]) == {c.id: "gone" for c in claims[:6]}
        for claim in claims[6:]:
            await queue.hand_back(claim.id, claim.epoch)
        again = [claim for _ in range(PARTITIONS) for claim in await queue.take(PARTITIONS)]
        assert {claim.id for claim in again} == {claim.id for claim in claims[6:]}
        for claim in [*claims[:6], *again]:
            await finish(queue, claim)
    await queue.close()


async def test_a_single_server_url_for_a_cluster_is_an_error_that_says_so(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.connection.RETRY_S", 0.1)
    link = Link.open(f"redis://127.0.0.1:{cluster.ports[1]}/0")
    names = [Keys(partition("x", number)).lane("std") for number in range(PARTITIONS)]
    with pytest.raises(FleetUnavailable, match=r"redis\+cluster"):
        for name in names:
            await link.read("XLEN", name)
    await link.close()


async def test_a_killed_primary_costs_no_request_and_no_event(cluster: Cluster) -> None:
    """Its replica takes over, for the tests that come after it too."""
    model = "falls"
    queue = queue_of(cluster, "w1", model, lease_ms=1500)
    await published(queue, model)
    asked = commands(model, 4 * PARTITIONS)
    async with FleetClient.connect(cluster.url) as fleet, asyncio.timeout(100):
        await asyncio.gather(*(fleet.submit(command) for command in asked))
        streams = [asyncio.create_task(_follow(fleet, command.id)) for command in asked]
        waiting = {command.id for command in asked}
        killed = False
        while waiting:
            try:
                for claim in await queue.take(4):
                    await finish(queue, claim, blocks=2)
                    waiting.discard(claim.id)
                    if len(waiting) < 3 * PARTITIONS and not killed:
                        killed = True
                        # What a lagging replica loses is the business of `Admission.replicas`.
                        until(cluster.replicated, "the replica has everything")
                        cluster.processes[0].send_signal(signal.SIGKILL)
            except FleetUnavailable:
                await asyncio.sleep(0.1)
            if not waiting:
                break
            # What a reply lost, or the replica had not yet, comes back by its lease.
            states = await asyncio.gather(*(_state(fleet, request_id) for request_id in waiting))
            waiting -= {request_id for request_id, ended in zip(list(waiting), states, strict=True) if ended}
        assert killed
        assert await asyncio.gather(*streams) == [["queued", "delta", "delta", "finished"]] * len(asked)
    await queue.close()


async def _state(fleet: FleetClient, request_id: str) -> bool:
    try:
        return (await fleet.result(request_id)).end is not None
    except FleetUnavailable:
        return False


async def _follow(fleet: FleetClient, request_id: str) -> list[str]:
    return [event.t async for event in fleet.stream(request_id, previews=False)]


async def test_a_slot_that_moves_under_load_costs_no_request_and_no_event(cluster: Cluster) -> None:
    """Key by key, as `redis-cli --cluster reshard` does: for a while a request's keys lie on two nodes."""
    model, hot = "flows", 0
    queue = queue_of(cluster, "w1", model, lease_ms=1500)
    heart = Heart.connect(cluster.url, "w1", model, lease_ms=1500, partitions=PARTITIONS)
    await published(queue, model)
    streams: list[asyncio.Task[list[str]]] = []
    moved = Counter[str]()
    async with FleetClient.connect(cluster.url) as fleet, asyncio.timeout(110):
        moving = asyncio.create_task(_move_there_and_back(cluster, Keys(partition(model, hot)), moved))

        async def submit() -> None:
            # Half of them in the partition that moves. So many at most: on a quick machine keys would come faster than
            # they are moved, for ever.
            while len(streams) < 40 or (len(streams) < 160 and not moving.done()):
                number = hot if len(streams) % 2 else len(streams) % PARTITIONS
                ask = Generate(id=new_request_id(model, number), model=model, prompt=(1,), limits=Limits(max_tokens=16))
                while True:
                    try:
                        await fleet.submit(ask)
                        break
                    except FleetUnavailable:
                        moved["refused submits"] += 1
                streams.append(asyncio.create_task(_follow(fleet, ask.id)))
                await asyncio.sleep(0.01)

        async def work() -> None:
            while True:
                try:
                    claims = await queue.take(4, 1)
                    for claim in claims:
                        await asyncio.to_thread(heart.beat, {claim.id: claim.epoch}, WorkerInfo("w1", model, "ready"))
                        await finish(queue, claim, blocks=2)
                except FleetUnavailable:
                    moved["refused writes"] += 1
                await asyncio.sleep(0.005)

        working = asyncio.create_task(work())
        submitting = asyncio.create_task(submit())
        await asyncio.wait({working, submitting}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        ends = asyncio.gather(*streams)
        await asyncio.wait({working, ends}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        assert await ends == [["queued", "delta", "delta", "finished"]] * len(streams)
        await moving
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        assert await fleet.depth(model) == 0
    assert moved["slots"] == 2 and moved["keys"] > 20, moved
    heart.close()
    await queue.close()


async def _move_there_and_back(cluster: Cluster, keys: Keys, moved: Counter[str]) -> None:
    """Give the slot of a partition to another node, slowly; and back."""
    slot = key_slot(keys.lane("std").encode())
    ask = asyncio.to_thread
    alive = [port for port in cluster.ports if await ask(cluster.ask, port, "PING")]
    primaries = [port for port in alive if b"role:master" in await ask(_raw, port, "INFO", "replication")]
    ids = {port: (await ask(_raw, port, "CLUSTER", "MYID")) for port in primaries}
    for _ in range(2):
        await asyncio.sleep(0.3)
        (source,) = [port for port in primaries if await ask(_owns, port, slot)]
        target = next(port for port in primaries if port != source)
        assert await ask(_raw, target, "CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source]) == b"OK"
        assert await ask(_raw, source, "CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target]) == b"OK"
        while names := await ask(_raw, source, "CLUSTER", "GETKEYSINSLOT", slot, 3):
            await ask(_raw, source, "MIGRATE", "127.0.0.1", target, "", 0, 5000, "KEYS", *names)
            moved["keys"] += len(names)
            await asyncio.sleep(0.04)
        for port in (target, source, *primaries):
            assert await ask(_raw, port, "CLUSTER", "SETSLOT", slot, "NODE", ids[target]) == b"OK"
        moved["slots"] += 1


def _raw(port: int, *command: Any) -> Any:
    """Run a command as it is: the library would parse some replies."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection, connection.makefile("rb") as reader:
        parts = [part if isinstance(part, bytes) else str(part).encode() for part in command]
        connection.sendall(b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(one), one) for one in parts))
        return _reply(reader)


def _reply(reader: Any) -> Any:
    line: bytes = reader.readline().rstrip()
    match line[:1]:
        case b"$":
            return None if line == b"$-1" else reader.read(int(line[1:]) + 2)[:-2]
        case b"*":
            return [_reply(reader) for _ in range(int(line[1:]))]
        case _:
            return line[1:]


def _owns(port: int, slot: int) -> bool:
    own = _raw(port, "CLUSTER", "MYID")
    return any(
        start <= slot <= end and any(node[2] == own for node in nodes[:1])
        for start, end, *nodes in ((int(r[0]), int(r[1]), *r[2:]) for r in _raw(port, "CLUSTER", "SLOTS"))
    )


@pytest.mark.parametrize(
    ("url", "seeds", "node"),
    [
        ("redis+cluster://a", (("a", 6379),), "redis://a:6379/0"),
        ("redis+cluster://u:p%40@a:1,b:2/", (("a", 1), ("b", 2)), "redis://u:p%40@a:1/0"),
        ("rediss+cluster://[::1]:7,b?ssl_ca_certs=/c", (("::1", 7), ("b", 6379)), "rediss://[::1]:7/0?ssl_ca_certs=/c"),
    ],
)
def test_a_url_names_some_nodes(url: str, seeds: tuple[tuple[str, int], ...], node: str) -> None:
    parsed = ClusterUrl.from_url(url)
    assert parsed.seeds == seeds
    assert parsed.node(seeds[0]) == node


@pytest.mark.parametrize(
    "url", ["redis+cluster://", "redis+cluster://a/3", "redis+cluster://a:x", "redis+cluster://a,"]
)
def test_a_url_that_cannot_be_one_is_refused(url: str) -> None:
    with pytest.raises(ValueError):
        ClusterUrl.from_url(url)


@pytest.mark.parametrize(
    ("command", "key"),
    [
        (("EVALSHA", "f", 2, "k", "l", "arg"), "k"),
        (("EVAL", "return 1", 0), None),
        (("XREADGROUP", "GROUP", "g", "w", "COUNT", 1, "STREAMS", "k", ">"), "k"),
        (("XGROUP", "CREATE", "k", "g", "0"), "k"),
        (("HGET", "k", "f"), "k"),
        (("PUBLISH", "k", "x"), "k"),
        (("PING",), None),
        (("CLIENT", "UNBLOCK", 7), None),
        (("WAIT", 1, 100), None),
    ],
)
def test_the_key_of_a_command_tells_its_node(command: Sequence[Any], key: str | None) -> None:
    assert key_of(command) == key


def test_a_node_that_does_not_know_its_name_is_where_it_was_asked() -> None:
    slots = Slots.from_reply([[0, 8191, [b"", 1, b"id"]], [8192, 16383, [b"b", 2, b"id"], [b"c", 3, b"id"]]], ("a", 9))
    assert slots.nodes == (("a", 1), ("b", 2))
    assert {slots.owner(f"df:{{m.{number}}}:q:std") for number in range(50)} == set(slots.nodes)
