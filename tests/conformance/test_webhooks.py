"""Webhooks of background responses, batches and plain requests, on the live fleet; read by OpenAI's own client."""

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from redis import Redis
from standardwebhooks import Webhook as Verifier

from shared.keys import Keys
from tests.conformance.conftest import TWIN
from tests.conformance.fleet import MODEL, LiveFleet
from tests.conformance.test_stores import line
from tests.fleet.processes import WorkerProcess, until
from tests.fleet.receivers import Receiver


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[Receiver]:
    receiver = Receiver(tmp_path).start()
    yield receiver
    receiver.stop()


def told(fleet: LiveFleet, receiver: Receiver, count: int = 1) -> list[Any]:
    """Return the messages, each read by two independent verifiers."""
    until(lambda: len(receiver.told) >= count, "the receiver was told")
    reader = OpenAI(api_key="none").webhooks
    for one in receiver.told:
        reader.verify_signature(one["body"], one["headers"], secret=fleet.webhook_secret)
        Verifier(fleet.webhook_secret).verify(one["body"], one["headers"])
    return [json.loads(one["body"]) for one in receiver.told]


def test_a_background_response_is_told_of_as_openai_does(fleet: LiveFleet, client: OpenAI, receiver: Receiver) -> None:
    hook: Any = {"webhook": {"url": receiver.url}}
    response = client.responses.create(
        model=MODEL, input="What is 12 + 30?", background=True, max_output_tokens=40, extra_body=hook
    )
    (event,) = told(fleet, receiver)
    assert event["type"] in ("response.completed", "response.incomplete") and event["data"]["id"] == response.id
    told_by = client.webhooks.unwrap(receiver.told[0]["body"], receiver.told[0]["headers"], secret=fleet.webhook_secret)
    assert told_by.type == event["type"]
    read = client.responses.retrieve(response.id)
    assert read.status == event["data"]["status"] and read.usage is not None
    assert read.usage.output_tokens == event["data"]["usage"]["output_tokens"]
    assert read.output_text and read.output_text not in receiver.told[0]["body"]


def test_a_request_whose_caller_has_left_goes_on_and_is_told_of(
    fleet: LiveFleet, http: httpx.Client, receiver: Receiver
) -> None:
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/generate", json=body | {"webhook": {"url": receiver.url}}) as stream:
        request_id = stream.headers["x-diffleet-request"]
    (event,) = told(fleet, receiver)
    assert (event["type"], event["data"]["id"]) == ("request.completed", request_id)
    read = http.get(f"/generate/{request_id}").json()
    assert len(read["token_ids"]) == event["data"]["usage"]["completion_tokens"] == 200


def test_a_worker_and_a_front_that_are_killed_in_mid_request_lose_no_message(
    fleet: LiveFleet, receiver: Receiver, redis: Redis, twins: Callable[[], list[WorkerProcess]]
) -> None:
    workers = {worker.id: worker for worker in twins()}
    front = fleet.start_front(*fleet.webhook_flags).wait_live()
    body = {"model": TWIN, "prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with (
        httpx.Client(base_url=front.url, timeout=60) as http,
        http.stream("POST", "/generate", json=body | {"webhook": {"url": receiver.url}}) as stream,
    ):
        request_id = stream.headers["x-diffleet-request"]
        owner = redis.hget(Keys.of(request_id).request(request_id), "own")
        assert isinstance(owner, bytes)
        workers[owner.decode()].send(signal.SIGKILL)
        front.send(signal.SIGKILL)
    (event,) = told(fleet, receiver)
    assert (event["type"], event["data"]["id"]) == ("request.completed", request_id)
    assert event["data"]["usage"]["completion_tokens"] == 200


def test_a_batch_is_told_of_although_its_jobs_are_killed(fleet: LiveFleet, client: OpenAI, receiver: Receiver) -> None:
    rows = b"\n".join(json.dumps(line(f"l{number}")).encode() for number in range(6))
    file = client.files.create(file=("lines.jsonl", rows), purpose="batch")
    hook: Any = {"webhook": {"url": receiver.url, "metadata": {"job": "night"}}}
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", extra_body=hook
    )
    until(lambda: client.batches.retrieve(batch.id).status != "validating", "the batch has begun")
    fleet.jobs.send(signal.SIGKILL)
    fleet.jobs.popen.wait(20)
    fleet.start_jobs()
    (event,) = told(fleet, receiver)
    assert event["type"] == "batch.completed" and event["data"]["metadata"] == {"job": "night"}
    assert event["data"]["request_counts"] == {"total": 6, "completed": 6, "failed": 0}
    assert event["data"]["output_file_id"] == client.batches.retrieve(batch.id).output_file_id
    wrong = client.files.create(file=("lines.jsonl", b"no json"), purpose="batch")
    client.batches.create(
        input_file_id=wrong.id, endpoint="/v1/chat/completions", completion_window="24h", extra_body=hook
    )
    assert told(fleet, receiver, 2)[1]["type"] == "batch.failed"


def test_a_batch_with_a_webhook_that_cannot_be_is_refused(http: httpx.Client) -> None:
    body = {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"}
    answer = http.post("/v1/batches", json=body | {"webhook": {"url": "https://10.0.0.1/"}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "webhook.url")
