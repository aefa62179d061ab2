"""Strict schemas of every kind that the chart renders, for each Kubernetes minor."""

import copy
import functools
import json
import re
from importlib.resources import files
from typing import Any

from cloudcoil.models.keda import v1alpha1 as keda
from cloudcoil.models.prometheus_operator import v1 as prometheus
from jsonschema import Draft202012Validator
from jsonschema.protocols import Validator
from referencing import Registry, Resource

from tests.helm.chart import Object

Schema = dict[str, Any]


class UnknownKind(Exception):
    """Neither Kubernetes nor our set of custom resources has it."""


def faults(one: Object, minor: int) -> list[str]:
    """Return what is wrong with an object under Kubernetes 1.`minor`; raises `UnknownKind`."""
    validator = _custom(one["apiVersion"], one["kind"]) or _kubernetes(one["apiVersion"], one["kind"], minor)
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in validator.iter_errors(one)]


@functools.cache
def _kubernetes(api_version: str, kind: str, minor: int) -> Validator:
    group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    folder = files("kubernetes_validate") / "kubernetes-json-schema" / f"v1.{minor}.0-local-strict"
    path = folder / f"{kind.lower()}-{group}.json"
    if not path.is_file():
        raise UnknownKind(f"{api_version} {kind} in Kubernetes 1.{minor}")
    return Draft202012Validator(json.loads(path.read_text()), registry=_definitions(minor))


@functools.cache
def _definitions(minor: int) -> Registry[Any]:
    path = files("kubernetes_validate") / "kubernetes-json-schema" / f"v1.{minor}.0-local-strict" / "_definitions.json"
    return Resource.from_contents(json.loads(path.read_text())) @ Registry()


@functools.cache
def _custom(api_version: str, kind: str) -> Validator | None:
    schema = {
        ("keda.sh/v1alpha1", "ScaledObject"): _scaled_object,
        ("keda.sh/v1alpha1", "TriggerAuthentication"): lambda: keda.TriggerAuthentication.model_json_schema(),
        ("monitoring.coreos.com/v1", "ServiceMonitor"): lambda: prometheus.ServiceMonitor.model_json_schema(),
        ("monitoring.coreos.com/v1", "PodMonitor"): lambda: prometheus.PodMonitor.model_json_schema(),
        ("monitoring.coreos.com/v1", "PrometheusRule"): lambda: prometheus.PrometheusRule.model_json_schema(),
        ("gateway.networking.k8s.io/v1", "HTTPRoute"): lambda: copy.deepcopy(_HTTP_ROUTE),
    }.get((api_version, kind))
    return None if schema is None else Draft202012Validator(_closed(schema()))


def _scaled_object() -> Schema:
    """KEDA 2.16's schema with what 2.17 added."""
    schema = keda.ScaledObject.model_json_schema()
    behaviors = ["static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"]
    schema["$defs"]["Fallback"]["properties"]["behavior"] = {"enum": behaviors}
    return schema


def _closed(schema: Any) -> Any:
    """Refuse keys that a schema does not name, except where it names a type for them."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items() if key not in {"title", "description", "default"}}
    if "properties" in closed and "additionalProperties" not in closed:
        closed["additionalProperties"] = False
    return closed


# No package carries the Gateway API's schemas; these are the fields of its HTTPRoute that the chart can set.
_REFERENCE = {
    "type": "object",
    "properties": {
        "group": {"type": "string"},
        "kind": {"type": "string"},
        "namespace": {"type": "string"},
        "name": {"type": "string"},
        "sectionName": {"type": "string"},
        "port": {"type": "integer"},
    },
    "required": ["name"],
}
_HTTP_ROUTE: Schema = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "gateway.networking.k8s.io/v1"},
        "kind": {"const": "HTTPRoute"},
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "properties": {
                "parentRefs": {"type": "array", "items": _REFERENCE},
                "hostnames": {"type": "array", "items": {"type": "string"}},
                "rules": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {
                            "matches": {
                                "type": "array",
                                "items": {
                                    "type": "object",
                                    "properties": {
                                        "path": {
                                            "type": "object",
                                            "properties": {
                                                "type": {"enum": ["Exact", "PathPrefix", "RegularExpression"]},
                                                "value": {"type": "string", "pattern": "^/"},
                                            },
                                        }
                                    },
                                },
                            },
                            "timeouts": {
                                "type": "object",
                                "properties": {
                                    name: {"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
                                    for name in ("request", "backendRequest")
                                },
                            },
                            "backendRefs": {"type": "array", "items": _REFERENCE},
                        },
                    },
                },
            },
        },
    },
}
