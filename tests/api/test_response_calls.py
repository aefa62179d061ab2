"""Calls of functions and log-probabilities in responses: routes by a scripted fleet, rules by property."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.responses.items import to_messages
from api.responses.shape import EventWriter, output_of, response_object
from api.responses.store import Record
from shared.commands import Generate
from shared.constraints import Tool, ToolCalls
from shared.events import Delta, Event, Finished, Queued, TokenLogprob, Usage
from tests.api.scripted import CARD, Caller, ScriptedFleet, Step, answer
from tests.shared.tokenizers_for_tests import byte_level

PATH = "/v1/responses"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"type": "function", "name": "add", "description": "Add.", "parameters": SCHEMA, "strict": True}
SHOUT = {"type": "function", "name": "shout"}
ADD_TOOL, SHOUT_TOOL = Tool(name="add", parameters=SCHEMA), Tool(name="shout")
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
NESTED = '<tool_call>\n{"name":"shout","arguments":{"b": ["}", {"c": "\\"]"}]}}\n</tool_call>'
RECORD = Record("resp_1", "r_m.0_1", "m", 5, 3, True, True, (), (), {}, calls=True)


@pytest.fixture(autouse=True)
def room(fleet: ScriptedFleet) -> None:
    """Give the prompt room for what is told of tools."""
    fleet.cards = {CARD.name: replace(CARD, max_model_len=4096, digest="")}


async def post(caller: Caller, **fields: Any) -> Any:
    return await caller.post(PATH, {"input": "hi", "store": False} | fields)


# --- the calls of one answer, by property


def told(events: list[Event]) -> list[dict[str, Any]]:
    writer = EventWriter(RECORD)
    return [*writer.begin(), *itertools.chain.from_iterable(writer.of(event) for event in events)]


def in_pieces(text: str, cuts: list[int], end: Finished) -> list[Event]:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [text[start:stop] for start, stop in itertools.pairwise(edges)]
    deltas = [Delta("r", seq, 1, seq - 2, seq, [seq], part, seq) for seq, part in enumerate(parts, 2)]
    return [Queued("r"), *deltas, end]


ENDS = st.sampled_from(
    [
        Finished("r", 9, 1, "stop", "stop_token", Usage(3, 4, 2, 1)),
        Finished("r", 9, 1, "length", "max_tokens", Usage(3, 4, 2, 1)),
        Finished("r", 9, 1, "aborted", "aborted", Usage(3, 0, 0, 0)),
    ]
)
TEXTS = st.tuples(
    st.sampled_from(["", "Hi", "a < b\n", "<tool"]), st.lists(st.sampled_from([CALLED, NESTED]), max_size=3)
).map(lambda parts: "\n".join([parts[0], *parts[1]]) if parts[0] else "\n".join(parts[1]))


@given(TEXTS, st.integers(0, 400), st.lists(st.integers(0, 300), max_size=12), ENDS)
def test_the_pieces_of_a_stream_make_the_items_of_its_end(text: str, kept: int, cuts: list[int], end: Finished) -> None:
    events = told(in_pieces(text[:kept], cuts, end))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    items = list[dict[str, Any]]()
    for event in events:
        match event["type"]:
            case "response.output_item.added":
                assert event["output_index"] == len(items)
                # One item at a time: the one before has been closed.
                assert not items or items[-1]["status"] != "in_progress"
                items.append(dict(event["item"]))
            case "response.content_part.added":
                items[-1]["content"] = [dict(event["part"])]
            case "response.output_text.delta":
                assert event["item_id"] == items[event["output_index"]]["id"] == items[-1]["id"]
                items[-1]["content"][0]["text"] += event["delta"]
            case "response.function_call_arguments.delta":
                assert event["item_id"] == items[event["output_index"]]["id"] == items[-1]["id"]
                items[-1]["arguments"] += event["delta"]
            case "response.output_text.done":
                assert event["text"] == items[-1]["content"][0]["text"]
            case "response.function_call_arguments.done":
                assert (event["name"], event["arguments"]) == (items[-1]["name"], items[-1]["arguments"])
            case "response.output_item.done":
                items[-1]["status"] = event["item"]["status"]
                assert event["item"] == items[-1]
            case _:
                pass
    assert events[-1]["response"]["output"] == items
    assert len({item["id"] for item in items}) == len(items)
    assert all(item["status"] != "in_progress" for item in items)
    for item in items:
        if item["type"] == "function_call" and item["status"] == "completed":
            assert isinstance(json.loads(item["arguments"]), dict)


@given(TEXTS, st.integers(0, 400), st.lists(st.integers(0, 300), max_size=12), ENDS)
def test_a_response_that_is_read_whole_is_that_of_its_stream(
    text: str, kept: int, cuts: list[int], end: Finished
) -> None:
    events = in_pieces(text[:kept], cuts, end)
    output = output_of(RECORD, None)
    for event in events:
        if isinstance(event, Delta):
            list(output.push(event))
    list(output.end(end))
    whole = response_object(RECORD, output.status(end), output, end)
    assert whole == told(events)[-1]["response"]


def test_a_call_without_its_end_is_incomplete() -> None:
    for kept, arguments in ((20, None), (CALLED.index("}") + 1, '{"a": 1}'), (CALLED.index(": 1"), '{"a"')):
        end = Finished("r", 9, 1, "stop", "stop_string", Usage())
        response = told(in_pieces(CALLED[:kept], [], end))[-1]["response"]
        if arguments is None:
            assert response["output"][0]["type"] == "message" and response["output"][0]["content"][0]["text"] == ""
        else:
            assert response["output"][0]["arguments"] == arguments
        cut = arguments != '{"a": 1}'
        assert response["status"] == response["output"][0]["status"] == ("incomplete" if cut else "completed")
        assert (response["incomplete_details"] is None) == (not cut)


# --- through the route


@pytest.mark.parametrize(
    ("body", "constraint"),
    [
        ({"tools": []}, None),
        ({"tools": [ADD], "tool_choice": "none"}, None),
        ({"tools": [ADD]}, ToolCalls(tools=(ADD_TOOL,))),
        ({"tools": [ADD, SHOUT], "tool_choice": "required"}, ToolCalls(tools=(ADD_TOOL, SHOUT_TOOL), required=True)),
        (
            {
                "tools": [ADD, SHOUT],
                "tool_choice": {"type": "function", "name": "shout"},
                "parallel_tool_calls": False,
            },
            ToolCalls(tools=(SHOUT_TOOL,), required=True, parallel=False),
        ),
        (
            {
                "tools": [ADD, SHOUT],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "shout"}],
                },
            },
            ToolCalls(tools=(SHOUT_TOOL,)),
        ),
    ],
)
async def test_functions_of_a_response_reach_the_command(
    caller: Caller, fleet: ScriptedFleet, body: dict[str, Any], constraint: Any
) -> None:
    response = await post(caller, **body)
    assert response.status == 200
    assert fleet.commands[0].constraint == constraint
    told = response.json()
    assert [tool["name"] for tool in told["tools"]] == [tool["name"] for tool in body["tools"]]
    assert told["tool_choice"] == body.get("tool_choice", "auto")
    assert told["parallel_tool_calls"] == body.get("parallel_tool_calls", True)


async def test_the_prompt_is_that_of_a_chat_with_the_same_tools_and_calls(caller: Caller, fleet: ScriptedFleet) -> None:
    items = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Well."}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "shout", "arguments": "{}", "id": "fc_1"},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "HEY"}]},
    ]
    assert (await post(caller, input=items, tools=[ADD], instructions="Be kind.")).status == 200
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
        {"id": "c2", "type": "function", "function": {"name": "shout", "arguments": "{}"}},
    ]
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Well.", "tool_calls": calls},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        {"role": "tool", "content": "HEY", "tool_call_id": "c2"},
    ]
    function = {name: ADD[name] for name in ("name", "description", "parameters")}
    tools = [{"type": "function", "function": function}]
    assert (await caller.post("/v1/chat/completions", {"messages": messages, "tools": tools})).status == 200
    assert fleet.commands[0].prompt == fleet.commands[1].prompt


async def test_calls_are_items_of_the_output(caller: Caller, fleet: ScriptedFleet) -> None:
    fleet.script = answer(f"Sure.\n{CALLED}\n{NESTED}")
    message, first, second = (await post(caller, tools=[ADD, SHOUT])).json()["output"]
    assert message["content"][0]["text"] == "Sure."
    assert (first["name"], first["arguments"], first["status"]) == ("add", '{"a": 1}', "completed")
    assert (second["name"], second["arguments"]) == ("shout", '{"b": ["}", {"c": "\\"]"}]}')
    assert first["call_id"] != second["call_id"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [ADD, {"type": "web_search"}]}, "tools[1].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [ADD, ADD]}, "tools[1].name"),
        ({"tools": [SHOUT, ADD | {"parameters": {"type": "objekt"}}]}, "tools[1].parameters"),
        (
            {
                "tools": [SHOUT, ADD | {"parameters": {"type": "objekt"}}],
                "tool_choice": {"type": "function", "name": "add"},
            },
            "tools[1].parameters",
        ),
        ({"tools": "add"}, "tools"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "name": "mul"}}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        (
            {"tools": [ADD], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}},
            "tool_choice.tools[0]",
        ),
        ({"tools": [ADD], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [ADD], "text": {"format": {"type": "json_object"}}}, "tools"),
        ({"tools": [ADD], "max_repetition_run": 3}, "max_repetition_run"),
        ({"max_tool_calls": 1}, "max_tool_calls"),
        ({"include": ["everything"]}, "include[0]"),
        ({"include": "message.output_text.logprobs"}, "include"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "2"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "output": "2"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "input[0].name"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": 5, "arguments": "{}"}]}, "input[0].name"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "add"}]}, "input[0].arguments"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
    ],
)
async def test_what_is_wrong_with_a_function_is_named(
    caller: Caller, fleet: ScriptedFleet, fields: dict[str, Any], param: str
) -> None:
    response = await post(caller, **fields)
    assert (response.status, response.error["param"]) == (400, param)
    assert param.partition("[")[0] in response.error["message"]
    assert fleet.commands == []


@given(st.lists(st.sampled_from(["say", "call", "answer", "user"]), min_size=1, max_size=8))
def test_every_call_has_one_place_among_the_messages(kinds: list[str]) -> None:
    items, called = list[dict[str, Any]](), list[str]()
    for number, kind in enumerate(kinds):
        match kind:
            case "say" | "user":
                items.append({"role": "assistant" if kind == "say" else "user", "content": str(number)})
            case "call":
                called.append(f"c{number}")
                items.append({"type": "function_call", "call_id": called[-1], "name": "f", "arguments": "{}"})
            case _:
                known = called or ["c-before"]
                items.append({"type": "function_call_output", "call_id": known[-1], "output": str(number)})
    before = [{"role": "assistant", "content": "", "tool_calls": [{"id": "c-before"}]}]
    messages = to_messages(items, before)
    told = [call["id"] for message in messages for call in message.get("tool_calls", ())]
    assert told == called
    assert sum(message["role"] == "tool" for message in messages) == kinds.count("answer")
    assert all(message["role"] == "assistant" for message in messages if "tool_calls" in message)


# --- log-probabilities


def answer_with_logprobs(text: str, size: int = 3) -> Any:
    def play(command: Generate) -> Iterator[Step]:
        ids, stream = byte_level().encode(text, False), byte_level().detokenizer()
        for seq, start in enumerate(range(0, len(ids), size), 2):
            part = ids[start : start + size]
            told = [TokenLogprob(-0.5, [(token, -0.5), (token + 1, float("-inf"))]) for token in part]
            yield Delta(command.id, seq, 1, seq, start, part, stream.push(part), 1, told)
        yield Finished(command.id, 99, 1, "stop", "stop_token", Usage(1, len(ids), 3, 3))

    return play


@pytest.mark.parametrize("text", ["Hello, wörld 🎉 end", f"Hello, wörld\n{CALLED}"])
async def test_a_response_tells_the_logprobs_of_its_message(caller: Caller, fleet: ScriptedFleet, text: str) -> None:
    fleet.script = answer_with_logprobs(text)
    fields = {"tools": [ADD], "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = (await post(caller, **fields)).json()
    assert fleet.commands[0].logprobs == whole["top_logprobs"] == 2
    part = whole["output"][0]["content"][0]
    spelled = b"".join(bytes(entry["bytes"]) for entry in part["logprobs"]).decode()
    assert spelled == part["text"] == text.partition("\n<")[0]
    assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
    assert part["logprobs"][0]["top_logprobs"][1]["logprob"] == -9999.0
    body = (await post(caller, stream=True, **fields)).body
    events = [json.loads(line.removeprefix(b"data: ")) for line in body.splitlines() if line.startswith(b"data: ")]
    streamed = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [entry for event in streamed for entry in event["logprobs"]] == part["logprobs"]
    (done,) = [event for event in events if event["type"] == "response.output_text.done"]
    assert done["logprobs"] == part["logprobs"]


async def test_logprobs_are_told_only_where_they_were_asked_for(caller: Caller, fleet: ScriptedFleet) -> None:
    fleet.script = answer_with_logprobs("Hello")
    for fields, wanted in (
        ({}, None),
        ({"top_logprobs": 0}, None),
        ({"include": ["reasoning.encrypted_content"]}, None),
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"top_logprobs": 3}, 3),
    ):
        told = (await post(caller, **fields)).json()["output"][0]["content"][0]["logprobs"]
        assert fleet.commands[-1].logprobs == wanted
        assert bool(told) == (wanted is not None)
