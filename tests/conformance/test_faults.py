"""C22 to C33: what clients see when something leaves, dies, fills up or is refused."""

import json
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from redis import Redis

from shared.keys import Keys
from tests.conformance.conftest import IDLE, KEYS, TWIN, client_of
from tests.conformance.fleet import MODEL, Front, LiveFleet
from tests.fleet.processes import WorkerProcess, until

ASK: Any = [{"role": "user", "content": "What is 12 + 30?"}]
CHAT = "/v1/chat/completions"
SLOW: dict[str, Any] = {
    # One position a step, to the end of the context.
    "prompt": "Once upon a time",
    "max_tokens": 900,
    "ignore_eos": True,
    "seed": 1,
    "diffusion": {"strategy": "sequential"},
}


def state_of(redis: Redis, request_id: str) -> str:
    value: Any = redis.hget(Keys.of(request_id).request(request_id), "st")
    return value.decode()


def owner_of(redis: Redis, request_id: str) -> str:
    value: Any = redis.hget(Keys.of(request_id).request(request_id), "own")
    return value.decode() if value else ""


def requests_of(redis: Redis, model: str, state: str) -> set[str]:
    prefix = f"df:{{{model}.0}}:r:"
    return {
        key.decode().removeprefix(prefix)
        for key in redis.scan_iter(match=prefix.replace("{", "[{]") + "*")
        if redis.hget(key, "st") == state.encode()
    }


def test_c22_a_stream_that_is_left_is_aborted(http: httpx.Client, redis: Redis) -> None:
    with http.stream("POST", "/generate", json={"model": MODEL, "stream": True} | SLOW) as response:
        first = next(line for line in response.iter_lines() if line.startswith("data: "))
    request_id = json.loads(first.removeprefix("data: "))["id"]
    until(lambda: state_of(redis, request_id) not in ("queued", "running"), "the request has ended")
    assert state_of(redis, request_id) == "aborted"


def test_c23_an_answer_that_nobody_waits_for_is_aborted(base: str, redis: Redis) -> None:
    before = requests_of(redis, MODEL, "aborted")
    with httpx.Client(base_url=base, timeout=0.3) as impatient, pytest.raises(httpx.TimeoutException):
        impatient.post("/generate", json={"model": MODEL} | SLOW)
    until(lambda: requests_of(redis, MODEL, "aborted") - before, "the request has been aborted")


def test_c24_a_worker_that_dies_before_its_first_block_is_replaced(
    base: str, twins: Callable[[], list[WorkerProcess]], redis: Redis
) -> None:
    one, other = twins()
    one.send(signal.SIGSTOP)
    other.send(signal.SIGSTOP)
    with ThreadPoolExecutor() as threads:
        call = threads.submit(httpx.post, f"{base}{CHAT}", json={"model": TWIN, "messages": ASK}, timeout=60)
        until(lambda: requests_of(redis, TWIN, "queued"), "the request is queued")
        one.send(signal.SIGKILL)
        other.send(signal.SIGCONT)
        answer = call.result()
    assert answer.status_code == 200 and answer.json()["choices"][0]["finish_reason"] == "stop"


def test_c25_a_worker_that_dies_in_mid_stream_costs_no_text_and_repeats_none(
    base: str, twins: Callable[[], list[WorkerProcess]], redis: Redis
) -> None:
    workers = {worker.id: worker for worker in twins()}
    body = {"model": TWIN, "stream": True} | SLOW | {"max_tokens": 200}
    events: list[Any] = []
    with httpx.Client(base_url=base, timeout=60) as http:
        with http.stream("POST", "/generate", json=body) as response:
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                events.append(json.loads(line.removeprefix("data: ")))
                if len(events) == 1:
                    workers[owner_of(redis, events[0]["id"])].send(signal.SIGKILL)
        undisturbed = http.post("/generate", json=body | {"stream": False}).json()
    assert events[-1]["event"] == "final"
    assert "".join(event["text"] for event in events[:-1]) == undisturbed["text"]
    assert events[-1]["token_ids"] == undisturbed["token_ids"]


def test_c26_a_restart_of_redis_is_survived_without_restarting_anything(fleet: LiveFleet, base: str) -> None:
    def ask(_: int) -> tuple[int, str]:
        with httpx.Client(base_url=base, timeout=60) as http:
            response = http.post(CHAT, json={"model": MODEL, "messages": ASK})
        return response.status_code, response.text

    with ThreadPoolExecutor(8) as threads:
        calls = [threads.submit(ask, number) for number in range(40)]
        fleet.server.stop()
        fleet.server.start()
        answers = [call.result() for call in calls]
    for status, text in answers:
        assert status in (200, 500, 503), text
        assert status == 200 or json.loads(text)["error"]["code"]
    until(lambda: ask(0)[0] == 200, "the fleet answers again")


def test_c27_a_full_queue_is_a_503_and_openais_client_comes_through(strict: Front) -> None:
    with httpx.Client(base_url=strict.url, timeout=30) as http:
        with http.stream("POST", CHAT, json={"model": IDLE, "messages": ASK, "stream": True}) as held:
            assert held.status_code == 200
            refused = http.post(CHAT, json={"model": IDLE, "messages": ASK})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_is_overloaded")
            assert 1 <= int(refused.headers["retry-after"]) <= 120

    done = threading.Event()

    def keep_busy() -> None:
        with httpx.Client(base_url=strict.url, timeout=30) as http:
            with http.stream("POST", "/generate", json={"model": MODEL, "stream": True} | SLOW) as held:
                next(held.iter_lines())
                done.set()
                time.sleep(1.0)

    busy = threading.Thread(target=keep_busy)
    busy.start()
    assert done.wait(30)
    with client_of(strict.url, retries=5) as client:
        assert client.chat.completions.create(model=MODEL, messages=ASK).choices[0].finish_reason == "stop"
    busy.join(30)


def test_c28_rates_hold_over_two_fronts_and_refusals_cost_nothing(guarded: tuple[Front, Front]) -> None:
    def ask(number: int, key: str, **body: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {KEYS[key]}"}
        url = f"{guarded[number % 2].url}{CHAT}"
        return httpx.post(url, json={"model": MODEL, "messages": ASK, "max_tokens": 8} | body, headers=headers)

    answers = [ask(number, "slow") for number in range(8)]
    # Five at once; what refills meanwhile is one in twelve seconds.
    assert [answer.status_code for answer in answers[:5]] == [200] * 5
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(refused.headers["retry-after"]) <= 12
    assert refused.headers["x-ratelimit-limit-requests"] == "5"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.headers["x-ratelimit-reset-requests"].endswith("s")
    with client_of(guarded[0].url, KEYS["slow"]) as client, pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model=MODEL, messages=ASK)

    first = ask(0, "tokens")
    left = int(first.headers["x-ratelimit-remaining-tokens"])
    assert first.headers["x-ratelimit-limit-tokens"] == "300" and 0 < left < 300
    too_much = ask(1, "tokens", max_tokens=290)
    assert too_much.status_code == 429 and too_much.headers["x-should-retry"] == "false"
    assert int(ask(1, "tokens").headers["x-ratelimit-remaining-tokens"]) >= left - 60


@pytest.mark.parametrize("streamed", [False, True])
def test_c29_a_request_out_of_time_is_a_504_or_an_error_frame(strict: Front, redis: Redis, streamed: bool) -> None:
    before = requests_of(redis, IDLE, "expired") | requests_of(redis, IDLE, "aborted")
    response = httpx.post(f"{strict.url}{CHAT}", json={"model": IDLE, "messages": ASK, "stream": streamed}, timeout=30)
    if streamed:
        frames = [line for line in response.text.split("\n") if line.startswith("data: ")]
        assert frames[-1] == "data: [DONE]"
        assert json.loads(frames[-2].removeprefix("data: "))["error"]["code"] == "timeout"
    else:
        assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
    until(
        lambda: (requests_of(redis, IDLE, "expired") | requests_of(redis, IDLE, "aborted")) - before,
        "the request has ended in the fleet",
    )


def test_c30_request_ids_are_on_everything(http: httpx.Client, fleet: LiveFleet) -> None:
    body = {"model": MODEL, "messages": ASK, "max_tokens": 4}
    for path, content in ((CHAT, body), (CHAT, {}), (CHAT, body | {"stream": True}), ("/v1/nope", body)):
        assert http.post(path, json=content).headers["x-request-id"].startswith("req_")
        assert http.post(path, json=content, headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    for wrong in ("has space", "x" * 129):
        assert http.post(CHAT, json=body, headers={"x-request-id": wrong}).headers["x-request-id"] != wrong
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    http.post(CHAT, json=body, headers={"x-request-id": "traced-1", "traceparent": f"00-{trace}-00f067aa0ba902b7-01"})

    def is_logged() -> bool:
        whole = fleet.front.log.read_text().rpartition("\n")[0]
        lines = [json.loads(line) for line in whole.splitlines()]
        return any(line.get("request_id") == "traced-1" and line.get("trace_id") == trace for line in lines)

    # A request's line is written once its answer has been sent.
    until(is_logged, "the request is in the log")
    assert "12 + 30" not in fleet.logs


def test_c31_keys_are_wanted_where_they_are_and_probes_are_free(guarded: tuple[Front, Front]) -> None:
    with httpx.Client(base_url=guarded[0].url, timeout=30) as http:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic abc"}):
            refused = http.get("/v1/models", headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
            assert refused.headers["www-authenticate"] == "Bearer"
            assert refused.headers["x-request-id"]
        for scheme in ("Bearer", "bearer", "BEARER"):
            assert http.get("/v1/models", headers={"authorization": f"{scheme} {KEYS['user']}"}).status_code == 200
        for path in ("/health", "/health/live", "/health/ready", "/metrics", "/ping", "/version", "/openapi.json"):
            assert http.get(path).status_code == 200
        assert http.get("/v1/models", headers={"authorization": f"Bearer {KEYS['admin']}"}).status_code == 403
        assert http.get("/admin/x", headers={"authorization": f"Bearer {KEYS['user']}"}).status_code == 403
        assert http.get("/admin/x", headers={"authorization": f"Bearer {KEYS['admin']}"}).status_code == 404
        preflight = {"origin": "https://a.example", "access-control-request-method": "POST"}
        assert http.options(CHAT, headers=preflight).status_code == 200
    with client_of(guarded[0].url, "wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_c31_objects_of_one_key_are_unknown_to_another(guarded: tuple[Front, Front]) -> None:
    with client_of(guarded[0].url, KEYS["user"]) as mine, client_of(guarded[1].url, KEYS["tokens"]) as theirs:
        file = mine.files.create(file=("a.jsonl", b"{}"), purpose="batch")
        answer = mine.responses.create(model=MODEL, input="hi", max_output_tokens=16)
        assert mine.files.retrieve(file.id).id == file.id
        for look in (lambda: theirs.files.retrieve(file.id), lambda: theirs.responses.retrieve(answer.id)):
            with pytest.raises(openai.NotFoundError):
                look()
        assert file.id not in {other.id for other in theirs.files.list()}


def test_c32_browsers_may_call_and_see_the_headers(guarded: tuple[Front, Front], http: httpx.Client) -> None:
    origin = {"origin": "https://a.example"}
    preflight = origin | {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
    }
    for url in (guarded[0].url, str(http.base_url)):
        allowed = httpx.options(f"{url}{CHAT}", headers=preflight)
        assert allowed.status_code == 200
        assert "authorization" in allowed.headers["access-control-allow-headers"].lower()
    body = {"model": MODEL, "messages": ASK, "max_tokens": 4}
    for response in (
        httpx.post(f"{guarded[0].url}{CHAT}", json=body, headers=origin),
        http.post(CHAT, json=body | {"stream": True}, headers=origin),
        http.post(CHAT, json={}, headers=origin),
    ):
        assert response.headers["access-control-allow-origin"] == "*"
        exposed = response.headers["access-control-expose-headers"].lower()
        assert all(name in exposed for name in ("x-request-id", "retry-after", "x-ratelimit-remaining-tokens"))


def test_c33_a_front_drains_under_fifty_streams(fleet: LiveFleet) -> None:
    front = fleet.start_front("--drain-delay-s", "1").wait_live()
    begun = threading.Semaphore(0)

    def follow(number: int) -> str:
        options: Any = {"max_tokens": 60, "seed": number, "extra_body": {"ignore_eos": True}}
        with client_of(front.url) as client:
            chunks = client.chat.completions.create(model=MODEL, messages=ASK, stream=True, **options)
            reasons: list[str] = []
            for count, chunk in enumerate(chunks):
                if count == 0:
                    begun.release()
                reasons += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
        return reasons[0]

    with ThreadPoolExecutor(50) as threads:
        calls = [threads.submit(follow, number) for number in range(50)]
        for _ in range(25):
            assert begun.acquire(timeout=60)
        front.send(signal.SIGTERM)
        until(lambda: httpx.get(f"{front.url}/health/ready").status_code == 503, "it says that it drains")
        assert [call.result() for call in calls] == ["length"] * 50
    assert front.popen.wait(30) == 0


def test_c33_a_second_signal_skips_the_waiting(fleet: LiveFleet) -> None:
    front = fleet.start_front("--drain-delay-s", "300", "--drain-s", "300", "--keepalive-s", "0.5").wait_live()
    body = {"model": IDLE, "messages": ASK, "stream": True}
    with httpx.stream("POST", f"{front.url}{CHAT}", json=body, timeout=30) as response:
        front.send(signal.SIGTERM)
        until(lambda: httpx.get(f"{front.url}/health/ready").status_code == 503, "it says that it drains")
        front.send(signal.SIGTERM)
        rest = response.read().decode()
    assert '"code":"server_is_overloaded"' in rest and rest.endswith("data: [DONE]\n\n")
    try:
        assert front.popen.wait(30) == 0
    except subprocess.TimeoutExpired:
        pytest.fail("the second signal was not heard")
