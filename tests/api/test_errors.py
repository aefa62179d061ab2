import dataclasses
from typing import Any

import pytest

from shared.client import FleetUnavailable, QueueFull, TenantFull
from shared.commands import Generate
from shared.events import Delta, Queued
from shared.text import Tokenizer
from tests.api.scripted import CARD, Caller, ScriptedFleet, running, steps
from tests.shared.tokenizers_for_tests import byte_level_files

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [4, -1]}, "prompt[1]"),
        ({"prompt": [4, 5, 400]}, "prompt[2]"),
        ({"model": 3}, "model"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": "7"}, "max_tokens"),
        ({"max_tokens": 7.0}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": 2**62}, "max_tokens"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"seed": 1.5}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": 5}, "stop"),
        ({"stop": ["x", 5]}, "stop[1]"),
        ({"stop": ["a" * 257]}, "stop[0]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop_token_ids": [400]}, "stop_token_ids[0]"),
        ({"max_nfe": 0}, "max_nfe"),
        ({"max_repetition_run": 0}, "max_repetition_run"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
        ({"stream": 1}, "stream"),
        ({"stream_mode": "replace"}, "stream_mode"),
        ({"user": "u" * 257}, "user"),
        ({"block_length": 0}, "block_length"),
        ({"diffusion": "fast"}, "diffusion"),
        ({"diffusion": {"tresholt": 0.5}}, "diffusion.tresholt"),
        ({"diffusion": {"threshold": 2}}, "diffusion.threshold"),
        ({"diffusion": {"strategy": "magic"}}, "diffusion.strategy"),
        ({"diffusion": {"steps": 4}}, "diffusion.steps"),
        ({"diffusion": {"strategy": "sequential", "threshold": 0.5}}, "diffusion.threshold"),
        ({"diffusion": {"strategy": "random", "remasking": "sequential"}}, "diffusion.remasking"),
        ({"block_length": 4, "diffusion": {"block_length": 8}}, "diffusion.block_length"),
        ({"max_nfe": 4, "diffusion": {"max_nfe": 8}}, "diffusion.max_nfe"),
        ({"n": 2}, "n"),
        ({"suffix": "x"}, "suffix"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_wrong_field_is_named(
    caller: Caller, fleet: ScriptedFleet, change: dict[str, Any], param: str, streamed: bool
) -> None:
    response = await caller.post("/generate", {"prompt": "x", "stream": streamed} | change)
    assert response.status == 400
    assert response.error["param"] == param
    assert response.error["type"] == "invalid_request_error"
    assert param.partition("[")[0] in response.error["message"]
    assert fleet.commands == []


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "function", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool"}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
        ({"n": True}, "n"),
        ({"n": 0}, "n"),
        ({"n": 65}, "n"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 300}, "max_completion_tokens"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"diffusion": {"cfg": 1}}, "diffusion.cfg"),
    ],
)
async def test_a_wrong_chat_field_is_named(
    caller: Caller, fleet: ScriptedFleet, change: dict[str, Any], param: str
) -> None:
    response = await caller.post(CHAT, {"messages": HI} | change)
    assert response.status == 400
    assert response.error["param"] == param
    assert "{{" not in response.error["message"]
    assert fleet.commands == []


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        ("/generate", {"prompt": [4, 400]}, "prompt[1] is 400; "),
        ("/generate", {"prompt": "x", "stop_token_ids": [400]}, "stop_token_ids[0] is 400; "),
        ("/detokenize", {"tokens": [4, 400]}, "tokens[1] is 400; "),
    ],
)
async def test_a_token_that_the_model_has_not_is_told_alike_wherever_it_stands(
    caller: Caller, path: str, body: dict[str, Any], where: str
) -> None:
    response = await caller.post(path, body)
    assert response.json()["error"]["message"] == f"{where}token ids of this model are 0 to 399"


async def test_a_missing_prompt_is_required(caller: Caller) -> None:
    response = await caller.post("/generate", {})
    assert response.error["code"] == "missing_required_parameter"
    assert response.error["param"] == "prompt"


@pytest.mark.parametrize("streamed", [False, True])
async def test_what_exceeds_the_context_is_refused_with_its_numbers(caller: Caller, streamed: bool) -> None:
    response = await caller.post("/generate", {"prompt": [5] * 200, "max_tokens": 57, "stream": streamed})
    assert response.status == 400
    assert (response.error["code"], response.error["param"]) == ("context_length_exceeded", "max_tokens")
    assert all(number in response.error["message"] for number in ("200", "57", "257", "256", "56"))

    response = await caller.post("/generate", {"prompt": [5] * 256, "stream": streamed})
    assert (response.error["code"], response.error["param"]) == ("context_length_exceeded", "prompt")

    assert (await caller.post("/generate", {"prompt": [5] * 200, "max_tokens": 56})).status == 200


@pytest.mark.parametrize("path", ["/generate", CHAT])
async def test_an_unknown_model_is_a_404_that_lists_the_known_ones(caller: Caller, path: str) -> None:
    for name in ("nope", "no such name\n", "../etc"):
        response = await caller.post(path, {"model": name, "prompt": "x", "messages": HI})
        assert response.status == 404
        assert (response.error["code"], response.error["param"]) == ("model_not_found", "model")
        assert "org/demo" in response.error["message"]


async def test_the_model_may_be_left_out_only_where_there_is_one(caller: Caller, fleet: ScriptedFleet) -> None:
    fleet.cards["second"] = dataclasses.replace(CARD, name="second", digest="")
    response = await caller.post("/generate", {"prompt": "x"})
    assert (response.status, response.error["param"]) == (400, "model")
    assert "org/demo, second" in response.error["message"]
    fleet.cards.clear()
    assert (await caller.post("/generate", {"prompt": "x"})).status == 404


async def test_a_block_length_that_no_worker_has_room_for_is_refused_before_it_is_queued(
    caller: Caller, fleet: ScriptedFleet
) -> None:
    fleet.cards = {CARD.name: dataclasses.replace(CARD, largest_block=8, digest="")}
    nested, both = {"diffusion": {"block_length": 9}}, {"block_length": 9, "diffusion": {"block_length": 9}}
    for body, field in (
        ({"block_length": 9}, "block_length"),
        (nested, "diffusion.block_length"),
        (both, "block_length"),
    ):
        response = await caller.post("/generate", {"prompt": "x", **body})
        assert (response.status, response.error["param"]) == (400, field)
        assert response.error["message"] == f"{field} is 9; this model takes 8 at most"
    assert fleet.commands == []
    assert (await caller.post("/generate", {"prompt": "x", "block_length": 8})).status == 200


async def test_a_block_length_is_refused_where_the_model_has_only_one(caller: Caller, fleet: ScriptedFleet) -> None:
    fleet.cards = {CARD.name: dataclasses.replace(CARD, fixed_block_length=True, digest="")}
    response = await caller.post("/generate", {"prompt": "x", "block_length": 8})
    assert response.error["param"] == "block_length"
    response = await caller.post("/generate", {"prompt": "x", "diffusion": {"block_length": 8}})
    assert response.error["param"] == "diffusion.block_length"
    assert (await caller.post("/generate", {"prompt": "x", "block_length": 4})).status == 200


async def test_an_unusable_card_is_reported_and_hides_no_other(caller: Caller, fleet: ScriptedFleet) -> None:
    fleet.cards["bad"] = dataclasses.replace(CARD, name="bad", decoding={"strategy": "later"}, digest="")
    response = await caller.post("/generate", {"prompt": "x", "model": "bad"})
    assert (response.status, response.error["code"]) == (500, "invalid_model")
    assert (await caller.post("/generate", {"prompt": "x", "model": "org/demo"})).status == 200


@pytest.mark.parametrize("body", [b"", b"{", b"nonsense", b'{"prompt": "\\ud800"}', b'{"prompt": NaN}', b"\xff"])
async def test_broken_json_is_a_400(caller: Caller, body: bytes) -> None:
    response = await caller.post("/generate", body)
    assert (response.status, response.error["code"]) == (400, "invalid_json")


@pytest.mark.parametrize("body", [b"[]", b"null", b"5", b'"x"'])
async def test_json_that_is_no_object_is_a_400(caller: Caller, body: bytes) -> None:
    response = await caller.post("/generate", body)
    assert (response.status, response.error["code"]) == (400, "invalid_value")


@pytest.mark.parametrize("headers", [{"content-type": "text/plain"}, {"content-encoding": "gzip"}])
async def test_bodies_that_are_not_plain_json_are_a_415(caller: Caller, headers: dict[str, str]) -> None:
    response = await caller.post("/generate", {"prompt": "x"}, headers)
    assert (response.status, response.error["code"]) == (415, "unsupported_media_type")


async def test_a_json_charset_or_no_content_type_is_fine(caller: Caller) -> None:
    for headers in ({"content-type": "application/json; charset=utf-8"}, {}):
        assert (await caller.call("POST", "/generate", b'{"prompt": "x"}', headers)).status == 200


async def test_a_long_body_is_a_413_by_its_announcement_and_by_its_bytes(caller: Caller) -> None:
    five_mb = b'{"prompt": "' + b"x" * 5_000_000 + b'"}'
    response = await caller.post("/generate", five_mb, {"content-length": str(len(five_mb))})
    assert (response.status, response.error["code"]) == (413, "body_too_large")

    pieces = [five_mb[start : start + 65536] for start in range(0, len(five_mb), 65536)]
    response = await caller.call("POST", "/generate", pieces, {"content-type": "application/json"})
    assert (response.status, response.error["code"]) == (413, "body_too_large")


async def test_unknown_paths_and_methods_have_the_same_shape(caller: Caller) -> None:
    response = await caller.get("/nope")
    assert (response.status, response.error["code"]) == (404, "not_found")
    assert "'/nope'" in response.error["message"]
    response = await caller.get("/generate")
    assert (response.status, response.error["code"]) == (405, "method_not_allowed")
    assert response.headers["allow"] == "POST"
    assert "GET" in response.error["message"] and "POST" in response.error["message"]


async def test_head_is_get_without_its_body(caller: Caller) -> None:
    for path in ("/v1/models", "/version", "/nope", "/generate"):
        whole = await caller.get(path)
        head = await caller.call("HEAD", path, b"", {})
        assert (head.status, head.body) == (whole.status, b"")
        assert head.headers["content-length"] == whole.headers["content-length"]
    metrics = (await caller.get("/metrics")).body.decode()
    assert 'diffleet_http_requests_total{method="HEAD",route="/version",status="200"} 1.0' in metrics


@pytest.mark.parametrize("path", ["//generate", "/generate/", "/generate//", "//generate//"])
async def test_slashes_too_many_are_passed_over(caller: Caller, path: str) -> None:
    assert (await caller.post(path, {"prompt": "x"})).status == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"use_beam_search": True},
        {"return_token_ids": True},
        {"continue_final_message": True},
        {"chat_template": "{{ 1 }}"},
        {"bad_words": ["x"]},
    ],
)
async def test_an_effect_that_nobody_delivers_is_refused_and_its_absence_is_not(
    caller: Caller, fields: dict[str, Any]
) -> None:
    (name,) = fields
    response = await caller.post(CHAT, {"messages": HI} | fields)
    assert (response.status, response.error["param"]) == (400, name)
    for nothing in [None, *([False] if fields[name] is True else [])]:
        assert (await caller.post(CHAT, {"messages": HI, name: nothing})).status == 200


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_full_queue_is_a_503_with_a_time_to_retry(caller: Caller, fleet: ScriptedFleet, streamed: bool) -> None:
    for seconds, told in ((7, "7"), (0, "1"), (10_000, "120")):
        fleet.script = steps(QueueFull(seconds))
        response = await caller.post("/generate", {"prompt": "x", "stream": streamed})
        assert (response.status, response.error["code"]) == (503, "server_is_overloaded")
        assert response.headers["retry-after"] == told
    assert fleet.aborts == []


async def test_a_caller_with_too_many_requests_is_told_so(caller: Caller, fleet: ScriptedFleet) -> None:
    fleet.script = steps(TenantFull(7))
    response = await caller.post("/generate", {"prompt": "x"})
    assert (response.status, response.error["code"]) == (429, "rate_limit_exceeded")
    assert response.headers["retry-after"] == "7"


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_dead_redis_is_a_503(caller: Caller, fleet: ScriptedFleet, streamed: bool) -> None:
    fleet.down = FleetUnavailable("connection refused to 10.0.0.5")
    for path in ("/generate", CHAT, "/v1/models"):
        call = caller.get(path) if path == "/v1/models" else caller.post(path, {"prompt": "x", "messages": HI})
        response = await call
        assert response.status == 503
        assert "retry-after" in response.headers
        assert "10.0.0.5" not in response.error["message"]


async def test_redis_dying_in_mid_stream_is_an_error_frame_and_done(caller: Caller, fleet: ScriptedFleet) -> None:
    fleet.script = steps(Queued, Delta("r", 2, 1, 0, 0, [75], "h", 1), FleetUnavailable("gone"))
    for path in ("/generate", CHAT):
        response = await caller.post(path, {"prompt": "x", "messages": HI, "stream": True})
        assert response.status == 200
        assert response.events[-1]["error"]["code"] == "server_is_overloaded"
    assert [request_id for request_id, _ in fleet.aborts] == [command.id for command in fleet.commands]


async def test_events_that_just_end_are_an_error(caller: Caller, fleet: ScriptedFleet) -> None:
    fleet.script = steps(Queued)
    response = await caller.post("/generate", {"prompt": "x"})
    assert (response.status, response.error["code"]) == (500, "stream_broken")
    fleet.script = steps(Queued, Delta("r", 2, 1, 0, 0, [75], "h", 1))
    response = await caller.post("/generate", {"prompt": "x", "stream": True})
    assert response.events[-1]["error"]["code"] == "stream_broken"


async def test_an_unforeseen_exception_is_a_500_without_its_text(caller: Caller, fleet: ScriptedFleet) -> None:
    fleet.script = steps(RuntimeError("secret prompt"))
    response = await caller.post("/generate", {"prompt": "x"})
    assert (response.status, response.error["code"]) == (500, "internal_error")
    assert b"secret" not in response.body
    fleet.script = steps(Queued, Delta("r", 2, 1, 0, 0, [75], "h", 1), RuntimeError("secret prompt"))
    response = await caller.post("/generate", {"prompt": "x", "stream": True})
    assert response.events[-1]["error"]["code"] == "internal_error"
    assert b"secret" not in response.body


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_request_that_takes_too_long_is_a_504_and_is_aborted(streamed: bool) -> None:
    fleet = ScriptedFleet(steps(Queued, 5.0))
    async with running(fleet, request_timeout_s=0.05, timeout_grace_s=0) as caller:
        response = await caller.post("/generate", {"prompt": "x", "stream": streamed})
    assert (response.status, response.error["code"]) == (504, "timeout")
    assert fleet.aborts == [(fleet.commands[0].id, "timeout")]
    assert fleet.closed == 1


async def test_a_template_that_refuses_is_a_400(caller: Caller, fleet: ScriptedFleet) -> None:

    tokenizer = Tokenizer.from_files(byte_level_files("{{ raise_exception('no system role') }}"))

    class Refusing(ScriptedFleet):
        async def tokenizer(self, card: object) -> Tokenizer:
            return tokenizer

    async with running(Refusing()) as refusing:
        response = await refusing.post(CHAT, {"messages": HI})
    assert (response.status, response.error["param"]) == (400, "messages")
    assert "no system role" in response.error["message"]


async def test_the_command_of_a_valid_request_is_a_command(caller: Caller, fleet: ScriptedFleet) -> None:
    await caller.post("/generate", {"prompt": "x", "max_tokens": 255, "seed": 2**63 - 1, "temperature": 5})
    assert Generate.model_validate(fleet.commands[0].model_dump()) == fleet.commands[0]
