"""`python -m api` as a process."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from redis import Redis

from api.process import main
from shared.card import pack
from shared.keys import MODELS
from shared.keys import card as card_key
from tests.api.scripted import CARD

API = [sys.executable, "-m", "api"]


@contextmanager
def process(log: Path, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run the front on a free port until the block ends; yields it with its port once it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with log.open("wb") as sink:
        started = subprocess.Popen([*API, "--port", str(port), *options], stderr=sink, env=_environment())
    try:
        patience = time.monotonic() + 30
        while True:
            try:
                if ask(port, "GET", "/health/live")[0] == 200:
                    break
            except OSError:
                assert started.poll() is None, log.read_text()
                assert time.monotonic() < patience, log.read_text()
                time.sleep(0.02)
        yield started, port
    finally:
        started.kill()
        started.wait(10)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("DIFFLEET_")}


def ask(port: int, method: str, path: str, body: object = None) -> tuple[int, dict[str, object]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    headers = {"Content-Type": "application/json"} if body is not None else {}
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def test_it_serves_without_redis_and_says_so_and_leaves_with_zero(tmp_path: Path) -> None:
    dead = "redis://127.0.0.1:1/0"
    with process(tmp_path / "log", "--redis-url", dead) as (started, port):
        status, content = ask(port, "GET", "/health/ready")
        assert (status, content["redis"]) == (503, "unreachable")
        started.send_signal(signal.SIGTERM)
        assert started.wait(10) == 0
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_it_queues_in_a_real_redis_and_drains_its_open_streams(
    tmp_path: Path, redis_url: str, fleet_redis: Redis
) -> None:
    fields: dict[str | bytes, bytes | float | int | str] = {**pack(CARD)}
    fleet_redis.hset(card_key(CARD.name), mapping=fields)
    fleet_redis.sadd(MODELS, CARD.name)
    options = ("--redis-url", redis_url, "--queue-limit", "1", "--keepalive-s", "0.1", "--drain-s", "0.3")
    with process(tmp_path / "log", *options) as (started, port):
        assert ask(port, "GET", "/v1/models/org/demo")[1]["digest"] == CARD.digest
        assert ask(port, "GET", "/health/ready")[0] == 503

        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        body = json.dumps({"prompt": "the secret fox", "stream": True})
        connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200
        assert response.readline() == b": keep-alive\n"

        status, content = ask(port, "POST", "/generate", {"prompt": "one too many"})
        assert status == 503
        assert "full" in str(content["error"])

        started.send_signal(signal.SIGTERM)
        rest = response.read().decode()
        response.close()
        connection.close()
        assert '"code":"server_is_overloaded"' in rest
        assert rest.endswith("data: [DONE]\n\n")
        assert started.wait(10) == 0
    log = (tmp_path / "log").read_text()
    assert "secret fox" not in log
    assert all(json.loads(line)["level"] for line in log.splitlines())
    # The abort has reached the queue: nobody is left in the lane.
    lanes = list(fleet_redis.scan_iter(match="df:*:q:std"))
    assert [fleet_redis.xlen(lane) for lane in lanes] == [0]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--port", "many"), "port"),
        (("--keepalive-s", "0"), "keepalive_s"),
        (("--redis-url", "http://nowhere"), "redis_url"),
    ],
)
def test_wrong_options_are_named_and_exit_with_two(
    options: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(list(options)) == 2
    assert named in capsys.readouterr().err
