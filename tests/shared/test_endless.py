from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.endless import is_endless

A, B, ROOT = {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, {"$ref": "#"}
NEEDS_ROOT = {"type": "object", "properties": {"next": ROOT}, "required": ["next"]}


@pytest.mark.parametrize(
    "schema",
    [
        ROOT,
        {"$defs": {"a": A}, **A},
        {"$defs": {"a": B, "b": A}, **A},
        {"allOf": [ROOT]},
        {"anyOf": [ROOT, ROOT]},
        NEEDS_ROOT,
        {"type": "array", "items": ROOT, "minItems": 1},
        {"type": "array", "prefixItems": [{"type": "null"}, ROOT], "minItems": 2},
        {"$defs": {"a/b": {"$ref": "#/$defs/a~1b"}}, "$ref": "#/$defs/a~1b"},
        {"type": "array", "minItems": 1, "items": {"type": "object", "properties": {"x": ROOT}, "required": ["x"]}},
    ],
)
def test_a_schema_that_leads_back_to_itself_is_endless(schema: dict[str, Any]) -> None:
    assert is_endless(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "integer"},
        {"anyOf": [ROOT, {"type": "string"}]},
        NEEDS_ROOT | {"required": []},
        NEEDS_ROOT | {"type": ["object", "null"]},
        {"type": "array", "items": ROOT},
        {"type": "array", "prefixItems": [{"type": "null"}, ROOT], "minItems": 1},
        {"type": "object", "properties": {"next": {"anyOf": [ROOT, {"type": "null"}]}}, "required": ["next"]},
        {"$ref": "https://example.com/x"},
        {"$ref": "#/nowhere"},
        {"type": "object", "required": "next", "properties": 5, "anyOf": 7, "$defs": {"a": 5}},
        {"const": {"$ref": 5}},
    ],
)
def test_a_schema_with_a_way_out_is_not(schema: dict[str, Any]) -> None:
    assert not is_endless(schema)


@given(st.integers(1, 20), st.integers(0, 19), st.booleans())
def test_a_chain_ends_where_its_last_link_does(length: int, back: int, ends: bool) -> None:
    links: dict[str, Any] = {str(number): {"$ref": f"#/$defs/{number + 1}"} for number in range(length)}
    links[str(length)] = {"type": "null"} if ends else {"$ref": f"#/$defs/{min(back, length)}"}
    assert is_endless({"$defs": links, "$ref": "#/$defs/0"}) is not ends


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.sampled_from(["#", "#/$defs/a", "object", "array", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "$ref",
                    "type",
                    "properties",
                    "required",
                    "items",
                    "prefixItems",
                    "minItems",
                    "allOf",
                    "anyOf",
                    "$defs",
                    "a",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["$ref", "type", "properties", "items", "anyOf", "$defs", "minItems"]), JSON))
def test_whatever_stands_in_a_schema_is_judged(schema: dict[str, Any]) -> None:
    assert is_endless(schema) in (True, False)
