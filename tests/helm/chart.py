"""The chart as tests see it: values in, parsed objects out."""

import copy
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import helm_python
import yaml

Object = dict[str, Any]

CHART = Path(__file__).parents[2] / "helm" / "diffleet"
RELEASE = "demo"
NAMESPACE = "prod"

# Least Kubernetes minor of a case, where it is not the chart's own.
FLOOR = 28
FLOORS = {"image-volume": 33}
MINORS = range(28, 38)
CASES = tuple(sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").glob("*-values.yaml")))


class _Loader(yaml.CSafeLoader):
    """Refuses a mapping with the same key twice, which YAML forbids and PyYAML takes."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> Object:
    keys = [loader.construct_object(key) for key, _ in node.value]
    if len(set(keys)) != len(keys):
        raise yaml.YAMLError(f"a key occurs twice: {sorted({key for key in keys if keys.count(key) > 1})}")
    return {str(key): value for key, value in loader.construct_mapping(node, deep=True).items()}


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def parse(text: str) -> list[Object]:
    return [document for document in yaml.load_all(text, _Loader) if document]


def values_of(case: str) -> Object:
    return yaml.safe_load((CHART / "ci" / f"{case}-values.yaml").read_text())


@functools.cache
def defaults() -> Object:
    """Return values.yaml; not to be changed."""
    return yaml.safe_load((CHART / "values.yaml").read_text())


def merged(base: Mapping[str, Any], *more: Mapping[str, Any]) -> Object:
    """Return `base` with `more` laid over it, key by key, as Helm does."""
    result = copy.deepcopy(dict(base))
    for over in more:
        for key, value in over.items():
            if isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
                result[key] = merged(result[key], value)
            else:
                result[key] = copy.deepcopy(value)
    return result


def nested(path: str, value: object) -> Object:
    """Return {"a": {"b": value}} for "a.b"."""
    for key in reversed(path.split(".")):
        value = {key: value}
    assert isinstance(value, dict)
    return value


def render_text(values: Mapping[str, Any], release: str = RELEASE) -> dict[str, str]:
    """Return the text of each template; raises `helm_python.HelmError`."""
    return _render_text(json.dumps(values, sort_keys=True), release)


@functools.cache
def _chart() -> helm_python.Chart:
    return helm_python.Chart.load(str(CHART))


@functools.lru_cache(maxsize=512)
def _render_text(values: str, release: str) -> dict[str, str]:
    # The library knows no API groups but Kubernetes' own.
    whole = merged(json.loads(values), {"checkApis": False})
    return _chart().render(whole, name=release, namespace=NAMESPACE)


def render(values: Mapping[str, Any], release: str = RELEASE) -> "Rendered":
    """Return the objects; raises `helm_python.HelmError`, yaml.YAMLError."""
    return _rendered(json.dumps(values, sort_keys=True), release)


@functools.lru_cache(maxsize=512)
def _rendered(values: str, release: str) -> "Rendered":
    texts = _render_text(values, release)
    return Rendered(tuple(one for path, text in texts.items() if path.endswith(".yaml") for one in parse(text)))


def render_case(case: str) -> "Rendered":
    return render(values_of(case))


@dataclass(frozen=True)
class Rendered:
    """The objects of one render; not to be changed."""

    objects: tuple[Object, ...]

    def of(self, *kinds: str) -> list[Object]:
        return [one for one in self.objects if one["kind"] in kinds]

    def one(self, kind: str, name: str) -> Object:
        (found,) = (one for one in self.of(kind) if one["metadata"]["name"] == name)
        return found

    def workloads(self) -> Iterator["Workload"]:
        """Yield everything that makes pods, the tests' pods too."""
        for one in self.objects:
            if one["kind"] == "Deployment":
                yield Workload(one, one["spec"]["template"])
            elif one["kind"] == "Pod":
                yield Workload(one, one)

    def deployments(self, component: str | None = None) -> list["Workload"]:
        found = [workload for workload in self.workloads() if workload.owner["kind"] == "Deployment"]
        return [workload for workload in found if component in (None, workload.component)]

    def env(self, workload: "Workload", container: Object | None = None) -> dict[str, Any]:
        """Return a container's environment: texts, or the reference for what is in a Secret."""
        container = container or workload.container
        result: dict[str, Any] = {}
        for source in container.get("envFrom", []):
            result |= self.one("ConfigMap", source["configMapRef"]["name"])["data"]
        for variable in container.get("env", []):
            result[variable["name"]] = variable["value"] if "value" in variable else variable["valueFrom"]
        return result


@dataclass(frozen=True)
class Workload:
    owner: Object
    pod: Object

    @property
    def name(self) -> str:
        return self.owner["metadata"]["name"]

    @property
    def labels(self) -> dict[str, str]:
        return self.pod["metadata"]["labels"]

    @property
    def component(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    @property
    def spec(self) -> Object:
        return self.pod["spec"]

    @property
    def container(self) -> Object:
        return self.spec["containers"][0]

    @property
    def containers(self) -> list[Object]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def volumes(self) -> dict[str, Object]:
        return {volume["name"]: volume for volume in self.spec.get("volumes", [])}


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Tell whether a label selector takes these labels."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for rule in selector.get("matchExpressions", []):
        value = labels.get(rule["key"])
        matches = {
            "In": value in rule.get("values", []),
            "NotIn": value not in rule.get("values", []),
            "Exists": value is not None,
            "DoesNotExist": value is None,
        }
        if not matches[rule["operator"]]:
            return False
    return True


def key_of(one: Object) -> tuple[str, str]:
    return one["kind"], one["metadata"]["name"]
