"""Infilling on its way through the routes: what a caller gives comes back byte for byte."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.infill import Fill, FillWriter
from api.schemas import HoleOption
from shared.commands import Generate
from shared.events import Delta, Finished, Usage
from shared.holes import HOLE, count_filled, filling, spans
from shared.text import Tokenizer
from tests.api.scripted import CARD, Caller, ScriptedFleet, Step
from tests.shared.tokenizers_for_tests import byte_fallback, byte_level

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
STOP = CARD.stop_token_ids[0]
PIECES = st.lists(st.one_of(st.text(min_size=1, max_size=8), st.text(alphabet="é🎉漢 \r\n", min_size=1)), max_size=4)


def filled(command: Generate, words: list[str]) -> list[int]:
    """Return the template of a command with words in its holes, as a worker would: a stop token, then filler."""
    tokens = list(command.template or ())
    for (start, end), word in zip(spans(tokens), words, strict=True):
        ids = [*byte_level().encode(word, False), STOP]
        tokens[start:end] = (ids + [0] * (end - start))[: end - start]
    return tokens


def fills(*words: str) -> Any:
    def play(command: Generate) -> Iterator[Step]:
        tokens = filled(command, list(words))
        usage = Usage(len(command.prompt), 3, 2, 1)
        yield Delta(command.id, 2, 1, 0, 0, tokens, "not what anybody sees", 2)
        yield Finished(command.id, 3, 1, "stop", "filled", usage)

    return play


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(-1, 3), min_size=1, max_size=20), st.sets(st.integers(0, 3), max_size=2))
def test_spans_and_fillings_part_a_template(template: list[int], stops: set[int]) -> None:
    found = spans(template)
    assert [i for start, end in found for i in range(start, end)] == [i for i, t in enumerate(template) if t == HOLE]
    assert all(later > end for (_, end), (later, _) in zip(found, found[1:], strict=False)), "runs are maximal"
    tokens = [index % 4 if token == HOLE else token for index, token in enumerate(template)]
    for start, end in found:
        text = filling(tokens, (start, end), stops)
        assert text == tokens[start : start + len(text)] and not stops & set(text)
        assert len(text) == end - start or tokens[start + len(text)] in stops
    assert count_filled(template, tokens, stops) == sum(len(filling(tokens, span, stops)) for span in found)


@settings(max_examples=80, deadline=None)
@given(PIECES, st.lists(st.text(max_size=6), min_size=1, max_size=3), st.booleans())
def test_literals_come_back_byte_for_byte_whatever_they_are(texts: list[str], words: list[str], level: bool) -> None:
    tokenizer: Tokenizer = byte_level() if level else byte_fallback()
    pieces: list[str | HoleOption] = []
    template: list[int] = []
    tokens: list[int] = []
    for number, word in enumerate(words):
        text = texts[number] if number < len(texts) else "|"
        ids = [token for token in tokenizer.encode(word, False) if token != STOP]
        pieces += [text, HoleOption(hole=str(number), max_tokens=len(ids) + 2)]
        given = tokenizer.encode(text, False)
        template += [*given, *[HOLE] * (len(ids) + 2)]
        tokens += [*given, *ids, STOP, 0]
    writer = FillWriter(Fill("x", tuple(pieces), tuple(template), True), tokenizer, (5,), frozenset({STOP}), ())
    told = writer.of_delta(Delta("r", 2, 1, 0, 0, tokens, "", 1)).text
    assert told == "".join(piece if isinstance(piece, str) else writer.holes[piece.hole] for piece in pieces)
    assert list(writer.holes) == [str(number) for number in range(len(words))]
    for number, word in enumerate(words):
        if level:
            assert writer.holes[str(number)] == word


async def test_a_suffix_is_behind_the_answer_and_no_part_of_it(caller: Caller, fleet: ScriptedFleet) -> None:
    fleet.script = fills(" middle")
    body = {"prompt": "Begin", "suffix": " end.", "max_tokens": 9}
    for path in (COMPLETIONS, "/v1/fim/completions"):
        answer = (await caller.post(path, body)).json()
        command = fleet.commands[-1]
        assert command.template == (*[HOLE] * 9, *byte_level().encode(" end.", False))
        assert command.limits.max_tokens == 9
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"], choice["finish_detail"]) == (" middle", "stop", "filled")
        assert answer["usage"]["prompt_tokens"] == len(command.prompt) + len(byte_level().encode(" end.", False))
        events = (await caller.post(path, body | {"stream": True})).events
        assert "".join(event["choices"][0]["text"] for event in events) == " middle"
        assert events[-1]["choices"][0]["finish_reason"] == "stop"
    several = (await caller.post(COMPLETIONS, body | {"prompt": ["a", "b"], "n": 2, "echo": True})).json()
    assert [choice["text"] for choice in several["choices"]] == ["a middle"] * 2 + ["b middle"] * 2


async def test_an_answer_that_fills_its_room_was_cut(caller: Caller, fleet: ScriptedFleet) -> None:
    fleet.script = fills("a much longer text than there is room for")
    body: dict[str, Any] = {"prompt": "Begin", "suffix": " end.", "max_tokens": 4}
    (choice,) = (await caller.post(COMPLETIONS, body)).json()["choices"]
    assert choice["finish_reason"] == "length" and choice["text"] and "a much longer".startswith(choice["text"])
    (choice,) = (await caller.post(COMPLETIONS, body | {"stop": choice["text"][1:3]})).json()["choices"]
    assert (choice["finish_reason"], len(choice["text"])) == ("stop", 1)


async def test_a_template_comes_back_whole_with_its_holes_by_name(caller: Caller, fleet: ScriptedFleet) -> None:
    fleet.script = fills("Ann", " 42")
    template = ["Name: ", {"hole": "name", "max_tokens": 8}, "\r\nAge:", {"hole": "age", "max_tokens": 6}, " é🎉"]
    options = {"diffusion": {"template": template}}
    (choice,) = (await caller.post(CHAT, {"messages": HI} | options)).json()["choices"]
    assert choice["message"]["content"] == "Name: Ann\r\nAge: 42 é🎉"
    assert choice["diffusion"]["holes"] == {"name": "Ann", "age": " 42"}
    assert choice["finish_reason"] == "stop"
    (choice,) = (await caller.post(COMPLETIONS, {"prompt": "x"} | options)).json()["choices"]
    assert choice["text"] == "Name: Ann\r\nAge: 42 é🎉"
    events = (await caller.post(CHAT, {"messages": HI, "stream": True} | options)).events
    said = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert said == "Name: Ann\r\nAge: 42 é🎉"
    assert events[-1]["choices"][0]["diffusion"]["holes"]["age"] == " 42"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"diffusion": {"template": ["x"]}}, "diffusion.template"),
        (CHAT, {"diffusion": {"template": "x"}}, "diffusion.template"),
        (CHAT, {"diffusion": {"template": [{"hole": "a"}, {"hole": "b"}]}}, "diffusion.template"),
        (CHAT, {"diffusion": {"template": [{"hole": "a"}, "x", {"hole": "a"}]}}, "diffusion.template"),
        (CHAT, {"diffusion": {"template": [{"hole": "a", "regex": "x"}]}}, "diffusion.template[0].regex"),
        (CHAT, {"diffusion": {"template": [{"hole": "a", "max_tokens": 4096}]}}, "diffusion.template"),
        (CHAT, {"diffusion": {"template": [{"hole": "a"}]}, "logprobs": True}, "logprobs"),
        (CHAT, {"diffusion": {"template": [{"hole": "a"}], "block_length": 4}}, "diffusion.block_length"),
        (CHAT, {"diffusion": {"template": [{"hole": "a"}]}, "response_format": {"type": "json_object"}}, None),
        (COMPLETIONS, {"suffix": "x", "diffusion": {"template": [{"hole": "a"}]}}, "suffix"),
        (COMPLETIONS, {"suffix": "x", "min_tokens": 3}, "min_tokens"),
        (COMPLETIONS, {"suffix": "x" * 300}, "suffix"),
        (COMPLETIONS, {"suffix": 7}, "suffix"),
        (CHAT, {"suffix": "x"}, "suffix"),
        ("/generate", {"suffix": "x"}, "suffix"),
        ("/generate", {"diffusion": {"template": [{"hole": "a"}]}}, "diffusion.template"),
    ],
)
async def test_what_cannot_be_filled_is_named(
    caller: Caller, fleet: ScriptedFleet, path: str, fields: dict[str, Any], param: str | None
) -> None:
    response = await caller.post(path, {"messages": HI, "prompt": "hi"} | fields)
    assert response.status == 400 and fleet.commands == []
    assert param is None or response.error["param"] == param


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"template": [{"hole": "a"}]}, "/v1/chat/completions"),
        ({"canvas_length": 8}, "with any value"),
        ({"canvas_length": 64}, "with any value"),
    ],
)
async def test_what_no_value_makes_possible_is_not_blamed_on_its_value(
    caller: Caller, fleet: ScriptedFleet, options: dict[str, Any], told: str
) -> None:
    response = await caller.post("/generate", {"prompt": "hi", "diffusion": options})
    assert response.status == 400 and fleet.commands == []
    assert response.error["param"] == f"diffusion.{next(iter(options))}" and told in response.error["message"]
    assert "this value" not in response.error["message"]


async def test_a_model_that_fills_nothing_and_one_with_small_blocks_refuse(
    caller: Caller, fleet: ScriptedFleet
) -> None:
    body = {"prompt": "hi", "suffix": "there", "max_tokens": 8}
    for card in (replace(CARD, capabilities=("generate",), digest=""), replace(CARD, largest_block=8, digest="")):
        fleet.cards = {CARD.name: card}
        response = await caller.post(COMPLETIONS, body)
        assert (response.status, response.error["param"]) == (400, "suffix")


async def test_a_prediction_travels_as_a_draft_and_its_fate_is_told(caller: Caller, fleet: ScriptedFleet) -> None:
    def play(command: Generate) -> Iterator[Step]:
        yield Delta(command.id, 2, 1, 0, 0, [75], "h", 2)
        usage = Usage(3, 1, 2, 1, accepted_draft_tokens=4, rejected_draft_tokens=2)
        yield Finished(command.id, 3, 1, "stop", "stop_token", usage)

    fleet.script = play
    body: dict[str, Any] = {"messages": HI, "prediction": {"type": "content", "content": "Hello, wörld"}, "n": 2}
    usage = (await caller.post(CHAT, body)).json()["usage"]
    assert fleet.commands[0].draft == fleet.commands[1].draft == tuple(byte_level().encode("Hello, wörld", False))
    details = usage["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (8, 4)
    assert (await caller.post(CHAT, {"messages": HI, "prediction": None})).status == 200
    assert fleet.commands[-1].draft is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prediction": {"type": "audio", "content": "x"}}, "prediction.type"),
        ({"prediction": {"type": "content"}}, "prediction.content"),
        ({"prediction": {"content": "ab" * 4000}}, "prediction.content"),
        ({"prediction": {"content": "x"}, "diffusion": {"template": [{"hole": "a"}]}}, "prediction"),
        ({"prediction": {"content": "x"}, "response_format": {"type": "json_object"}}, "prediction"),
    ],
)
async def test_a_prediction_that_cannot_be_used_is_named(
    caller: Caller, fleet: ScriptedFleet, fields: dict[str, Any], param: str
) -> None:
    response = await caller.post(CHAT, {"messages": HI} | fields)
    assert (response.status, response.error["param"]) == (400, param) and fleet.commands == []
