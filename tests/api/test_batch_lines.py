import json
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.jobs.lines import Faults, read_lines, request_count, request_id
from shared.keys import model_of

URL = "/v1/chat/completions"


async def pieces(content: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(content), size):
        yield content[start : start + size]


def row(custom_id: str) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": URL, "body": {"model": "m"}}).encode()


@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=8, unique=True), st.integers(1, 64))
async def test_lines_are_read_however_the_bytes_are_cut(names: list[str], size: int) -> None:
    lines = await read_lines(pieces(b"\n\n".join(map(row, names)), size), URL)
    assert isinstance(lines, list)
    assert [(line.number, line.custom_id) for line in lines] == [
        (2 * index + 1, name) for index, name in enumerate(names)
    ]


async def test_all_faults_are_told_with_their_lines() -> None:
    content = b"\n".join([row("a"), b"[]", row("a"), b"{", row("b").replace(b"POST", b"GET"), row("c" * 513)])
    faults = await read_lines(pieces(content, 1000), URL)
    assert isinstance(faults, Faults)
    assert [(fault["line"], fault["code"], fault["param"]) for fault in faults.entries] == [
        (2, "invalid_value", None),
        (3, "duplicate_custom_id", "custom_id"),
        (4, "invalid_json_line", None),
        (5, "invalid_value", "method"),
        (6, "invalid_value", "custom_id"),
    ]
    empty = await read_lines(pieces(b"\n", 1), URL)
    assert isinstance(empty, Faults) and empty.entries[0]["code"] == "empty_file"


@pytest.mark.parametrize(
    ("change", "param", "code", "message"),
    [
        ({"method": "GET"}, "method", "invalid_value", "method must be POST"),
        ({"method": None}, "method", "invalid_value", "method must be POST"),
        ({"custom_id": 5}, "custom_id", "invalid_value", "custom_id must be a string"),
        ({"url": []}, "url", "invalid_value", "url must be a string"),
        ({"body": "x"}, "body", "invalid_value", "body must be an object"),
    ],
)
async def test_a_field_of_a_line_says_what_it_must_be(
    change: dict[str, object], param: str, code: str, message: str
) -> None:
    line = json.dumps(json.loads(row("a")) | change).encode()
    faults = await read_lines(pieces(line, 1000), URL)
    assert isinstance(faults, Faults)
    assert faults.entries == [{"code": code, "line": 1, "message": message, "param": param}]


@pytest.mark.parametrize("field", ["custom_id", "method", "url", "body"])
async def test_a_field_that_a_line_lacks_is_required(field: str) -> None:
    whole = json.loads(row("a"))
    del whole[field]
    faults = await read_lines(pieces(json.dumps(whole).encode(), 1000), URL)
    assert isinstance(faults, Faults)
    told = {"code": "missing_required_parameter", "line": 1, "message": f"{field} is required", "param": field}
    assert faults.entries == [told]


@pytest.mark.parametrize(
    ("encoding", "message"),
    [
        ("utf-8-sig", "this line begins with a byte order mark: write the file without one"),
        ("utf-16", "this line is not UTF-8: byte 0 is no part of a character"),
        ("latin-1", "this line is not UTF-8: byte 15 is no part of a character"),
    ],
)
async def test_a_file_that_is_not_plain_utf_8_is_told_so(encoding: str, message: str) -> None:
    content = row("a").decode().replace('"a"', '"\xe9"').encode(encoding)
    faults = await read_lines(pieces(content, 1000), URL)
    assert isinstance(faults, Faults)
    assert (faults.entries[0]["line"], faults.entries[0]["message"]) == (1, message)


def test_a_line_makes_its_choices_of_each_of_its_prompts() -> None:
    for body, count in (
        ({"messages": []}, 1),
        ({"messages": [], "n": 3}, 3),
        ({"prompt": ["a", "b"], "n": 2}, 4),
        ({"prompt": "a", "n": "x"}, 1),
        ({"input": ["a"] * 5}, 5),
        ({"input": "a" * 9}, 1),
        ({"input": [], "n": -4}, 1),
        ({"input": ["a"] * 9999}, 2048),
    ):
        assert request_count(body) == count


@given(st.sampled_from(["m", "org/m"]), st.integers(1, 50_000), st.integers(0, 64))
def test_a_line_has_one_request_id_for_ever_and_no_other_line_has_it(model: str, number: int, index: int) -> None:
    name = request_id(model, "batch_1", number, index)
    assert name == request_id(model, "batch_1", number, index)
    assert model_of(name) == model
    others = {
        request_id(model, "batch_2", number, index),
        request_id(model, "batch_1", number + 1, index),
        request_id(model, "batch_1", number, index + 1),
    }
    assert name not in others and len(others) == 3
