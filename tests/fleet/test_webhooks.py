"""Webhooks with processes of their own: jobs that are killed, receivers that are away, names that change their mind."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from standardwebhooks import Webhook as Verifier
from standardwebhooks.webhooks import WebhookVerificationError

from api.webhooks.signing import new_secret
from shared.client import FleetClient
from shared.commands import Generate, Webhook
from shared.connection import Link
from shared.keys import Keys
from shared.queue import WorkerQueue
from shared.webhooks import WebhookStore
from tests.conformance.fleet import Front, Process
from tests.fleet.processes import REPOSITORY, until
from tests.fleet.receivers import Receiver
from tests.shared.protocol_for_tests import MODEL, card_of, command_for, finish

OLD, NEW = new_secret(), new_secret()
PART = Keys(f"{MODEL}.0")


class Bench:
    """A queue whose worker is the test, a receiver, and jobs that can be started and killed."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        self.receiver = Receiver(folder)
        self._folder, self._url = folder, redis_url
        self._secrets = folder / "secrets.json"
        self.write_secrets(NEW, OLD)
        self._jobs: list[Process] = []

    def write_secrets(self, *secrets: str) -> None:
        self._secrets.write_text(json.dumps({"*": secrets}))

    def start_jobs(self, retries: str = "[0.2,0.2,0.2,0.2,0.2,0.2,0.2,0.2]", *flags: str) -> Process:
        own = ("--redis-url", self._url, "--webhook-secrets-file", str(self._secrets), "--webhook-allow-http")
        own += ("--webhook-networks", '["127.0.0.1/32"]', "--webhook-retry-s", retries, *flags)
        self._jobs.append(Process("api.jobs", self._folder / "jobs.log", own))
        return self._jobs[-1]

    @property
    def log(self) -> str:
        return (self._folder / "jobs.log").read_text()

    def command(self, **webhook: Any) -> Generate:
        return command_for().model_copy(update={"webhook": Webhook(url=self.receiver.url, **webhook)})

    async def run(self, command: Generate) -> None:
        """Submit a request and end it, as a worker does."""
        queue = WorkerQueue.connect(self._url, MODEL, "w1")
        await queue.publish_card(card_of())
        async with FleetClient.connect(self._url) as fleet:
            await fleet.submit(command)
        (claim,) = await queue.take(1)
        await finish(queue, claim)
        await queue.close()

    def stop(self) -> None:
        self.receiver.stop()
        for process in self._jobs:
            process.end()


@pytest.fixture
def bench(tmp_path: Path, redis_url: str, fleet_redis: Any) -> Iterator[Bench]:
    bench = Bench(tmp_path, redis_url)
    yield bench
    bench.stop()
    fleet_redis.delete("df:jobs")  # arq's own queue, see api.names


async def count_due(redis_url: str) -> tuple[int, int]:
    link = Link.open(redis_url)
    census = await WebhookStore(link).census([PART])
    await link.close()
    return census.due, census.dead


def test_secrets_are_changed_while_the_jobs_run(bench: Bench) -> None:
    bench.receiver.start()
    bench.start_jobs()
    fresh = new_secret()

    def is_signed_by(secret: str) -> bool:
        told = len(bench.receiver.told)
        asyncio.run(bench.run(bench.command()))
        until(lambda: len(bench.receiver.told) > told, "the receiver was told")
        last = bench.receiver.told[-1]
        try:
            Verifier(secret).verify(last["body"], last["headers"])
        except WebhookVerificationError:
            return False
        return True

    assert is_signed_by(OLD) and not is_signed_by(fresh)
    bench.write_secrets(fresh, NEW)
    until(lambda: is_signed_by(fresh), "messages are signed by the new secret")
    assert not is_signed_by(OLD) and is_signed_by(NEW)


def test_an_end_is_told_signed_by_all_secrets_and_by_no_other(bench: Bench) -> None:
    bench.receiver.start()
    command = bench.command(metadata={"order": "7"})
    asyncio.run(bench.run(command))
    bench.start_jobs()
    until(lambda: bench.receiver.told, "the receiver was told")
    (told,) = bench.receiver.told
    headers, body = told["headers"], told["body"]
    for secret in (OLD, NEW):
        assert Verifier(secret).verify(body, headers) == json.loads(body)
    with pytest.raises(WebhookVerificationError):
        Verifier(new_secret()).verify(body, headers)
    with pytest.raises(WebhookVerificationError):
        Verifier(NEW).verify(body.replace("completed", "failed"), headers)
    # Another verifier, which also knows the shape.
    event: Any = OpenAI(api_key="none").webhooks.unwrap(body, headers, secret=OLD)
    assert event.data.id == command.id
    message = json.loads(body)
    assert message["type"] == "request.completed" and message["id"] == headers["webhook-id"]
    assert message["data"]["usage"]["completion_tokens"] == 2 and message["data"]["finish_reason"] == "stop"
    assert message["data"]["metadata"] == {"order": "7"} and "text" not in body
    assert "secret-in-url" not in bench.log and told["path"].endswith("token=secret-in-url")


async def test_a_receiver_that_is_away_is_told_when_it_is_back_also_by_other_jobs(
    bench: Bench, redis_url: str, fleet_redis: Any
) -> None:
    commands = [bench.command() for _ in range(20)]
    first = bench.start_jobs("[0.3,0.3,0.3,0.3,0.3,0.3,0.3,0.3,0.3,0.3,0.3,0.3,0.3,0.3,0.3,0.3,0.3,0.3,0.3,0.3]")
    for command in commands:
        await bench.run(command)
    until(lambda: "is tried again" in bench.log, "a try has failed")
    first.send(signal.SIGKILL)
    first.popen.wait(20)
    assert await count_due(redis_url) == (20, 0)
    # What the dead process had in hand is due again when its lease is over, which the test does not wait for.
    for command in commands:
        fleet_redis.zadd(PART.hooks(), {command.id: 0})
    bench.receiver.start(500, 503, 302, 204)
    bench.start_jobs()
    until(lambda: len([one for one in bench.receiver.told if one["status"] == 204]) >= 20, "all were told")
    taken = [json.loads(one["body"])["data"]["id"] for one in bench.receiver.told if one["status"] == 204]
    assert sorted(taken) == sorted(command.id for command in commands)
    refused = [one["status"] for one in bench.receiver.told if one["status"] != 204]
    assert sorted(refused) == [302, 500, 503]
    while await count_due(redis_url) != (0, 0):
        await asyncio.sleep(0.05)


async def test_jobs_killed_with_a_message_in_hand_lose_none_and_repeat_it_under_the_same_id(
    bench: Bench, redis_url: str, fleet_redis: Any
) -> None:
    bench.receiver.start()
    command = bench.command()
    await bench.run(command)
    link = Link.open(redis_url)
    # In hand of a process that has sent it and died before it could say so.
    (taken,) = await WebhookStore(link).take(PART, 5, lease_ms=300)
    await link.close()
    assert taken.attempt == 1
    bench.start_jobs()
    until(lambda: bench.receiver.told, "the receiver was told")
    (told,) = bench.receiver.told
    assert told["headers"]["webhook-id"] == f"evt_{command.id.rpartition('_')[2]}"


async def test_what_is_never_taken_is_given_up_listed_and_told_after_a_replay(bench: Bench, redis_url: str) -> None:
    bench.receiver.start(400, 400, 400, 200)
    command = bench.command()
    await bench.run(command)
    bench.start_jobs("[0.1,0.1]")
    while await count_due(redis_url) != (0, 1):
        await asyncio.sleep(0.05)
    link = Link.open(redis_url)
    store = WebhookStore(link)
    (dead,) = await store.list_dead([PART], 10)
    assert (dead.id, dead.attempts, dead.why) == (command.id, 3, "http_400")
    assert await store.replay(command.id)
    until(lambda: len(bench.receiver.told) == 4, "it was told once more")
    assert len({one["headers"]["webhook-id"] for one in bench.receiver.told}) == 1
    while await count_due(redis_url) != (0, 0):
        await asyncio.sleep(0.05)
    ends = (await store.census([PART])).ends
    await link.close()
    assert ends == {"again": 2, "dead": 1, "told": 1}


async def test_a_receiver_that_says_it_is_gone_hears_nothing_more(bench: Bench, redis_url: str) -> None:
    bench.receiver.start(410, 204)
    await bench.run(bench.command())
    bench.start_jobs()
    while await count_due(redis_url) != (0, 1):
        await asyncio.sleep(0.05)
    second = bench.command()
    await bench.run(second)
    while await count_due(redis_url) != (0, 2):
        await asyncio.sleep(0.05)
    assert len(bench.receiver.told) == 1
    link = Link.open(redis_url)
    store = WebhookStore(link)
    assert {one.why for one in await store.list_dead([PART], 10)} == {"http_410", "receiver_gone"}
    # A replay takes it for one that is there again.
    assert await store.replay(second.id)
    until(lambda: len(bench.receiver.told) == 2, "it was told")
    await link.close()


async def test_one_receiver_that_hangs_does_not_keep_the_others_waiting(bench: Bench, redis_url: str) -> None:
    # Connections are made by the system; nobody ever reads what comes over them.
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        hanging = Webhook(url=f"http://127.0.0.1:{silent.getsockname()[1]}/")
        for _ in range(12):
            await bench.run(command_for().model_copy(update={"webhook": hanging}))
        bench.receiver.start()
        other = Webhook(url=f"http://localhost:{bench.receiver.port}/")
        await bench.run(command_for().model_copy(update={"webhook": other}))
        bench.start_jobs("[60]", "--webhook-concurrency", "8", "--webhook-timeout-s", "100")
        until(lambda: bench.receiver.told, "the other receiver was told")
        assert await count_due(redis_url) == (12, 0)


def test_an_operator_lists_replays_and_discards_over_http_and_in_the_terminal(
    bench: Bench, redis_url: str, tmp_path: Path
) -> None:
    bench.receiver.start(400, 400, 204)
    first, second = bench.command(), bench.command()
    for command in (first, second):
        asyncio.run(bench.run(command))
    bench.start_jobs("[]")
    until(lambda: asyncio.run(count_due(redis_url)) == (0, 2), "both were given up")

    def diffleet(*arguments: str) -> str:
        command = [sys.executable, "-c", "from shared.cli import main; main()", "webhooks", *arguments]
        where = ("--redis-url", redis_url)
        done = subprocess.run([*command, *where], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
        return f"{done.returncode} {done.stdout}{done.stderr}"

    listed = diffleet()
    assert first.id in listed and second.id in listed and "http_400" in listed
    replayed = diffleet("--replay", "nonsense", "--replay", first.id)
    assert replayed.startswith(f"4 {first.id}  due again") and "'nonsense' was given up" in replayed
    until(lambda: len(bench.receiver.told) == 3, "it was told")
    front = Front(tmp_path, redis_url).wait_live()
    try:
        with httpx.Client(base_url=front.url, timeout=30) as http:
            (one,) = http.get("/admin/webhooks").json()["data"]
            assert (one["id"], one["kind"], one["attempts"], one["why"]) == (second.id, "request", 1, "http_400")
            shown = http.get("/metrics").text
            assert "diffleet_webhooks_dead 1.0" in shown and "diffleet_webhooks_due 0.0" in shown
            assert 'diffleet_webhook_tries{outcome="told"} 1.0' in shown
            assert 'diffleet_webhook_tries{outcome="dead"} 2.0' in shown
            assert http.post(f"/admin/webhooks/{first.id}/replay").status_code == 404
            assert http.post(f"/admin/webhooks/{second.id}/replay").status_code == 202
            until(lambda: len(bench.receiver.told) == 4, "it was told")
            until(lambda: http.get("/admin/webhooks?state=due").json()["data"] == [], "it is settled")
            assert http.delete(f"/admin/webhooks/{second.id}").status_code == 404
            told = http.get(f"/generate/{second.id}").json()
            assert (told["state"], told["text"], told["finish_reason"]) == ("done", "<0>", "stop")
            assert http.get("/generate/r_m.0_01M8GECSMY1EGCZJHK7WGJG4QJ").status_code == 404
    finally:
        front.end()
    assert diffleet().startswith("0 no webhook was given up")
    assert diffleet("--discard", second.id).startswith("4 ") and diffleet("--discard", "nonsense").startswith("4 ")
