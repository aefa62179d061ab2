"""`diffleet up` from start to end, over a real server, api and worker."""

import contextlib
import json
import os
import pty
import re
import select
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from shared.connection import open_sync_client
from tests.cli.fleet_process import Up, diffleet
from tests.fleet.processes import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
]


@pytest.fixture
def put_down(short_folder: Path) -> Iterator[list[Up]]:
    started: list[Up] = []
    yield started
    for up in started:
        up.put_down()


def test_it_answers_serves_and_leaves_nothing_behind(tiny_model: Path, short_folder: Path, put_down: list[Up]) -> None:
    up = Up(short_folder, tiny_model, "--prompt", "Once upon a time", "--workers", "2")
    put_down.append(up)
    up.wait_serving()
    assert len(up.family()) == 6  # itself, server, api, two workers, jobs
    assert httpx.get(f"{up.url}/health/ready", trust_env=False).status_code == 200
    port = urlsplit(up.url).port
    assert port is not None

    assert up.stop() == 0

    assert until(lambda: up.family() == [], "all processes are gone")
    assert not up.socket.exists()
    assert not list(up.data_dir.glob("*.ready"))
    socket.create_server(("127.0.0.1", port)).close()
    # Piped: plain text, no drawing, the phases on stderr, answer and addresses on stdout.
    assert "\x1b" not in up.out + up.err
    assert re.search(r"embedded server ready.*api ready.*worker 1 ready.*worker 2 ready", up.err, re.S)
    assert "> Once upon a time" in up.err and "forwards" in up.err
    answer, _, addresses = up.out.partition("\nDiffleet serves tiny at ")
    assert answer.strip()
    assert f"curl {up.url}/v1/chat/completions" in addresses
    assert re.search(r"workers stopped.*api stopped.*embedded server stopped.*stopped", up.err, re.S)


def test_a_model_without_a_chat_template_is_asked_to_continue_texts(
    tiny_model: Path, short_folder: Path, put_down: list[Up]
) -> None:
    folder = Path(shutil.copytree(tiny_model, short_folder / "texts"))
    config = json.loads((folder / "tokenizer_config.json").read_bytes())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    up = Up(short_folder, folder, "--prompt", "Once upon a time")
    put_down.append(up)
    up.wait_serving()
    assert up.stop() == 0
    answer, _, addresses = up.out.partition("\nDiffleet serves")
    assert answer.strip() and "was not answered" not in up.err
    assert f"curl {up.url}/v1/completions" in addresses and '"prompt": ' in addresses and "--raw" in addresses


def test_on_a_terminal_the_first_answer_is_drawn_while_it_is_denoised(
    tiny_model: Path, short_folder: Path, put_down: list[Up]
) -> None:
    terminal, other_end = pty.openpty()
    up = Up(short_folder, tiny_model, "--prompt", "Once upon a time", stderr=other_end)
    put_down.append(up)
    os.close(other_end)
    drawn = bytearray()
    try:
        until(lambda: b"Ctrl-C stops" in _read_into(drawn, terminal), "the fleet serves")
        up.process.send_signal(signal.SIGTERM)
        until(lambda: _read_into(drawn, terminal) and up.process.poll() is not None, "it ends")
    finally:
        os.close(terminal)
    assert up.process.wait(timeout=60) == 0
    text = drawn.decode(errors="replace")
    assert "\x1b[2K" in text
    assert re.search(r"block \d+ · .*tokens/forward", text)
    assert "\x1b" not in up.out


def test_when_its_terminal_closes_it_stops_in_order_as_ever(
    tiny_model: Path, short_folder: Path, put_down: list[Up]
) -> None:
    terminal, other_end = pty.openpty()
    up = Up(short_folder, tiny_model, "--prompt", "", stderr=other_end)
    put_down.append(up)
    os.close(other_end)
    body = {"prompt": "Once", "max_tokens": 400, "stream": True, "ignore_eos": True}
    try:
        until(lambda: "docs: " in up.out or _read_into(bytearray(), terminal) is None, "the fleet serves")
        stream = httpx.stream("POST", f"{up.url}/generate", json=body, trust_env=False, timeout=60)
        response = stream.__enter__()
    finally:
        os.close(terminal)
    try:
        parts = response.iter_bytes()
        assert b"append" in next(part for part in parts if b"append" in part)
        # Its shell tells it, then the kernel.
        up.process.send_signal(signal.SIGHUP)
        until(lambda: not (up.data_dir / "worker-1.ready").exists(), "the worker drains")
        up.process.send_signal(signal.SIGHUP)
        rest = b"".join(parts)
    finally:
        stream.__exit__(None, None, None)
    assert up.process.wait(timeout=60) == 0
    assert b'"final"' in rest and b'"error"' not in rest
    assert rest.endswith(b"data: [DONE]\n\n")
    assert until(lambda: up.family() == [], "all processes are gone")


def _read_into(drawn: bytearray, terminal: int) -> bytearray:
    if select.select([terminal], [], [], 0.1)[0]:
        # A terminal whose other end is closed reads as an error, not as the end of a file.
        with contextlib.suppress(OSError):
            drawn += os.read(terminal, 65_536)
    return drawn


def test_after_kill_dash_nine_nothing_is_left_running_and_the_next_start_has_the_data(
    tiny_model: Path, short_folder: Path, put_down: list[Up]
) -> None:
    first = Up(short_folder, tiny_model, "--prompt", "")
    put_down.append(first)
    first.wait_serving()
    socket = first.data_dir / "valkey" / "valkey.sock"
    with contextlib.closing(open_sync_client(f"unix://{socket}")) as client:
        client.set("kept", "yes")
    first.stop(signal.SIGKILL)
    assert until(lambda: first.family() == [], "server, api and worker end")

    second = Up(short_folder, tiny_model, "--prompt", "")
    put_down.append(second)
    second.wait_serving()
    with contextlib.closing(open_sync_client(f"unix://{socket}")) as client:
        assert client.get("kept") == b"yes"
    assert second.stop() == 0
    assert until(lambda: second.family() == [], "all processes are gone")


def test_stopping_in_the_middle_of_a_request_leaves_nothing_running(
    tiny_model: Path, short_folder: Path, put_down: list[Up]
) -> None:
    up = Up(short_folder, tiny_model, "--prompt", "", "--drain-s", "0")
    put_down.append(up)
    up.wait_serving()
    body = {"prompt": "Once", "max_tokens": 2000, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{up.url}/generate", json=body, trust_env=False, timeout=60) as response:
        parts = response.iter_bytes()
        assert b"append" in next(part for part in parts if b"append" in part)
        assert up.stop() == 0
        rest = b"".join(parts)
    assert rest.endswith(b"data: [DONE]\n\n")
    assert b'"final"' in rest or b'"error"' in rest
    assert until(lambda: up.family() == [], "all processes are gone")


def test_a_model_folder_without_weights_is_named_and_nothing_is_left(short_folder: Path, tiny_model: Path) -> None:
    broken = short_folder / "broken"
    broken.mkdir()
    for file in tiny_model.iterdir():
        if file.suffix != ".safetensors":
            (broken / file.name).write_bytes(file.read_bytes())
    ended = diffleet("up", "--model", str(broken), "--data-dir", str(short_folder / "data"), "--port", "0")
    assert ended.returncode == 2
    assert "safetensors" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (short_folder / "data").exists()


def test_an_unknown_model_is_refused_before_anything_starts(short_folder: Path) -> None:
    ended = diffleet("up", "--model", "no-such-model", "--data-dir", str(short_folder / "data"))
    assert ended.returncode == 2
    assert "'no-such-model' is neither a folder nor a bundled model" in ended.stderr
    assert not (short_folder / "data").exists()


def test_a_port_in_use_is_named(short_folder: Path, tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = diffleet(
            *("up", "--model", str(tiny_model), "--data-dir", str(short_folder / "data"), "--port", str(port))
        )
    assert ended.returncode == 5
    assert f"cannot listen on 127.0.0.1 port {port}" in ended.stderr and "--port" in ended.stderr


def test_a_redis_that_does_not_answer_is_named(short_folder: Path, tiny_model: Path) -> None:
    ended = diffleet(
        *("up", "--model", str(tiny_model), "--data-dir", str(short_folder / "data"), "--port", "0"),
        *("--redis-url", "redis://127.0.0.1:1/0"),
        DIFFLEET_REDIS_WAIT_S="0",
    )
    assert ended.returncode == 5
    assert "no Redis answers at the given --redis-url" in ended.stderr
    assert "127.0.0.1:1" in ended.stderr
    ended = diffleet(
        *("up", "--model", str(tiny_model), "--data-dir", str(short_folder / "data"), "--port", "0"),
        DIFFLEET_REDIS_URL="redis://127.0.0.1:1/0",
    )
    assert ended.returncode == 5
    assert "no Redis answers at the given DIFFLEET_REDIS_URL" in ended.stderr
