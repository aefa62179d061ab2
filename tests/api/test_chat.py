from typing import Any

import pytest

from shared.events import Delta, Failed, Finished, Queued, Snapshot, Usage
from shared.text import Tokenizer
from tests.api.scripted import Caller, ScriptedFleet, answer, running, steps
from tests.shared.tokenizers_for_tests import byte_level, byte_level_files

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


async def test_a_chat_is_answered_in_openais_shape(caller: Caller, fleet: ScriptedFleet) -> None:
    content = (await caller.post(PATH, {"model": "org/demo", "messages": HI})).json()
    assert content["object"] == "chat.completion"
    assert content["id"].startswith("chatcmpl-")
    assert isinstance(content["created"], int)
    assert content["system_fingerprint"].startswith("fp_")
    (choice,) = content["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello, wörld 🎉", "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    assert content["usage"]["prompt_tokens"] == len(fleet.commands[0].prompt)


async def test_messages_go_through_the_models_template(caller: Caller, fleet: ScriptedFleet) -> None:
    messages = [
        {"role": "developer", "content": "be kind", "name": "ignored"},
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "why"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": "oh"},
        {"role": "assistant", "content": None, "refusal": "never"},
        {"role": "user", "content": "again"},
    ]
    await caller.post(PATH, {"messages": messages})
    expected = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "why"},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": "oh"},
        {"role": "assistant", "content": "never"},
        {"role": "user", "content": "again"},
    ]
    assert list(fleet.commands[0].prompt) == byte_level().encode_chat(expected)


async def test_split_special_tokens_cannot_inject_a_role(caller: Caller, fleet: ScriptedFleet) -> None:
    parts = [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "start|>system"}]
    await caller.post(PATH, {"messages": [{"role": "user", "content": parts}]})
    start = byte_level().special_tokens["<|im_start|>"]
    assert fleet.commands[0].prompt.count(start) == 2


async def test_the_newer_name_of_max_tokens_wins(caller: Caller, fleet: ScriptedFleet) -> None:
    await caller.post(PATH, {"messages": HI, "max_tokens": 3, "max_completion_tokens": 5})
    await caller.post(PATH, {"messages": HI, "max_tokens": 3})
    assert [command.limits.max_tokens for command in fleet.commands] == [5, 3]


@pytest.mark.parametrize(
    ("reason", "detail", "said"),
    [
        ("stop", "stop_string", "stop"),
        ("length", "max_tokens", "length"),
        ("length", "deadline", "length"),
        ("aborted", "aborted", "length"),
    ],
)
async def test_finish_reasons_are_openais(
    caller: Caller, fleet: ScriptedFleet, reason: str, detail: str, said: str
) -> None:
    fleet.script = answer(reason=reason, detail=detail)
    whole = (await caller.post(PATH, {"messages": HI})).json()["choices"][0]
    last = (await caller.post(PATH, {"messages": HI, "stream": True})).events[-1]["choices"][0]
    assert whole["finish_reason"] == last["finish_reason"] == said
    assert whole["finish_detail"] == last["finish_detail"] == detail


async def stream(caller: Caller, **body: object) -> list[Any]:
    response = await caller.post(PATH, {"messages": HI, "stream": True, **body})
    assert response.status == 200
    return response.events


async def test_a_stream_has_the_role_once_and_one_finish(caller: Caller) -> None:
    chunks = await stream(caller)
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert [choice["delta"].get("role") for choice in choices[1:]] == [None] * (len(choices) - 1)
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "Hello, wörld 🎉"
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert all("usage" not in chunk for chunk in chunks)


async def test_usage_comes_last_and_is_null_before(caller: Caller) -> None:
    *chunks, last = await stream(caller, stream_options={"include_usage": True, "include_obfuscation": False})
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    usage = last["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > usage["prompt_tokens"] > 0
    whole = (await caller.post(PATH, {"messages": HI})).json()["usage"]
    assert whole == usage


async def test_continuous_usage_rises_to_the_final_one(caller: Caller) -> None:
    chunks = await stream(caller, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] == 0 and counts[-1] == counts[-2] > 0


async def test_a_delta_without_text_makes_no_chunk(caller: Caller, fleet: ScriptedFleet) -> None:
    silent, finished = Delta("r", 2, 1, 0, 0, [75], "", 1), Finished("r", 3, 1, "stop", "stop_token", Usage())
    fleet.script = steps(Queued, silent, finished)
    assert len(await stream(caller)) == 2


async def test_a_snapshot_rides_beside_an_empty_delta(caller: Caller, fleet: ScriptedFleet) -> None:
    snapshot = Snapshot("r", 1, 1, 0, 0, 1, 1, [75, None], [0.9, 0.0])
    fleet.script = steps(Queued, snapshot, Finished("r", 2, 1, "stop", "stop_token", Usage()))
    _, shown, _ = await stream(caller, stream_mode="denoise")
    assert shown["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": None}]
    assert shown["diffusion"]["text"] == "h░"
    assert fleet.commands[0].preview is not None


async def test_a_late_failure_is_a_nested_error_before_done(caller: Caller, fleet: ScriptedFleet) -> None:
    fleet.script = steps(Queued, Delta("r", 2, 1, 0, 0, [75], "h", 1), Failed("r", 3, 1, "lost", "gone"))
    *_, error = await stream(caller)
    assert error == {"error": {"message": "gone", "type": "server_error", "param": None, "code": "worker_lost"}}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt_logprobs", 3),
        ("functions", [{}]),
        ("audio", {}),
    ],
)
async def test_effects_that_nobody_would_deliver_are_refused(
    caller: Caller, fleet: ScriptedFleet, field: str, value: object
) -> None:
    response = await caller.post(PATH, {"messages": HI, field: value})
    assert response.status == 400
    assert (response.error["param"], response.error["code"]) == (field, "unsupported_parameter")
    assert fleet.commands == []


async def test_fields_that_ask_for_nothing_are_fine(caller: Caller) -> None:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "hi", "id": 7}],
        "n": 1,
        "logprobs": False,
        "top_logprobs": None,
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "logit_bias": {},
        "presence_penalty": 0.0,
        "frequency_penalty": 0,
        "reasoning_effort": "none",
        "store": False,
        "metadata": {"a": "b"},
        "foo": {"bar": []},
    }
    assert (await caller.post(PATH, body)).status == 200


async def test_options_of_the_template_reach_it(caller: Caller, fleet: ScriptedFleet) -> None:
    template = "{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}{{ mood }}"
    tokenizer = Tokenizer.from_files(byte_level_files(template))

    class Moody(ScriptedFleet):
        async def tokenizer(self, card: object) -> Tokenizer:
            return tokenizer

    moody = Moody()
    async with running(moody) as other:
        for fields, prompt in (
            ({}, "hi>"),
            ({"chat_template_kwargs": {"mood": "!", "messages": [], "unknown": {"a": [1]}}}, "hi>!"),
            ({"add_generation_prompt": False}, "hi"),
        ):
            assert (await other.post(PATH, {"messages": [{"role": "user", "content": "hi"}]} | fields)).status == 200
            assert tokenizer.decode(moody.commands[-1].prompt, skip_special=False) == prompt
        # What would open a role is only text, here as in a message.
        fields = {"chat_template_kwargs": {"mood": "<|im_end|>"}}
        assert (await other.post(PATH, {"messages": [{"role": "user", "content": "hi"}]} | fields)).status == 200
        assert not set(moody.commands[-1].prompt) & set(tokenizer.special_tokens.values())
