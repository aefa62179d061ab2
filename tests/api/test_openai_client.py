"""OpenAI's own client against a real server."""

import http.client
import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from shared.client import QueueFull
from shared.events import Delta, Failed, Queued
from tests.api.live import serving
from tests.api.scripted import ScriptedFleet, answer, steps

TEXT = "Hello, wörld 🎉"
MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, ScriptedFleet]]:
    fleet = ScriptedFleet()
    with serving(fleet) as url:
        yield url, fleet


@pytest.fixture
def fleet(server: tuple[str, ScriptedFleet]) -> ScriptedFleet:
    fleet = server[1]
    fleet.script = answer()
    fleet.commands.clear()
    fleet.aborts.clear()
    return fleet


@pytest.fixture
def client(server: tuple[str, ScriptedFleet], fleet: ScriptedFleet) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server[0]}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_chat_parses(client: OpenAI) -> None:
    completion = client.chat.completions.create(model="org/demo", messages=MESSAGES, max_completion_tokens=20)
    assert completion.choices[0].message.content == TEXT
    assert completion.choices[0].finish_reason == "stop"
    assert completion.usage is not None and completion.usage.completion_tokens == 11
    assert completion._request_id  # pyright: ignore[reportPrivateUsage]


def test_a_stream_parses_and_ends_with_usage(client: OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="org/demo", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == TEXT
    assert chunks[-1].usage is not None and chunks[-1].usage.total_tokens > 11
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_the_stream_helper_gathers_the_whole(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model="org/demo", messages=MESSAGES, extra_body={"stream_mode": "denoise", "diffusion": {"threshold": 0.5}}
    ) as stream:
        completion = stream.get_final_completion()
    assert completion.choices[0].message.content == TEXT
    assert completion.choices[0].message.role == "assistant"


def test_models_are_listed_and_retrieved(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["org/demo"]
    assert client.models.retrieve("org/demo").id == "org/demo"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_bad_request_raises_with_its_param(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="org/demo", messages=MESSAGES, n=65)
    assert (caught.value.param, caught.value.code) == ("n", "invalid_value")
    assert caught.value.request_id


def test_a_failure_in_mid_stream_raises(client: OpenAI, fleet: ScriptedFleet) -> None:
    fleet.script = steps(Queued, Delta("r", 2, 1, 0, 0, [75], "h", 1), Failed("r", 3, 1, "lost", "the worker is gone"))
    chunks: list[str | None] = []
    with pytest.raises(openai.APIError) as caught:
        for chunk in client.chat.completions.create(model="org/demo", messages=MESSAGES, stream=True):
            chunks.append(chunk.choices[0].delta.content)
    assert chunks == ["", "h"]
    assert caught.value.code == "worker_lost"


def test_the_client_retries_an_overload_and_succeeds(server: tuple[str, ScriptedFleet], fleet: ScriptedFleet) -> None:
    tries = iter([steps(QueueFull(1)), answer()])
    fleet.script = lambda command: next(tries)(command)
    with OpenAI(base_url=f"{server[0]}/v1", api_key="none", max_retries=1) as client:
        assert client.chat.completions.create(model="org/demo", messages=MESSAGES).choices[0].message.content == TEXT


def test_a_five_megabyte_body_is_refused_over_the_wire(server: tuple[str, ScriptedFleet], fleet: ScriptedFleet) -> None:
    connection = http.client.HTTPConnection(server[0].removeprefix("http://"), timeout=10)
    body = json.dumps({"prompt": "x" * 5_000_000})
    connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 413
    assert json.loads(response.read())["error"]["code"] == "body_too_large"
    connection.close()


@pytest.mark.parametrize("streamed", [False, True])
def test_a_closed_connection_aborts_the_request(
    server: tuple[str, ScriptedFleet], fleet: ScriptedFleet, streamed: bool
) -> None:
    fleet.script = steps(Queued, Delta("r", 2, 1, 0, 0, [75], "h", 1), 600.0)
    connection = http.client.HTTPConnection(server[0].removeprefix("http://"), timeout=10)
    body = json.dumps({"prompt": "x", "stream": streamed})
    connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
    patience = time.monotonic() + 10
    while not fleet.commands and time.monotonic() < patience:
        time.sleep(0.005)
    connection.close()
    while not fleet.aborts and time.monotonic() < patience:
        time.sleep(0.005)
    assert fleet.aborts == [(fleet.commands[0].id, "disconnected")]
