"""Ollama's shapes over the same plans."""

import json
from typing import Any

import pytest

from shared.constraints import JsonObject, JsonSchema
from shared.events import Failed, Queued
from tests.api.scripted import CARD, Caller, ScriptedFleet, answer, running, steps
from tests.shared.tokenizers_for_tests import byte_level

TEXT = "Hello, wörld 🎉"
HI = [{"role": "user", "content": "hi"}]
MODEL = CARD.name


def lines(body: bytes) -> list[Any]:
    assert body.endswith(b"\n")
    return [json.loads(line) for line in body.splitlines()]


async def test_a_chat_streams_one_object_a_line_unless_told_otherwise(caller: Caller, fleet: ScriptedFleet) -> None:
    response = await caller.post("/api/chat", {"model": MODEL, "messages": HI})
    assert response.headers["content-type"] == "application/x-ndjson"
    *parts, end = lines(response.body)
    assert "".join(part["message"]["content"] for part in parts) == TEXT
    assert all(part["done"] is False and part["message"]["role"] == "assistant" for part in parts)
    assert (end["done"], end["done_reason"], end["message"]["content"]) == (True, "stop", "")
    whole = (await caller.post("/api/chat", {"model": MODEL + ":latest", "messages": HI, "stream": False})).json()
    assert whole["message"] == {"role": "assistant", "content": TEXT}
    assert whole["model"] == MODEL and whole["created_at"].endswith("Z")
    assert whole["eval_count"] == end["eval_count"] > 0 and whole["prompt_eval_count"] == len(fleet.commands[0].prompt)
    assert whole["total_duration"] >= whole["eval_duration"] >= 0


@pytest.mark.parametrize(
    ("path", "fields", "empty"),
    [
        ("/api/generate", {}, {"response": ""}),
        ("/api/generate", {"prompt": "", "system": "be brief", "stream": True}, {"response": ""}),
        ("/api/chat", {"messages": []}, {"message": {"role": "assistant", "content": ""}}),
        ("/api/chat", {"messages": [], "stream": False}, {"message": {"role": "assistant", "content": ""}}),
    ],
)
async def test_who_asks_nothing_of_a_model_is_told_that_it_is_there(
    caller: Caller, fleet: ScriptedFleet, path: str, fields: dict[str, Any], empty: dict[str, Any]
) -> None:
    (told,) = lines((await caller.post(path, {"model": f"{MODEL}:latest"} | fields)).body + b"\n")
    assert told.pop("created_at") and told == {"model": MODEL, "done": True, "done_reason": "load"} | empty
    assert (await caller.post(path, {"model": "nope"} | fields)).status == 404
    assert fleet.commands == []


async def test_a_prompt_is_a_chat_unless_raw(caller: Caller, fleet: ScriptedFleet) -> None:
    *parts, end = lines((await caller.post("/api/generate", {"model": MODEL, "prompt": "hi"})).body)
    assert "".join(part["response"] for part in parts) == TEXT and end["done"]
    assert fleet.commands[-1].prompt == tuple(byte_level().encode_chat(HI))
    raw = {"model": MODEL, "prompt": "hi", "raw": True, "stream": False}
    assert (await caller.post("/api/generate", raw)).json()["response"] == TEXT
    assert fleet.commands[-1].prompt == tuple(byte_level().encode("hi"))
    told = [{"role": "system", "content": "be brief"}, *HI]
    await caller.post("/api/generate", {"model": MODEL, "prompt": "hi", "system": "be brief"})
    assert fleet.commands[-1].prompt == tuple(byte_level().encode_chat(told))
    await caller.post("/api/generate", {"model": MODEL, "prompt": "a", "suffix": "b", "options": {"num_predict": 3}})
    assert fleet.commands[-1].template == (-1, -1, -1, *byte_level().encode("b", False))


async def test_options_and_formats_travel_under_their_other_names(caller: Caller, fleet: ScriptedFleet) -> None:
    options = {
        "temperature": 0.5, "top_k": 3, "seed": 7, "num_predict": 9, "stop": ["x"], "repeat_penalty": 1.5,
        "num_ctx": 64,
    }  # fmt: skip
    body = {"model": MODEL, "messages": HI, "options": options, "keep_alive": "5m", "diffusion": {"threshold": 0.5}}
    assert (await caller.post("/api/chat", body)).status == 200
    command = fleet.commands[-1]
    assert (command.sampling.temperature, command.sampling.top_k, command.sampling.seed) == (0.5, 3, 7)
    assert (command.limits.max_tokens, command.limits.stop) == (9, ("x",))
    assert command.edits is not None and command.edits.repetition_penalty == 1.5
    assert command.decoding is not None
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for form, kind in (("json", JsonObject), (schema, JsonSchema)):
        assert (await caller.post("/api/chat", {"model": MODEL, "messages": HI, "format": form})).status == 200
        assert isinstance(fleet.commands[-1].constraint, kind)
    assert (
        await caller.post("/api/chat", {"model": MODEL, "messages": HI, "options": {"num_predict": -1}})
    ).status == 200


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/api/chat", {"model": "nobody", "messages": HI}, 404),
        ("/api/chat", {"model": MODEL}, 400),
        ("/api/chat", {"model": MODEL, "messages": HI, "tools": [{}]}, 400),
        ("/api/chat", {"model": MODEL, "messages": [{"role": "robot", "content": "x"}]}, 400),
        ("/api/chat", {"model": MODEL, "messages": HI, "options": {"temperature": 9}}, 400),
        ("/api/chat", {"model": MODEL, "messages": HI, "diffusion": {"tresholt": 1}}, 400),
        ("/api/generate", {"model": MODEL, "prompt": "x", "images": ["aaaa"]}, 400),
        ("/api/show", {"model": "nobody"}, 404),
        ("/api/chat", b"{", 400),
    ],
)
async def test_errors_are_messages(caller: Caller, fleet: ScriptedFleet, path: str, body: Any, status: int) -> None:
    response = await caller.post(path, body)
    assert response.status == status and fleet.commands == []
    assert list(response.json()) == ["error"] and isinstance(response.json()["error"], str)


async def test_a_late_failure_is_a_line_of_its_own(caller: Caller, fleet: ScriptedFleet) -> None:
    fleet.script = steps(Queued, Failed("r", 2, 1, "lost", "gone"))
    response = await caller.post("/api/chat", {"model": MODEL, "messages": HI})
    assert (response.status, response.json()) == (500, {"error": "gone"})
    async with running(fleet, keepalive_s=0.01) as impatient:
        fleet.script = steps(Queued, 0.2, Failed("r", 2, 1, "lost", "gone"))
        assert lines((await impatient.post("/api/chat", {"model": MODEL, "messages": HI})).body) == [{"error": "gone"}]
    fleet.script = answer()


async def test_models_are_listed_and_described(caller: Caller) -> None:
    (model,) = (await caller.get("/api/tags")).json()["models"]
    assert (model["name"], model["digest"], model["details"]["family"]) == (MODEL, CARD.digest, "sdar")
    shown = (await caller.post("/api/show", {"model": MODEL})).json()
    assert shown["capabilities"] == ["completion", "insert"]
    assert shown["model_info"]["sdar.context_length"] == CARD.max_model_len
    assert (await caller.get("/api/version")).json()["version"]
