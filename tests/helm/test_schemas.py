"""Checks 3, 4 and 5: objects against Kubernetes' and KEDA's schemas, values against the chart's."""

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any

import helm_python
import pytest
from jsonschema import Draft7Validator

from helm.schema import values_schema
from tests.helm.chart import (
    CASES,
    FLOOR,
    FLOORS,
    MINORS,
    Object,
    defaults,
    key_of,
    merged,
    nested,
    render,
    render_case,
    values_of,
)
from tests.helm.schemas import UnknownKind, faults

SCHEMA = values_schema()


@pytest.mark.parametrize("minor", MINORS)
def test_03_every_object_of_every_case_is_strictly_valid(minor: int) -> None:
    checked: list[Object] = []
    wrong: list[str] = []
    for case in CASES:
        if minor < FLOORS.get(case, FLOOR):
            continue
        for one in render_case(case).objects:
            if one in checked:
                continue
            checked.append(one)
            wrong += [f"{case}: {'/'.join(key_of(one))}: {fault}" for fault in faults(one, minor)]
    assert not wrong
    assert len(checked) > 100


def test_03_a_kind_without_a_schema_is_an_error() -> None:
    with pytest.raises(UnknownKind):
        faults({"apiVersion": "example.com/v1", "kind": "Thing"}, 34)


MUTATIONS = {
    "misspelt key": {"spec": {"cooldownPeriods": 3}},
    "wrong type": {"spec": {"pollingInterval": "15"}},
    "wrong fallback": {"spec": {"fallback": {"failureThreshold": 3, "replicas": 1, "behavior": "highest"}}},
    "unquoted metadata": {"spec": {"triggers": [{"type": "redis-streams", "metadata": {"streamLength": 25}}]}},
    "no trigger type": {"spec": {"triggers": [{"metadata": {}}]}},
    "wrong modifier": {"spec": {"advanced": {"scalingModifiers": {"target": 25}}}},
    "misspelt advice": {"spec": {"advanced": {"horizontalPodAutoscalerConfig": {"behaviour": {}}}}},
    "wrong window": {
        "spec": {
            "advanced": {
                "horizontalPodAutoscalerConfig": {"behavior": {"scaleDown": {"stabilizationWindowSeconds": "600"}}}
            }
        }
    },
}


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_04_the_schema_of_keda_finds_a_planted_fault(mutation: Object) -> None:
    (scaled,) = render_case("scaling").of("ScaledObject")
    assert not faults(scaled, 34)
    assert faults(merged(scaled, mutation), 34)


def test_04_the_schema_of_trigger_authentications_finds_a_planted_fault() -> None:
    (authentication,) = render_case("private-tls").of("TriggerAuthentication")
    assert not faults(authentication, 34)
    broken = copy.deepcopy(authentication)
    del broken["spec"]["secretTargetRef"][0]["key"]
    assert faults(broken, 34)


def test_05_the_schema_is_one_and_takes_the_defaults_and_all_cases() -> None:
    Draft7Validator.check_schema(SCHEMA)
    validator = Draft7Validator(SCHEMA)
    for values in (defaults(), *(merged(defaults(), values_of(case)) for case in CASES)):
        assert [error.message for error in validator.iter_errors(values)] == []


def resolve(schema: Any) -> Any:
    while "$ref" in schema or "allOf" in schema:
        schema = schema["allOf"][0] if "allOf" in schema else SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
    return schema


def keys(schema: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every key that the schema knows, with its own schema."""
    for key, inner in resolve(schema).get("properties", {}).items():
        inner = resolve(inner)
        here = f"{path}.{key}" if path else key
        yield here, inner
        yield from keys(inner, here)


KEYS = dict(keys(SCHEMA))
KEYS |= {f"pools.x.{path}": schema for path, schema in keys({"$ref": "#/definitions/pool"})}


def wrong_value(schema: Any) -> Any:
    """Return a value of a type that the schema has not."""
    types = {part.get("type") for part in schema.get("anyOf", [schema])}
    return {"not": "this"} if "object" not in types and "array" not in types else 17


@cache
def section(name: str) -> Draft7Validator:
    """Return the validator of one top-level key: the whole schema takes too long for hundreds of values."""
    return Draft7Validator({**SCHEMA["properties"][name], "definitions": SCHEMA["definitions"]})


def taken(path: str, value: Any) -> bool:
    """Tell whether the schema takes this value there, everything else being a default."""
    name, _, rest = path.partition(".")
    before = defaults().get(name)
    return section(name).is_valid(merged(before, nested(rest, value)) if rest and isinstance(before, dict) else value)


def test_05_every_key_refuses_a_value_of_another_type() -> None:
    assert [path for path, schema in KEYS.items() if taken(path, wrong_value(schema))] == []
    assert len(KEYS) > 250


def test_05_every_closed_object_refuses_a_key_that_it_does_not_know() -> None:
    closed = [path for path, schema in KEYS.items() if "properties" in schema]
    assert [path for path in closed if taken(f"{path}.surprise", 1)] == []
    assert not Draft7Validator(SCHEMA).is_valid(merged(defaults(), {"surprise": 1}))


def test_05_only_maps_that_are_passed_on_take_any_key() -> None:
    passed_on = {
        path.rpartition(".")[2]
        for path, schema in KEYS.items()
        if schema.get("type") == "object" and "properties" not in schema
    }
    assert passed_on == {
        *("commonLabels", "labels", "podLabels", "annotations", "podAnnotations", "nodeSelector", "affinity"),
        *("podSelector", "namespaceSelector", "requests", "limits", "pools"),
    }


def test_05_helm_enforces_the_schema_and_names_the_key() -> None:
    with pytest.raises(helm_python.HelmValuesError, match="max_row"):
        render(merged(values_of("trial"), {"pools": {"demo": {"settings": {"max_row": 3}}}}))


@pytest.mark.parametrize(
    "path",
    [
        "images.api.tag",
        "images.worker.tag",
        "pools.demo.image",
        "pools.demo.model.init.image",
        "pools.demo.model.image.reference",
    ],
)
def test_05_no_image_can_be_latest(path: str) -> None:
    value = "latest" if path.endswith("tag") else "models/x:latest"
    with pytest.raises(helm_python.HelmValuesError):
        render(merged(values_of("trial"), nested(path, value)))
