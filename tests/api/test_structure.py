"""Constraints and tools, from bodies to commands and from texts to OpenAI's calls."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.structure.calls import CallReader
from api.structure.tools import plain_messages
from shared.commands import decode_command, encode_command
from shared.constraints import Choice, JsonObject, JsonSchema, Lark, Regex, Tool, ToolCalls
from tests.api.scripted import CARD, Caller, ScriptedFleet, answer

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
SHOUT = {"type": "function", "function": {"name": "shout"}}
ADD_TOOL, SHOUT_TOOL = Tool(name="add", parameters=SCHEMA), Tool(name="shout")


@pytest.fixture(autouse=True)
def room(fleet: ScriptedFleet) -> None:
    """Give the prompt room for what is told of tools."""
    fleet.cards = {CARD.name: replace(CARD, max_model_len=4096, digest="")}


@pytest.mark.parametrize(
    ("body", "constraint"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, JsonObject()),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            JsonSchema(json_schema=SCHEMA),
        ),
        ({"guided_json": SCHEMA}, JsonSchema(json_schema=SCHEMA)),
        ({"guided_json": json.dumps(SCHEMA)}, JsonSchema(json_schema=SCHEMA)),
        ({"guided_regex": "a+"}, Regex(pattern="a+")),
        ({"guided_choice": ["a", "b"]}, Choice(options=("a", "b"))),
        ({"guided_grammar": 'start: "a"'}, Lark(lark='start: "a"')),
        ({"structured_outputs": {"regex": "a+", "json": None}}, Regex(pattern="a+")),
        ({"tools": []}, None),
        ({"tools": [ADD], "tool_choice": "none"}, None),
        ({"tools": [ADD]}, ToolCalls(tools=(ADD_TOOL,))),
        ({"tools": [ADD], "tool_choice": "auto"}, ToolCalls(tools=(ADD_TOOL,))),
        ({"tools": [ADD, SHOUT], "tool_choice": "required"}, ToolCalls(tools=(ADD_TOOL, SHOUT_TOOL), required=True)),
        (
            {
                "tools": [ADD, SHOUT],
                "tool_choice": {"type": "function", "function": {"name": "shout"}},
                "parallel_tool_calls": False,
            },
            ToolCalls(tools=(SHOUT_TOOL,), required=True, parallel=False),
        ),
    ],
)
async def test_what_the_output_must_be_reaches_the_command(
    caller: Caller, fleet: ScriptedFleet, body: dict[str, Any], constraint: Any
) -> None:
    assert (await caller.post(PATH, {"messages": HI} | body)).status == 200
    (command,) = fleet.commands
    assert command.constraint == constraint
    envelope = encode_command(command)
    assert ("constraint" in json.loads(envelope)["must"]) == (constraint is not None)
    assert decode_command(envelope).constraint == constraint


async def test_the_prompt_tells_of_the_tools_unless_none_may_be_called(caller: Caller, fleet: ScriptedFleet) -> None:
    for choice in ("none", "auto", "required"):
        await caller.post(PATH, {"messages": HI, "tools": [ADD], "tool_choice": choice})
    silent, auto, required = (command.prompt for command in fleet.commands)
    assert len(silent) < len(auto) and auto == required


CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
NESTED = '<tool_call>\n{"name":"f","arguments":{"b": ["}", {"c": "\\"]"}]}}\n</tool_call>'


async def test_calls_are_told_in_openais_shape(caller: Caller, fleet: ScriptedFleet) -> None:
    fleet.script = answer(f"Sure.\n{CALLED}\n{NESTED}")
    body = {"messages": HI, "tools": [ADD, SHOUT]}
    (choice,) = (await caller.post(PATH, body)).json()["choices"]
    message = choice["message"]
    assert (message["content"], choice["finish_reason"]) == ("Sure.", "tool_calls")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "add", "arguments": '{"a": 1}'},
        {"name": "f", "arguments": '{"b": ["}", {"c": "\\"]"}]}'},
    ]
    chunks = (await caller.post(PATH, body | {"stream": True})).events
    deltas = [choice["delta"] for chunk in chunks if isinstance(chunk, dict) for choice in chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Sure."
    joined = dict[int, str]()
    for call in (call for delta in deltas for call in delta.get("tool_calls", ())):
        joined[call["index"]] = joined.get(call["index"], "") + call["function"]["arguments"]
    assert list(joined.values()) == [call["function"]["arguments"] for call in message["tool_calls"]]


async def test_a_call_without_its_end_is_cut(caller: Caller, fleet: ScriptedFleet) -> None:
    fleet.script = answer(CALLED[:40], "length", "max_tokens")
    (choice,) = (await caller.post(PATH, {"messages": HI, "tools": [ADD]})).json()["choices"]
    assert choice["finish_reason"] == "length"


@given(
    st.lists(
        st.sampled_from(["Hi ", "a < b", "<tool", "\n", CALLED, NESTED, f"\n{CALLED}", "<tool_call", "x"]), max_size=6
    ),
    st.lists(st.integers(0, 300), max_size=12),
)
def test_the_pieces_in_which_a_text_comes_do_not_matter(parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    whole = CallReader()
    whole.push(text)
    whole.end()
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    reader, told, calls = CallReader(), "", dict[int, tuple[str, str]]()
    pieces = [reader.push(text[start:end]) for start, end in zip(edges, edges[1:], strict=False)]
    for piece in (*pieces, reader.end()):
        told += piece.text
        for call in piece.calls:
            name, arguments = calls.get(call.index, ("", ""))
            calls[call.index] = name + call.name, arguments + call.arguments
    assert told == reader.text == whole.text
    assert list(calls.values()) == [(call.name, call.arguments) for call in whole.calls]
    assert reader.cut == whole.cut


def test_a_template_without_tools_is_told_of_them_in_words() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "system", "content": "Be kind."},
        *HI,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    told = plain_messages(messages, [ADD])
    assert [message["role"] for message in told] == ["system", "user", "assistant", "user"]
    assert told[0]["content"].startswith("Be kind.") and '"name":"add"' in told[0]["content"]
    assert json.loads(told[2]["content"].split("\n")[1]) == {"name": "add", "arguments": {"a": 1}}
    assert told[3]["content"] == "<tool_response>\n2\n</tool_response>"


async def test_a_model_that_cannot_follow_a_grammar_is_not_asked_to(caller: Caller, fleet: ScriptedFleet) -> None:
    fleet.cards = {CARD.name: replace(CARD, capabilities=("chat", "generate"), digest="")}
    response = await caller.post(PATH, {"messages": HI, "response_format": {"type": "json_object"}})
    assert (response.status, response.error["param"]) == (400, "response_format")
    assert fleet.commands == []
