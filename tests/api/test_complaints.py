"""What a 4xx says of a body: a field of that body, in the words of JSON."""

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from pydantic import BaseModel

from shared.commands import COUNT_LIMIT
from shared.complaints import path_of
from tests.api.scripted import CARD, Caller, ScriptedFleet

WRONG: list[Any] = [True, -1, "x", "", [], [{}], [[5]], {"x": 1}, {"type": "x"}]
START: dict[str, Any] = {
    "model": "org/demo",
    "input_file_id": "file_1",
    "endpoint": "/v1/embeddings",
    "completion_window": "24h",
    "prompt": "x",
    "messages": [{"role": "user", "content": "hi"}],
    "input": "hi",
    "store": False,
}
PATHS = ("/generate", "/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize")
PYTHON = re.compile(r"\b(dict|tuple|str|int|bool|None|NoneType|Tuple|dictionary|Input should)\b|(list|iteral)\[")


@pytest.fixture(autouse=True)
def room(fleet: ScriptedFleet) -> None:
    """Give the prompt room for what is told of tools."""
    fleet.cards = {CARD.name: replace(CARD, max_model_len=4096, digest="")}


def fields(schema: dict[str, Any], place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the place of every field, and of an item of every list, that a schema describes."""
    for branch in (schema, *schema.get("anyOf", ())):
        for name, part in branch.get("properties", {}).items():
            yield (*place, name)
            yield from fields(part, (*place, name))
        if "items" in branch:
            yield (*place, 0)
            yield from fields(branch["items"], (*place, 0))


def put(body: Any, place: tuple[str | int, ...], value: Any) -> None:
    """Put a value into a body, with everything around it that must be there."""
    for part, after in zip(place, place[1:], strict=False):
        inner: Any = [] if isinstance(after, int) else {}
        if isinstance(part, int) and not body:
            body.append(inner)
        elif isinstance(part, str) and not isinstance(body.get(part), type(inner)):
            body[part] = inner
        body = body[part]
        if isinstance(part, int) and not isinstance(body, type(inner)):
            return
    last = place[-1]
    if isinstance(last, int):
        body[:] = [value]
    else:
        body[last] = value


def names_a_field(param: str, body: Any) -> bool:
    """Tell whether a path leads through a body, to its last name or at least to what lacks that name."""
    parts = [int(part[1:-1]) if part.startswith("[") else part for part in re.findall(r"\[\d+\]|[^.\[]+", param)]
    for depth, part in enumerate(parts):
        match body:
            case dict() if part in body:
                body = body[part]
            case dict() if depth == len(parts) - 1:
                return True
            case list() if isinstance(part, int) and part < len(body):
                body = body[part]
            case _:
                return False
    return True


def models(kind: type[BaseModel] = BaseModel) -> Iterator[str]:
    for inner in kind.__subclasses__():
        if inner.__module__.startswith(("api.", "shared.")):
            yield inner.__name__
        yield from models(inner)


@pytest.mark.parametrize("path", PATHS)
async def test_a_refusal_names_a_field_of_the_request_and_nothing_of_python(caller: Caller, path: str) -> None:
    document = (await caller.get("/openapi.json")).json()
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    classes = re.compile(rf"\b({'|'.join(set(models()) - {'Regex', 'Choice', 'Tool', 'Lark'})})\b")
    start = {name: value for name, value in START.items() if name in schema["properties"]}
    if path == "/tokenize":
        del start["prompt"]
    refused = 0
    for place in dict.fromkeys(fields(schema)):
        if place in [("previous_response_id",), ("store",), ("background",)]:
            # These need Redis.
            continue
        for value in WRONG:
            body = copy.deepcopy(start)
            put(body, place, value)
            answer = await caller.post(path, body)
            assert answer.status < 500, (body, answer.body)
            if answer.status == 200:
                continue
            refused += 1
            told = answer.error
            assert told["param"] is not None and names_a_field(told["param"], body), (body, told)
            assert told["param"] in told["message"] or answer.status == 404, (body, told)
            said = told["message"].replace(json.dumps(value), "")
            assert not PYTHON.search(said) and not classes.search(said), (body, told)
    assert refused > len(list(fields(schema)))


def resolved(schema: Any, known: dict[str, Any]) -> Any:
    """Put what a schema refers to in the place of the reference."""
    match schema:
        case {"$ref": str(name)}:
            return resolved(known[name.rpartition("/")[2]], known)
        case dict():
            return {name: resolved(part, known) for name, part in schema.items()}
        case list():
            return [resolved(part, known) for part in schema]
        case _:
            return schema


def integers(schema: dict[str, Any], place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the place of every integer that a schema describes."""
    for branch in (schema, *schema.get("anyOf", ()), *schema.get("oneOf", ())):
        if branch.get("type") == "integer":
            yield place
        for name, part in branch.get("properties", {}).items():
            yield from integers(part, (*place, name))
        if "items" in branch:
            yield from integers(branch["items"], (*place, 0))


BEYOND = (*map(str, (2**63, -(2**63) - 1, 2**64, 10**30, -(10**30), 10**308)), "1" + "0" * 400, "-1" + "0" * 5000)
"""As JSON has them: Python itself reads and writes no more than 4,300 digits."""


async def test_an_integer_beyond_64_bits_is_refused_by_its_place_and_its_range_wherever_it_stands(
    caller: Caller,
) -> None:
    document = (await caller.get("/openapi.json")).json()
    tried: set[str] = set()
    for path, operations in document["paths"].items():
        content = operations.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json")
        if content is None:
            continue
        schema = resolved(content["schema"], document["components"]["schemas"])
        start = {name: value for name, value in START.items() if name in schema["properties"]}
        if path == "/tokenize":
            del start["prompt"]
        for place in dict.fromkeys(integers(schema)):
            for number in BEYOND:
                body = copy.deepcopy(start)
                put(body, place, "NUMBER")
                # What must stand beside it.
                if "template" in place:
                    put(body, (*place[:-1], "hole"), "a")
                if "output_expires_after" in place:
                    body["output_expires_after"]["anchor"] = "created_at"
                raw = json.dumps(body).replace('"NUMBER"', number).encode()
                answer = await caller.post(path, raw)
                assert answer.status == 400, (path, place, number, answer.body)
                if path.startswith("/api/"):
                    # Ollama's errors are a message.
                    assert str(place[-1]) in answer.json()["error"], (place, answer.body)
                    continue
                told = answer.error
                assert told["param"] == path_of(place), (path, place, told)
                assert told["param"] in told["message"] and "an integer" not in told["message"], (path, place, told)
                assert "list of" not in told["message"], (path, place, told)
            tried.add(path_of(place))
    assert {"max_tokens", "prompt[0]", "diffusion.template[0].max_tokens", "stop_token_ids[0]", "input[0]"} <= tried


@pytest.mark.parametrize("digits", ["1e400", "-1e999", "1" + "0" * 5000])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('{"prompt": "x", "temperature": NUMBER}', "temperature"),
        ('{"prompt": "x", "guided_json": {"a": [1, {"b": NUMBER}]}, "top_p": NUMBER}', "guided_json.a[1].b"),
        ('{"prompt": "x", "metadata": {"a": NUMBER}}', "metadata.a"),
    ],
)
async def test_a_number_that_no_float_holds_is_named(caller: Caller, body: str, param: str, digits: str) -> None:
    answer = await caller.post("/v1/completions", body.replace("NUMBER", digits).encode())
    assert (answer.status, answer.error["param"]) == (400, param)
    assert answer.error["message"] == f"{param} must be a number that 64 bits hold"


async def test_integers_beyond_64_bits_within_a_schema_are_numbers_like_others(caller: Caller) -> None:
    schema = {"type": "integer", "maximum": 10**30}
    answer = await caller.post("/v1/completions", {"prompt": "x", "guided_json": schema})
    assert answer.status == 200, answer.body


async def test_a_whole_number_out_of_range_in_a_query_is_named(caller: Caller) -> None:
    document = (await caller.get("/openapi.json")).json()
    tried = 0
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            for parameter in operation.get("parameters", ()):
                kinds = [part.get("type") for part in (parameter["schema"], *parameter["schema"].get("anyOf", ()))]
                if method != "get" or parameter["in"] != "query" or "integer" not in kinds:
                    continue
                for number in (2**63, 10**30, -(10**30)):
                    where = re.sub(r"\{[^}]+\}", "x", path)
                    answer = await caller.get(f"{where}?{parameter['name']}={number}")
                    assert (answer.status, answer.error["param"]) == (400, parameter["name"]), (
                        where,
                        number,
                        answer.body,
                    )
                    tried += 1
    assert tried


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"lora": [5]}, "lora[0]", "lora[0] must be an object"),
        ({"diffusion": []}, "diffusion", "diffusion must be an object"),
        ({"guided_json": 5}, "guided_json", "guided_json must be an object"),
        ({"guided_choice": ["a", ""]}, "guided_choice[1]", "guided_choice[1] must have at least 1 characters"),
        ({"diffusion": {"remasking": {"a": 1}}}, "diffusion.remasking", None),
        (
            {"diffusion": {"template": ["a", {"hole": "b", "max_tokens": 0}]}},
            "diffusion.template[1].max_tokens",
            "diffusion.template[1].max_tokens must be greater than or equal to 1",
        ),
        (
            {"diffusion": {"template": ["a", {"hole": "b", "most": 0}]}},
            "diffusion.template[1].most",
            "diffusion.template[1].most is not a known option",
        ),
        ({"max_tokens": 1.5}, "max_tokens", "max_tokens must be an integer"),
        ({"seed": 2**65}, "seed", f"seed must be less than {2**63}"),
        ({"seed": -(2**65)}, "seed", f"seed must be greater than or equal to {-(2**63)}"),
        ({"max_tokens": 2**70}, "max_tokens", f"max_tokens must be less than {COUNT_LIMIT}"),
        ({"diffusion": {"steps": 2**70}}, "diffusion.steps", f"diffusion.steps must be less than {COUNT_LIMIT}"),
        ({"temperature": 1e308}, "temperature", "temperature must be less than or equal to 5"),
        ({"temperature": -1.7e308}, "temperature", "temperature must be greater than or equal to 0"),
        ({"presence_penalty": 1e308}, "presence_penalty", "presence_penalty must be less than or equal to 2"),
        ({"lora": [{"name": "a", "scale": 1e308}]}, "lora[0].scale", "lora[0].scale must be less than or equal to 100"),
        (
            {"diffusion": {"template": [{"hole": "b"}, "x", {"hole": "a"}, "y", {"hole": "b"}]}},
            "diffusion.template",
            "diffusion.template: 'b' is the name of two holes",
        ),
        ({"diffusion": {"template": ["x"]}}, "diffusion.template", "diffusion.template must have one hole at least"),
        ({"stop": [1]}, "stop[0]", "stop[0] must be a string"),
        ({"guided_json": {"$ref": "#"}}, "guided_json", None),
        ({"guided_grammar": 'start: start "a"'}, "guided_grammar", None),
        ({"guided_regex": r"[^\s\S]"}, "guided_regex", None),
    ],
)
async def test_a_wrong_part_is_named_by_its_place(
    caller: Caller, fleet: ScriptedFleet, fields: dict[str, Any], param: str, message: str | None
) -> None:
    answer = await caller.post("/v1/completions", {"prompt": "x"} | fields)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert answer.error["message"] == message or message is None
    assert fleet.commands == []


@pytest.mark.parametrize(
    ("body", "word"),
    [(b'{"prompt": "\xff"}', "byte 12"), (b"\xff", "byte 0"), (b'{"a": \xc3}', "byte 6"), (b"{", "JSON")],
)
async def test_a_body_that_is_no_text_is_told_where(caller: Caller, body: bytes, word: str) -> None:
    answer = await caller.post("/generate", body)
    assert (answer.status, answer.error["code"]) == (400, "invalid_json")
    assert word in answer.error["message"] and ("UTF-8" in answer.error["message"]) == ("byte" in word)


async def test_a_tool_and_an_adapter_are_told_in_words_what_their_names_may_have(caller: Caller) -> None:
    tools = [{"type": "function", "function": {"name": "a b"}}]
    chat = {"messages": [{"role": "user", "content": "hi"}], "tools": tools}
    for path, body, param, told in (
        ("/v1/chat/completions", chat, "tools[0].function.name", "must have 1 to 64 letters"),
        ("/admin/loras", {"name": "", "path": "x"}, "name", "must have 1 to 96 letters"),
        ("/admin/loras", {"name": "-a", "path": "x"}, "name", "must have 1 to 96 letters"),
    ):
        answer = await caller.post(path, body)
        assert (answer.status, answer.error["param"]) == (400, param), answer.body
        assert answer.error["message"].startswith(f"{param} {told}") and "^" not in answer.error["message"]
