"""C1 to C21: the generating endpoints, as OpenAI's client and a plain HTTP client see them."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from openai import LengthFinishReasonError, OpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from tests.conformance.conftest import IDLE
from tests.conformance.fleet import MODEL

ASK: Any = [{"role": "user", "content": "What is 12 + 30?"}]
STORY: Any = [{"role": "user", "content": "Tell me a story."}]
CHAT = "/v1/chat/completions"


def stream(client: OpenAI, **options: Any) -> list[ChatCompletionChunk]:
    given: dict[str, Any] = {"model": MODEL, "messages": STORY, "max_tokens": 60} | options
    return list(client.chat.completions.create(stream=True, **given))


def text_of(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices if choice.index == index)


def frames_of(response: httpx.Response) -> list[Any]:
    data = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
    assert data[-1] == "[DONE]" and "[DONE]" not in data[:-1]
    return [json.loads(line) for line in data[:-1]]


def test_c01_models_are_listed_and_an_unknown_one_is_a_404(client: OpenAI) -> None:
    assert {MODEL, IDLE} <= {model.id for model in client.models.list()}
    assert client.models.retrieve(MODEL).object == "model"
    for name in ("nope", "org/nope"):
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve(name)
        assert caught.value.code == "model_not_found"


def test_c02_a_chat_parses_strictly_and_every_answer_has_its_own_id(client: OpenAI, http: httpx.Client) -> None:
    raw = http.post(CHAT, json={"model": MODEL, "messages": ASK}).json()
    answer = ChatCompletion.model_validate(raw)
    assert type(raw["created"]) is int
    assert answer.choices[0].message.content and answer.usage
    with ThreadPoolExecutor(16) as threads:
        calls = [
            threads.submit(client.chat.completions.create, model=MODEL, messages=ASK, max_tokens=1) for _ in range(200)
        ]
        ids = {call.result().id for call in calls}
    assert len(ids) == 200


def test_c03_a_stream_has_the_role_first_one_finish_and_done_last(http: httpx.Client) -> None:
    events = frames_of(http.post(CHAT, json={"model": MODEL, "messages": STORY, "stream": True}))
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    choices = [choice for event in events for choice in event["choices"]]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in choice["delta"] for choice in choices[1:])
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]
    assert choices[-1]["finish_reason"] and all(choice["logprobs"] is None for choice in choices)
    for event in events:
        ChatCompletionChunk.model_validate(event)


def test_c04_the_deltas_make_the_text_of_the_whole_answer(client: OpenAI) -> None:
    for seed in range(5):
        options: Any = {"model": MODEL, "messages": STORY, "max_tokens": 80, "seed": seed, "temperature": 1.0}
        whole = client.chat.completions.create(**options).choices[0].message.content
        assert text_of(stream(client, **options)) == whole


def test_c05_usage_comes_once_at_the_end_and_equals_that_of_the_whole_answer(client: OpenAI) -> None:
    chunks = stream(client, seed=1, stream_options={"include_usage": True})
    assert all(chunk.usage is None for chunk in chunks[:-1])
    last = chunks[-1]
    assert last.choices == [] and last.usage
    assert last.usage.prompt_tokens + last.usage.completion_tokens == last.usage.total_tokens
    whole = client.chat.completions.create(model=MODEL, messages=STORY, max_tokens=60, seed=1)
    assert whole.usage == last.usage


def test_c06_continuous_usage_rises_to_the_final_one(client: OpenAI) -> None:
    chunks = stream(client, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert len(counts) == len(chunks)
    assert counts == sorted(counts) and counts[0] == 0 < counts[-1] == counts[-2]


def test_c07_three_choices_come_whole_and_streamed_and_their_usage_adds_up(client: OpenAI) -> None:
    options: Any = {"model": MODEL, "messages": STORY, "n": 3, "seed": 3, "temperature": 1.0, "max_tokens": 300}
    whole = client.chat.completions.create(**options)
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2] and len(set(texts)) == 3
    chunks = stream(client, stream_options={"include_usage": True}, **options)
    assert chunks[0].choices[0].index == 0
    assert [text_of(chunks, index) for index in range(3)] == texts
    finished = sorted(choice.index for chunk in chunks for choice in chunk.choices if choice.finish_reason)
    assert finished == [0, 1, 2]
    assert chunks[-1].usage == whole.usage
    alone = client.chat.completions.create(**options | {"n": 1})
    assert alone.choices[0].message.content == texts[0]
    assert whole.usage and alone.usage
    assert whole.usage.prompt_tokens == alone.usage.prompt_tokens
    assert whole.usage.completion_tokens > alone.usage.completion_tokens
    with client.chat.completions.stream(**options) as helper:
        assert [choice.message.content for choice in helper.get_final_completion().choices] == texts


def test_c08_completions_take_every_kind_of_prompt(client: OpenAI, http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"model": MODEL, "prompt": "Once upon a time"}).json()["tokens"]
    options: Any = {"model": MODEL, "seed": 1, "max_tokens": 12}
    alone = client.completions.create(prompt="Once upon a time", **options)
    assert alone.object == "text_completion" and alone.choices[0].logprobs is None
    assert client.completions.create(prompt=ids, **options).choices[0].text == alone.choices[0].text
    both = client.completions.create(prompt=["Once upon a time", "1 + 1"], n=2, **options)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.choices[0].text == alone.choices[0].text
    lists = client.completions.create(prompt=[ids, [5]], n=2, **options)
    assert lists.choices[0].text == alone.choices[0].text
    echoed = client.completions.create(prompt=["Once upon a time", "1 + 1"], echo=True, n=2, **options)
    assert [choice.text for choice in echoed.choices] == [
        prompt + choice.text
        for prompt, choice in zip(["Once upon a time"] * 2 + ["1 + 1"] * 2, both.choices, strict=True)
    ]
    texts = ["", "", "", ""]
    chunks: list[Completion] = list(
        client.completions.create(prompt=["Once upon a time", "1 + 1"], echo=True, n=2, stream=True, **options)
    )
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in echoed.choices]
    for wrong in ({"prompt": []}, {"prompt": [[]]}, {"prompt": ["a", 5]}, {"best_of": 2}, {"prompt": ["x"] * 65}):
        response = http.post("/v1/completions", json={"model": MODEL, "prompt": "x"} | wrong)
        assert response.status_code == 400 and response.json()["error"]["param"].startswith(next(iter(wrong)))


def test_c08_a_suffix_is_filled_up_to(client: OpenAI) -> None:
    options: Any = {"model": MODEL, "prompt": "Once upon a time a rabbit", "max_tokens": 12, "seed": 1}
    answer = client.completions.create(suffix=" and they all went home.", **options)
    (choice,) = answer.choices
    assert choice.text and choice.finish_reason in ("stop", "length")
    assert answer.usage and answer.usage.completion_tokens <= 12
    streamed = list(client.completions.create(suffix=" and they all went home.", stream=True, **options))
    assert "".join(chunk.choices[0].text for chunk in streamed) == choice.text
    echoed = client.completions.create(suffix=" and they all went home.", echo=True, **options).choices[0].text
    assert echoed == options["prompt"] + choice.text
    assert client.completions.create(suffix=" They swam in the sea.", **options).choices[0].text != choice.text


def test_c08_completions_have_logprobs(client: OpenAI) -> None:
    options: Any = {"model": MODEL, "prompt": "Once upon a time", "seed": 1, "max_tokens": 40, "logprobs": 2}
    (choice,) = client.completions.create(**options).choices
    told = choice.logprobs
    assert told and told.tokens and told.token_logprobs and told.top_logprobs and told.text_offset
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == len(told.text_offset)
    for offset, token in zip(told.text_offset, told.tokens, strict=True):
        assert token.startswith("bytes:") or choice.text[offset:].startswith(token)
    assert all(-9999.0 <= value <= 0.0 for value in told.token_logprobs)
    assert all(len(tops) == 2 for tops in told.top_logprobs)
    streamed = list(client.completions.create(stream=True, **options))
    parts = [chunk.choices[0].logprobs for chunk in streamed if chunk.choices[0].logprobs]
    assert [token for part in parts for token in part.tokens or []] == told.tokens


def test_c09_a_stop_string_ends_the_text_wherever_it_lies(client: OpenAI) -> None:
    options: Any = {"model": MODEL, "messages": STORY, "seed": 4, "temperature": 0.0, "max_tokens": 100}
    whole = client.chat.completions.create(**options).choices[0].message.content or ""
    assert len(whole) > 60
    # Three letters from anywhere: most of them lie over tokens, some over blocks.
    for start in range(5, 55, 7):
        stop = whole[start : start + 3]
        cut = client.chat.completions.create(stop=[stop, "\x00", "\x01", "\x02"], **options)
        assert cut.choices[0].message.content == whole[: whole.index(stop)]
        assert cut.choices[0].finish_reason == "stop"
        assert text_of(stream(client, stop=stop, **options)) == whole[: whole.index(stop)]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(stop=["a", "b", "c", "d", "e"], **options)
    assert caught.value.param == "stop"


def test_c10_the_bound_of_the_output_is_exact(client: OpenAI, http: httpx.Client) -> None:
    for bound in (1, 2, 15, 16, 17, 33):
        answer = client.chat.completions.create(
            model=MODEL, messages=STORY, max_completion_tokens=bound, max_tokens=500, extra_body={"ignore_eos": True}
        )
        assert answer.usage and answer.usage.completion_tokens == bound
        assert answer.choices[0].finish_reason == "length"
    assert client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=64).choices[0].finish_reason == "stop"
    for field in ("max_tokens", "max_completion_tokens"):
        for value in (0, -1):
            error = http.post(CHAT, json={"model": MODEL, "messages": ASK, field: value}).json()["error"]
            assert error["param"] == field


@pytest.mark.parametrize("streamed", [False, True])
def test_c11_what_exceeds_the_context_is_refused_before_any_body(http: httpx.Client, streamed: bool) -> None:
    long: Any = [{"role": "user", "content": "word " * 3000}]
    for body in ({"messages": long}, {"messages": ASK, "max_tokens": 5000}):
        response = http.post(CHAT, json={"model": MODEL, "stream": streamed} | body)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_c12_every_error_has_openais_shape(http: httpx.Client) -> None:
    ask = {"model": MODEL, "messages": ASK}
    json_type = {"content-type": "application/json"}
    cases = [
        (http.post(CHAT, content=b"{", headers=json_type), 400),
        (http.post(CHAT, json=ask | {"temperature": "hot"}), 400),
        (http.post(CHAT, json=[]), 400),
        (http.post(CHAT, json=ask | {"model": "nope"}), 404),
        (http.get("/v1/nope"), 404),
        (http.get("/v1/files/nope"), 404),
        (http.get("/v1/batches/nope"), 404),
        (http.get("/v1/responses/nope"), 404),
        (http.get(CHAT), 405),
        (http.post(CHAT, content=b"x" * 1_100_000, headers=json_type), 413),
        (http.post(CHAT, content=b"x", headers={"content-type": "text/plain"}), 415),
        (http.post("/v1/files", json={}), 415),
        (http.get("/v1/files", params={"limit": "many"}), 400),
        (http.get("/v1/batches", params={"limit": 0}), 400),
        (http.post("/v1/embeddings", json={"input": []}), 400),
        (http.post("/v1/edit/completions", json={"prompt": "x"}), 404),
    ]
    for response, status in cases:
        assert response.status_code == status, response.text
        body = response.json()
        assert "detail" not in body and set(body["error"]) == {"message", "type", "param", "code"}
        assert body["error"]["message"] and body["error"]["type"] and body["error"]["code"]


def test_c13_unknown_fields_are_ignored_and_unsupported_effects_are_not(http: httpx.Client) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hi", "id": "m1", "foo": [1]}],
        "foo": {"bar": 1},
        "stream": True,
        "stream_options": {"include_usage": True, "include_obfuscation": False, "foo": 1},
        "reasoning_effort": "odd",
        "verbosity": "low",
        "service_tier": "auto",
        "store": False,
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
        "max_tokens": 4,
    }
    assert http.post(CHAT, json=body).status_code == 200
    for field, value in {
        "audio": {"voice": "x"},
        "web_search_options": {},
        "functions": [{"name": "f"}],
        "modalities": ["text", "audio"],
    }.items():
        response = http.post(CHAT, json=body | {field: value})
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)


def test_c14_contents_and_roles_have_their_several_forms(client: OpenAI, http: httpx.Client) -> None:
    def answer(messages: Any) -> str | None:
        options: Any = {"model": MODEL, "seed": 1, "temperature": 0.0, "max_tokens": 24}
        return client.chat.completions.create(messages=messages, **options).choices[0].message.content

    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "12 + 30?"}]
    assert answer([{"role": "user", "content": parts}]) == answer(ASK)
    both = [[{"role": role, "content": "Be brief."}, *ASK] for role in ("system", "developer")]
    assert answer(both[0]) == answer(both[1])
    assert answer([*ASK, {"role": "assistant", "content": None}, *ASK])
    error = http.post(CHAT, json={"model": MODEL, "messages": []}).json()["error"]
    assert error["param"] == "messages"


def test_c14_tool_messages_are_part_of_a_chat(client: OpenAI) -> None:
    call: Any = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 40, "b": 2}'}}
    told: Any = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=told, max_tokens=4)
    assert answer.usage and answer.usage.prompt_tokens > 20
    shorter = client.chat.completions.create(model=MODEL, messages=told[:1], max_tokens=4)
    assert shorter.usage and shorter.usage.prompt_tokens < answer.usage.prompt_tokens


class Person(BaseModel):
    name: str
    age: int


@pytest.mark.timeout(300)
def test_c15_a_schema_is_followed(client: OpenAI) -> None:
    def parse(seed: int) -> Person | None:
        options: Any = {"model": MODEL, "messages": ASK, "temperature": 1.0, "max_tokens": 32}
        answer = client.chat.completions.parse(response_format=Person, seed=seed, **options).choices[0]
        assert answer.finish_reason == "stop"
        return answer.message.parsed

    with ThreadPoolExecutor(16) as threads:
        assert all(threads.map(parse, range(200)))


def test_c15_a_text_that_is_too_short_for_its_schema_ends_by_length(client: OpenAI) -> None:
    options: Any = {"model": MODEL, "messages": ASK, "max_tokens": 3}
    with pytest.raises(LengthFinishReasonError):
        client.chat.completions.parse(response_format=Person, **options)


def test_c15_any_object_a_pattern_a_choice_and_a_grammar(client: OpenAI, http: httpx.Client) -> None:
    options: Any = {"model": MODEL, "messages": ASK, "seed": 1, "temperature": 1.0, "max_tokens": 64}

    def ask(**body: Any) -> str:
        answer = client.chat.completions.create(**options, extra_body=body).choices[0]
        assert answer.finish_reason == "stop" and answer.message.content is not None
        return answer.message.content

    assert isinstance(json.loads(ask(response_format={"type": "json_object"})), dict)
    assert re.fullmatch(r"[A-Z][a-z]{2,5}-\d{3}", ask(guided_regex=r"[A-Z][a-z]{2,5}-\d{3}"))
    assert ask(guided_choice=["maybe", "never"]) in ("maybe", "never")
    assert set(ask(guided_grammar='start: ("ab" | "ba"){3}')) == set("ab")
    assert json.loads(ask(structured_outputs={"json": {"enum": [1, "two"]}})) in (1, "two")
    streamed = client.chat.completions.create(**options, stream=True, response_format={"type": "json_object"})
    texts = [chunk.choices[0].delta.content or "" for chunk in streamed]
    assert "".join(texts) == ask(response_format={"type": "json_object"})
    for path, body in (
        ("/generate", {"prompt": "x", "guided_choice": ["maybe", "never"]}),
        ("/v1/completions", {"prompt": "x", "guided_choice": ["maybe", "never"]}),
    ):
        told = http.post(path, json={"model": MODEL, **body}).json()
        assert (told.get("text") or told["choices"][0]["text"]) in ("maybe", "never")


def test_c15_what_cannot_be_followed_is_refused_by_its_field(http: httpx.Client) -> None:
    def schema(value: object) -> dict[str, Any]:
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}}

    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "nothing"}}}
    where = "response_format.json_schema.schema"
    for body, field in (
        (schema({"type": "objekt"}), where),
        (schema({"$ref": "#/$defs/none"}), where),
        (schema({"type": "string", "pattern": "(a"}), where),
        (schema("x"), where),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_grammar": "start: none"}, "guided_grammar"),
        ({"guided_choice": []}, "guided_choice"),
        ({"structured_outputs": {"gbnf": "x"}}, "structured_outputs.gbnf"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "stop": ["b"]}, "stop"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"tools": [tool]}, "tools[0].function.parameters"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
        ({"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
    ):
        response = http.post(CHAT, json={"model": MODEL, "messages": ASK, **body})
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)


NUMBERS = {"a": {"type": "integer"}, "b": {"type": "integer"}}
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": NUMBERS, "required": ["a", "b"]},
    },
}
SHOUT: Any = {"type": "function", "function": {"name": "shout"}}
USE_A_TOOL: Any = [{"role": "user", "content": "Use the tool to add 12 and 30."}]


def test_c16_a_required_tool_is_called(client: OpenAI) -> None:
    options: Any = {"model": MODEL, "messages": USE_A_TOOL, "tools": [ADD, SHOUT], "max_tokens": 200}
    for seed in range(10):
        sampled = client.chat.completions.create(tool_choice="required", seed=seed, temperature=1.0, **options)
        answer = sampled.choices[0]
        assert answer.message.tool_calls and answer.finish_reason == "tool_calls"
        assert answer.message.content is None
        for call in answer.message.tool_calls:
            assert call.type == "function" and call.id.startswith("call_")
            arguments = json.loads(call.function.arguments)
            if call.function.name == "add":
                assert all(isinstance(arguments[name], int) for name in NUMBERS)
        assert len({call.id for call in answer.message.tool_calls}) == len(answer.message.tool_calls)
    only: Any = {"type": "function", "function": {"name": "shout"}}
    named = client.chat.completions.create(tool_choice=only, parallel_tool_calls=False, **options).choices[0].message
    assert [call.function.name for call in named.tool_calls or [] if call.type == "function"] == ["shout"]
    allowed: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [SHOUT]}}
    chosen = client.chat.completions.create(tool_choice=allowed, **options).choices[0].message.tool_calls
    assert chosen and {call.function.name for call in chosen if call.type == "function"} == {"shout"}


def test_c16_without_a_need_for_a_tool_there_is_text(client: OpenAI) -> None:
    options: Any = {"model": MODEL, "messages": USE_A_TOOL, "tools": [ADD], "seed": 1, "max_tokens": 200}
    silent = client.chat.completions.create(tool_choice="none", **options).choices[0]
    assert silent.message.content and silent.message.tool_calls is None and silent.finish_reason != "tool_calls"
    free = client.chat.completions.create(**options).choices[0].message
    assert free.content or free.tool_calls
    assert not (free.content and "<tool_call>" in free.content)


def test_c16_a_streamed_call_joins_to_the_whole_one(client: OpenAI) -> None:
    options: Any = {"model": MODEL, "messages": USE_A_TOOL, "tools": [ADD, SHOUT], "tool_choice": "required"}
    options |= {"seed": 3, "temperature": 1.0, "max_tokens": 200}
    whole = client.chat.completions.create(**options).choices[0].message.tool_calls
    assert whole
    names: dict[int, list[str]] = {}
    arguments: dict[int, str] = {}
    finish = None
    for chunk in client.chat.completions.create(stream=True, **options):
        choice = chunk.choices[0]
        finish = choice.finish_reason or finish
        for call in choice.delta.tool_calls or []:
            assert call.function is not None
            if call.function.name:
                names.setdefault(call.index, []).append(call.function.name)
                assert call.id and call.type == "function"
            else:
                assert call.id is None
            arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
    assert finish == "tool_calls"
    told = [call.function for call in whole if call.type == "function"]
    assert [names[index] for index in range(len(told))] == [[function.name] for function in told]
    assert [arguments[index] for index in range(len(told))] == [function.arguments for function in told]
    with client.chat.completions.stream(**options) as helper:
        final = helper.get_final_completion().choices[0].message.tool_calls
    assert final and [call.function.arguments for call in final] == [function.arguments for function in told]


def test_c16_a_call_that_is_cut_ends_by_length(client: OpenAI) -> None:
    options: Any = {"model": MODEL, "messages": USE_A_TOOL, "tools": [ADD], "tool_choice": "required"}
    answer = client.chat.completions.create(max_tokens=6, **options).choices[0]
    assert answer.finish_reason == "length"


def test_c17_logprobs_join_to_the_text(client: OpenAI) -> None:
    options: Any = {"model": MODEL, "seed": 1, "logprobs": True, "top_logprobs": 20, "temperature": 0.0}
    for messages in (ASK, STORY):
        choice = client.chat.completions.create(messages=messages, **options).choices[0]
        assert choice.logprobs and choice.logprobs.content
        content = choice.logprobs.content
        assert b"".join(bytes(entry.bytes or []) for entry in content).decode() == choice.message.content
        for entry in content:
            assert len(entry.top_logprobs) == 20 and entry.token == entry.top_logprobs[0].token
            assert all(-9999.0 <= told.logprob <= 0.0 for told in (entry, *entry.top_logprobs))
        streamed = list(client.chat.completions.create(messages=messages, stream=True, **options))
        parts = [chunk.choices[0].logprobs for chunk in streamed if chunk.choices[0].logprobs]
        assert [entry for part in parts for entry in part.content or []] == content
    stop = (choice.message.content or "")[20:23]
    cut = client.chat.completions.create(messages=STORY, stop=stop, **options).choices[0]
    assert cut.logprobs and cut.logprobs.content
    spelled = b"".join(bytes(entry.bytes or []) for entry in cut.logprobs.content).decode()
    assert cut.message.content and spelled.startswith(cut.message.content)
    assert not spelled.removesuffix(cut.logprobs.content[-1].token).startswith(cut.message.content)
    assert client.chat.completions.create(model=MODEL, messages=ASK, logprobs=False).choices[0].logprobs is None


def test_c17_generate_tells_logprobs_of_the_same_tokens(http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": "Once upon a time", "temperature": 0.0, "max_tokens": 24, "logprobs": 3}
    whole = http.post("/generate", json=body).json()
    assert [entry["token_id"] for entry in whole["logprobs"]] == whole["token_ids"]
    assert all(len(entry["top_logprobs"]) == 3 for entry in whole["logprobs"])
    single = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert single["token_logprobs"] == [entry["logprob"] for entry in whole["logprobs"]]
    assert single["tokens"] == [entry["token"] for entry in whole["logprobs"]]


def test_penalties_and_biases_act(client: OpenAI, http: httpx.Client) -> None:
    options: Any = {"model": MODEL, "messages": STORY, "temperature": 0.0, "max_tokens": 60}
    (token,) = http.post("/tokenize", json={"model": MODEL, "prompt": "a"}).json()["tokens"][-1:]
    forced = client.chat.completions.create(logit_bias={str(token): 100}, **options).choices[0].message.content or ""
    assert set(forced) <= {"a", " "}
    plain = client.chat.completions.create(**options).choices[0].message.content
    repeated = client.chat.completions.create(extra_body={"repetition_penalty": 10.0}, **options)
    assert repeated.choices[0].message.content != plain
    least = client.chat.completions.create(frequency_penalty=2.0, presence_penalty=2.0, **options)
    assert least.choices[0].message.content


def test_c18_a_seed_gives_one_text_alone_and_among_others(client: OpenAI) -> None:
    options: Any = {"model": MODEL, "messages": STORY, "max_tokens": 48, "temperature": 1.0}

    def ask(seed: int | None) -> ChatCompletion:
        return client.chat.completions.create(seed=seed, **options)

    alone = ask(7)
    assert ask(7).choices[0].message.content == alone.choices[0].message.content
    with ThreadPoolExecutor(9) as threads:
        neighbours = [threads.submit(ask, seed) for seed in range(100, 108)]
        among = threads.submit(ask, 7).result()
        assert all(call.result() for call in neighbours)
    assert among.choices[0].message.content == alone.choices[0].message.content
    assert among.system_fingerprint == alone.system_fingerprint
    assert len({ask(None).choices[0].message.content for _ in range(3)}) > 1


def test_c19_no_character_is_broken_by_its_way_through_tokens(client: OpenAI, http: httpx.Client) -> None:
    for text in ("🎉🎉🎉🎉🎉", "漢字漢字漢字", "שלום שלום שלום", "👩‍👩‍👧‍👦 👩‍👩‍👧‍👦", "né né né"):
        body = {"model": MODEL, "prompt": text, "max_tokens": 40, "seed": 1, "ignore_eos": True}
        answer = http.post("/generate", json=body).json()
        options: Any = {"model": MODEL, "prompt": text, "max_tokens": 40, "seed": 1, "echo": True}
        deltas = [
            chunk.choices[0].text
            for chunk in client.completions.create(stream=True, extra_body={"ignore_eos": True}, **options)
        ]
        assert "".join(deltas) == text + answer["text"]
        # What the small model says is not always text; what is not broken there must not be broken here.
        at_once = http.post("/detokenize", json={"model": MODEL, "tokens": answer["token_ids"]}).json()["prompt"]
        assert answer["text"].count("\ufffd") == at_once.count("\ufffd")
    asked: Any = [{"role": "user", "content": "Repeat: 🎉漢字"}]
    options = {"model": MODEL, "messages": asked, "seed": 2, "max_tokens": 300}
    with client.chat.completions.stream(**options) as helper:
        told = helper.get_final_completion().choices[0].message.content
    assert told == client.chat.completions.create(**options).choices[0].message.content


def test_c20_a_stream_is_clean_on_the_wire(http: httpx.Client) -> None:
    body = {"model": MODEL, "messages": STORY, "stream": True, "max_tokens": 40}
    with http.stream("POST", CHAT, json=body) as response:
        raw = response.read()
    assert response.headers["content-type"].startswith("text/event-stream")
    assert "no-cache" in response.headers["cache-control"] and response.headers["x-accel-buffering"] == "no"
    assert b"\r" not in raw and raw.endswith(b"data: [DONE]\n\n")
    blocks = raw.decode()[:-2].split("\n\n")
    assert all(block.startswith(("data: ", ": ")) and "\n" not in block for block in blocks)


def test_c21_a_queued_stream_is_kept_alive(http: httpx.Client) -> None:
    # The interval of this fleet is 0.5 s; the default is 10 s.
    body = {"model": IDLE, "messages": ASK, "stream": True}
    with http.stream("POST", CHAT, json=body) as response:
        lines = response.iter_lines()
        seen = [next(lines) for _ in range(8)]
    assert response.status_code == 200
    assert seen.count(": keep-alive") >= 2
