"""`diffleet up --fake`: the whole api over workers that make answers up, where there is no torch."""

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from typer.testing import CliRunner

from shared.cli import commands
from shared.cli.exits import Exit
from shared.queue import WorkerQueue
from tests.cli.fleet_process import ROOT, Up, diffleet
from tests.fleet.processes import until
from tests.shared.protocol_for_tests import card_of

BLOCKER = """
import sys

class _Nowhere:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in {"torch", "triton", "numpy", "safetensors", "transformers", "kernels"} or name.startswith("worker."):
            raise ModuleNotFoundError(f"{name} is not here", name=name)

sys.meta_path.insert(0, _Nowhere())
"""
MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def fake_fleet() -> Iterator[Up]:
    folder = Path(tempfile.mkdtemp(prefix="df-"))
    (folder / "blocker").mkdir()
    (folder / "blocker" / "sitecustomize.py").write_text(BLOCKER)
    path = f"{folder / 'blocker'}{os.pathsep}{ROOT}"
    up = Up(folder, Path("demo"), "--fake", "--workers", "2", "--prompt", "Hello", PYTHONPATH=path)
    try:
        yield up.wait_serving()
        assert up.stop() == 0
    finally:
        up.put_down()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def client(fake_fleet: Up) -> OpenAI:
    return OpenAI(base_url=f"{fake_fleet.url}/v1", api_key="none", max_retries=0)


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
]


def test_a_chat_streams_what_it_answers(client: OpenAI) -> None:
    options: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "seed": 3, "max_tokens": 60}
    whole = client.chat.completions.create(**options)
    text = ""
    for chunk in client.chat.completions.create(**options, stream=True):
        text += chunk.choices[0].delta.content or ""
    assert whole.choices[0].message.content == text != ""
    assert whole.usage and 0 < whole.usage.completion_tokens <= 60


def test_the_canvas_limits_logprobs_holes_and_embeddings_are_there(client: OpenAI, fake_fleet: Up) -> None:
    body = {"prompt": "Hello", "max_tokens": 40, "ignore_eos": True, "stream": True, "stream_mode": "denoise"}
    with httpx.stream("POST", f"{fake_fleet.url}/generate", json=body, trust_env=False, timeout=60) as response:
        told = "".join(response.iter_text())
    assert "buffer_snapshot" in told and '"completion_tokens":40' in told
    choice = client.completions.create(model="demo", prompt="Hello", max_tokens=5, logprobs=1).choices[0]
    assert choice.finish_reason == "length" and choice.logprobs and len(choice.logprobs.tokens or []) == 5
    stopped = client.completions.create(model="demo", prompt="Hello", max_tokens=400, stop=["."]).choices[0]
    assert stopped.finish_reason == "stop" and "." not in stopped.text
    filled = client.completions.create(model="demo", prompt="Hello", suffix=" Bye.", max_tokens=4).choices[0]
    assert filled.text
    vectors = client.embeddings.create(model="demo", input=["a", "b"])
    assert len(vectors.data) == 2 and len(vectors.data[0].embedding) == 64


def test_what_it_cannot_do_is_refused_by_its_field(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="response_format"):
        client.chat.completions.create(model="demo", messages=MESSAGES, response_format={"type": "json_object"})


def test_a_request_that_is_left_is_aborted(fake_fleet: Up) -> None:
    with httpx.Client(base_url=fake_fleet.url, trust_env=False, timeout=60) as http:
        body = {"prompt": "Hello", "max_tokens": 3000, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/generate", json=body) as response:
            next(response.iter_bytes())
        until(lambda: "no open request" in open_requests(fake_fleet), "the request ends")


def open_requests(fleet: Up) -> str:
    return diffleet("requests", "--redis-url", fleet.redis_url).stdout


def test_another_worker_goes_on_with_the_same_text(client: OpenAI, fake_fleet: Up) -> None:
    options: dict[str, Any] = {
        "model": "demo",
        "prompt": "Hello",
        "seed": 4,
        "max_tokens": 800,
        "extra_body": {"ignore_eos": True},
    }
    undisturbed = client.completions.create(**options).choices[0].text
    text, killed = "", False
    for chunk in client.completions.create(**options, stream=True):
        text += chunk.choices[0].text
        if text and not killed:
            os.kill(busy_worker(fake_fleet), signal.SIGKILL)
            killed = True
    assert killed and text == undisturbed


def busy_worker(fleet: Up) -> int:
    """Return the process of a worker that has a request."""
    (name,) = {line.split()[3] for line in open_requests(fleet).splitlines()[1:]}
    return next(pid for pid in fleet.family() if _is_worker(pid, fleet, name))


def _is_worker(pid: int, fleet: Up, name: str) -> bool:
    ready = {file.read_text().strip(): file for file in fleet.data_dir.glob("worker-*.ready")}
    return str(ready[name]).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    ended = CliRunner().invoke(commands.app, ["up", "--fake", "--model", str(tmp_path)])
    assert ended.exit_code == Exit.USAGE
    assert "has no config.json" in ended.stderr


async def test_a_model_that_was_served_once_is_in_nobodys_way_and_can_be_forgotten(fake_fleet: Up) -> None:
    queue = WorkerQueue.connect(fake_fleet.redis_url, "a-former", "gone")
    await queue.publish_card(card_of("a-former"))
    await queue.close()
    over_http, over_redis = ("--url", fake_fleet.url), ("--redis-url", fake_fleet.redis_url)
    for where in (over_http, over_redis):
        done = diffleet("generate", "What is 12 + 30?", "-n", "4", *where)
        assert done.returncode == 0 and done.stdout.strip(), done.stderr
    assert diffleet("chat", *over_http, "-n", "4", stdin="Hello\n").returncode == 0
    assert "a-former, demo" in diffleet("models", *over_http).stdout
    gone = diffleet("forget", "demo", "a-former", *over_redis)
    assert (gone.returncode, gone.stdout) == (Exit.REFUSED, "a-former  forgotten: its card\n")
    assert "demo is served by " in gone.stderr
    assert "a-former" not in diffleet("models", *over_http).stdout
    again = diffleet("forget", "a-former", *over_redis)
    assert again.returncode == Exit.REFUSED and "is not served here; known: demo" in again.stderr
