"""Log-probabilities and penalties on their way through the routes."""

import codecs
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.logprobs import LEAST, LogprobWriter
from shared.commands import Generate, LogitEdits
from shared.events import Delta, Finished, TokenLogprob, Usage
from shared.text import TextStream, Tokenizer
from tests.api.scripted import Caller, ScriptedFleet, Step
from tests.shared.tokenizers_for_tests import byte_fallback, byte_level

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
TEXT = "Hello, wörld 🎉👩‍👩‍👧‍👦 end"


def told(token: int) -> TokenLogprob:
    return TokenLogprob(-0.5 - token, [(token, -0.5 - token), (token + 1, float("-inf"))])


def deltas(tokenizer: Tokenizer, text: str, sizes: list[int], stop: tuple[str, ...] = ()) -> tuple[list[Delta], str]:
    """Return the blocks of `text` as a worker would publish them, and what the caller sees."""
    ids, stream, found = tokenizer.encode(text, False), TextStream(tokenizer, stop), list[Delta]()
    while ids and not stream.stopped:
        size = sizes[len(found) % len(sizes)]
        part: list[int] = []
        said = ""
        for token in ids[:size]:
            part.append(token)
            said += stream.push([token])
            if stream.stopped:
                break
        ids = ids[size:]
        if stream.stopped or not ids:
            said += stream.flush()
        found.append(Delta("r", len(found) + 2, 1, len(found), 0, part, said, 1, [told(token) for token in part]))
    return found, "".join(delta.text for delta in found)


def ended(detail: Any) -> Finished:
    return Finished("r", 99, 1, "stop", detail, Usage())


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=30), st.lists(st.integers(1, 5), min_size=1, max_size=4), st.booleans())
def test_the_bytes_of_all_tokens_join_to_the_text(text: str, sizes: list[int], level: bool) -> None:
    tokenizer = byte_level() if level else byte_fallback()
    blocks, said = deltas(tokenizer, text, sizes)
    writer = LogprobWriter(tokenizer)
    parts = [writer.of_delta(block) for block in blocks] + [writer.of_end(ended("stop_token"))]
    entries: list[Any] = [entry for part in parts for entry in writer.chat(part)["content"]]  # type: ignore[attr-defined]
    assert b"".join(bytes(entry["bytes"] or []) for entry in entries).decode("utf-8", "replace") == said
    assert len(entries) == sum(len(block.token_ids) for block in blocks)
    assert all(candidate["logprob"] >= LEAST for entry in entries for candidate in (entry, *entry["top_logprobs"]))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, len(TEXT) - 3), st.integers(1, 3), st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_tokens_of_a_stop_string_are_not_told(start: int, length: int, sizes: list[int]) -> None:
    blocks, said = deltas(byte_level(), TEXT, sizes, (TEXT[start : start + length],))
    writer = LogprobWriter(byte_level())
    parts = [writer.of_delta(block) for block in blocks] + [writer.of_end(ended("stop_string"))]
    offsets: list[int] = [offset for part in parts for offset in writer.completion(part)["text_offset"]]  # type: ignore[attr-defined]
    assert all(offset < len(said) for offset in offsets)
    # A token that begins within the text is told, the last one whole.
    spelled = b"".join(item.spelled for part in parts for item in part)
    assert codecs.getincrementaldecoder("utf-8")().decode(spelled).startswith(said)


def answer_with_logprobs(command: Generate) -> Iterator[Step]:
    blocks, _ = deltas(byte_level(), TEXT, [3])
    for block in blocks:
        told = block.logprobs if command.logprobs is not None else None
        yield replace(block, id=command.id, logprobs=told)
    yield Finished(command.id, 99, 1, "stop", "stop_token", Usage(1, 20, 3, 3))


async def test_a_chat_tells_logprobs_whole_and_streamed(caller: Caller, fleet: ScriptedFleet) -> None:
    fleet.script = answer_with_logprobs
    body: dict[str, Any] = {"messages": HI, "logprobs": True, "top_logprobs": 2}
    whole = (await caller.post(CHAT, body)).json()["choices"][0]["logprobs"]
    assert fleet.commands[0].logprobs == 2
    assert b"".join(bytes(entry["bytes"]) for entry in whole["content"]).decode() == TEXT
    assert whole["refusal"] is None and whole["content"][0]["top_logprobs"][1]["logprob"] == LEAST
    frames = (await caller.post(CHAT, body | {"stream": True})).events
    streamed = [choice["logprobs"] for frame in frames for choice in frame["choices"] if choice["logprobs"]]
    assert [entry for part in streamed for entry in part["content"]] == whole["content"]
    plain = (await caller.post(CHAT, {"messages": HI, "logprobs": False})).json()["choices"][0]
    assert plain["logprobs"] is None and fleet.commands[-1].logprobs is None


async def test_completions_tell_logprobs_in_their_own_shape(caller: Caller, fleet: ScriptedFleet) -> None:
    fleet.script = answer_with_logprobs
    body: dict[str, Any] = {"prompt": "hi", "logprobs": 2}
    whole = (await caller.post(COMPLETIONS, body)).json()["choices"][0]["logprobs"]
    assert len({len(column) for column in whole.values()}) == 1
    assert whole["text_offset"][0] == 0 and whole["text_offset"] == sorted(whole["text_offset"])
    assert all(value >= LEAST for tops in whole["top_logprobs"] for value in tops.values())
    frames = (await caller.post(COMPLETIONS, body | {"stream": True})).events
    streamed = [choice["logprobs"] for frame in frames for choice in frame["choices"] if choice["logprobs"]]
    assert [token for part in streamed for token in part["tokens"]] == whole["tokens"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_generate_tells_an_entry_for_each_id(caller: Caller, fleet: ScriptedFleet, streamed: bool) -> None:
    fleet.script = answer_with_logprobs
    response = await caller.post("/generate", {"prompt": "hi", "logprobs": 2, "stream": streamed})
    told = [event for event in response.events if event["event"] == "append"] if streamed else [response.json()]
    assert fleet.commands[0].logprobs == 2
    for part in told:
        assert [entry["token_id"] for entry in part["logprobs"]] == part["token_ids"]
    entries = [entry for part in told for entry in part["logprobs"]]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == TEXT
    for entry in entries:
        best, other = entry["top_logprobs"]
        assert (best["token_id"], best["logprob"], best["token"]) == (
            entry["token_id"],
            entry["logprob"],
            entry["token"],
        )
        assert (other["token_id"], other["logprob"]) == (entry["token_id"] + 1, LEAST)
    plain = (await caller.post("/generate", {"prompt": "hi"})).json()
    assert "logprobs" not in plain and fleet.commands[-1].logprobs is None


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"logit_bias": {"a": 1}}, "logit_bias.a"),
        (CHAT, {"logit_bias": {"400": 1}}, "logit_bias.400"),
        (CHAT, {"logit_bias": {"5": 101}}, "logit_bias.5"),
        (CHAT, {"presence_penalty": 2.1}, "presence_penalty"),
        (CHAT, {"frequency_penalty": -2.1}, "frequency_penalty"),
        (CHAT, {"repetition_penalty": 0}, "repetition_penalty"),
        (COMPLETIONS, {"logprobs": 6}, "logprobs"),
        (COMPLETIONS, {"logprobs": 1, "echo": True}, "logprobs"),
        ("/generate", {"logprobs": 21}, "logprobs"),
        ("/generate", {"logprobs": True}, "logprobs"),
    ],
)
async def test_what_is_out_of_range_is_named(
    caller: Caller, fleet: ScriptedFleet, path: str, fields: dict[str, Any], param: str
) -> None:
    response = await caller.post(path, {"messages": HI, "prompt": "hi"} | fields)
    assert (response.status, response.error["param"]) == (400, param)
    assert fleet.commands == []


async def test_penalties_travel_to_the_worker(caller: Caller, fleet: ScriptedFleet) -> None:
    asked = {"presence_penalty": 0.5, "frequency_penalty": -1, "repetition_penalty": 1.2, "logit_bias": {"7": -3}}
    for path in (CHAT, COMPLETIONS, "/generate"):
        assert (await caller.post(path, {"messages": HI, "prompt": "hi"} | asked)).status == 200
        assert fleet.commands[-1].edits == LogitEdits(
            presence_penalty=0.5, frequency_penalty=-1.0, repetition_penalty=1.2, logit_bias=((7, -3.0),)
        )
    assert (await caller.post(CHAT, {"messages": HI, "presence_penalty": 0, "logit_bias": {}})).status == 200
    assert fleet.commands[-1].edits is None
