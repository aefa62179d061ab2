"""Checks 6 and 7: every value has an effect, and zero and false are values like others."""

from typing import Any

import pytest

from helm.readme import documented, leaves
from tests.helm.chart import CHART, Object, defaults, merged, nested, render, render_text, values_of

# What a value needs around it to matter: the case, and more on top.
_POOL = "pools.chat"
_BASES: dict[str, tuple[str, Object]] = {
    "nameOverride": ("default", {}),
    "checkApis": ("default", {"api": {"gateway": {"parentRefs": [{"name": "edge"}]}}}),
    "global": ("default", {}),
    "images": ("trial", {"pools": {"gpu": {"model": {"name": "gpu"}}}}),
    "devRedis": ("trial", {}),
    "redis.tls.enabled": ("public-tls", {}),
    "redis.addresses": ("default", {"redis": {"kind": "cluster", "host": "", "addresses": ["a.data.svc:6379"]}}),
    "redis.service": ("default", {"redis": {"kind": "sentinel", "host": "", "addresses": ["a.data.svc:26379"]}}),
    "redis.kind": ("default", {}),
    "api.replicas": ("default", {}),
    "jobs.enabled": ("everything", {"api": {"webhooks": {"existingSecret": ""}}}),
    "podDefaults.security": ("default", {}),
    "podDefaults.nodeSelector": ("default", {}),
    "podDefaults.affinity": ("default", {}),
    "podDefaults.priorityClassName": ("default", {}),
    "podDefaults.serviceAccount.existingName": (
        "default",
        {"podDefaults": {"serviceAccount": {"create": False, "existingName": "a"}}},
    ),
    "networkPolicy.kedaFrom": ("trial", {}),
    "poolDefaults.model.pvc": (
        "default",
        {"poolDefaults": {"model": {"source": "pvc", "pvc": {"claimName": "models"}}}},
    ),
    "poolDefaults.model.image": ("image-volume", {}),
    "poolDefaults.model.hostPath": ("host-path", {}),
    "modelStore.claimName": ("default", {}),
    "modelStore.hostPath": ("host-path", {}),
    "modelStore.path": ("everything", {}),
    "poolDefaults.model.init": ("init-model", {}),
    "poolDefaults.compileCache.claimName": ("host-path", {}),
    "poolDefaults.scaling.enabled": ("default", {}),
    "poolDefaults.replicas": ("default", {}),
}

# Values that cannot be changed alone, or whose kind alone does not tell a second value.
_OTHERS: dict[str, object] = {
    "redis.host": "other.example.com",
    "redis.kind": "cluster",
    "redis.addresses": ["b.data.svc:6379"],
    "redis.networkPolicy.cidrs": ["10.99.0.0/16"],
    "devRedis.maxMemory": "100mb",
    "images.api.digest": "sha256:" + "1" * 64,
    "images.worker.digest": "sha256:" + "1" * 64,
    "images.worker.cpuDigest": "sha256:" + "1" * 64,
    "images.devRedis.digest": "sha256:" + "1" * 64,
    "podDefaults.tolerations": [{"key": "other", "operator": "Exists"}],
    "podDefaults.extraEnv": [{"name": "OTHER", "value": "1"}],
    "api.settings": {"queue_limit": 77},
    "jobs.settings": {"max_batches": 3},
    "api.ingress.hosts": ["other.example.com"],
    "api.ingress.path": "/llm",
    "api.gateway.parentRefs": [{"name": "other"}],
    "api.gateway.hostnames": ["other.example.com"],
    "api.gateway.path": "/llm",
    "api.service.type": "NodePort",
    "api.topologySpread": [],
    "api.pdb.maxUnavailable": "25%",
    "api.rollout.maxUnavailable": 1,
    "poolDefaults.model.name": "other",
    "poolDefaults.model.source": "init",
    "poolDefaults.model.path": "other",
    "poolDefaults.model.pvc.accessMode": "ReadWriteMany",
    "poolDefaults.model.hostPath": "/other",
    "modelStore.hostPath": "/other",
    "poolDefaults.gpu.count": 0,
    "poolDefaults.gpu.resource": "amd.com/gpu",
    "poolDefaults.compileCache.type": "pvc",
    "poolDefaults.scaling.lanes": ["std"],
    "poolDefaults.settings": {"dtype": "float32"},
    "poolDefaults.pdb.maxUnavailable": "25%",
    "poolDefaults.topologySpread": [{"topologyKey": "zone", "maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway"}],
    "jobs.topologySpread": [],
    "monitoring.dashboards.label": "other",
    "monitoring.dashboards.labelValue": "yes",
    "extraObjects": [],
    "pools": {"other": {"model": {"name": "other"}}},
}
# What must stand beside the changed value, without which it is refused.
_WITH: dict[str, Object] = {
    "redis.kind": {"redis": {"host": "", "addresses": ["a.data.svc:6379"]}},
    "api.pdb.minAvailable": {"api": {"pdb": {"maxUnavailable": None}}},
    "poolDefaults.pdb.minAvailable": {"poolDefaults": {"pdb": {"maxUnavailable": None}}},
    "devRedis.enabled": {"redis": {"host": "redis"}},
}
# What must stand on both sides of the comparison.
_TOGETHER: dict[str, Object] = {
    "poolDefaults.model.source": {"poolDefaults": {"model": {"init": {"image": "fetch:1"}}}},
    "poolDefaults.compileCache.type": {"poolDefaults": {"compileCache": {"claimName": "kernels"}}},
    "poolDefaults.startup.budgetSeconds": {
        "poolDefaults": {"scaling": {"cooldownPeriod": 9000, "initialCooldownPeriod": 9000}}
    },
    "podDefaults.serviceAccount.create": {"podDefaults": {"serviceAccount": {"existingName": "a"}}},
}
_NO_EFFECT = {
    "poolDefaults.model.pvc.accessMode": "only judges whether several workers may mount the claim: test_refusals",
    "checkApis": "only judges: test_refusals",
}


def other(path: str, value: Any) -> Any:
    """Return another value that is allowed there."""
    if path in _OTHERS:
        return _OTHERS[path]
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case None:
            return 1
        case {}:
            return {"other": "value"}
        case list():
            return [{"to": [{"ipBlock": {"cidr": "10.88.0.0/16"}}]}] if path.endswith("egress") else other_peers(path)
        case str() if {"requests", "limits"} & set(path.split(".")):
            return "3"
        case str() if path.endswith("pullPolicy"):
            return "Always"
        case str() if path.endswith(("Size", "sizeLimit")):
            return "3Gi"
        case str() if path.endswith("interval"):
            return "77s"
        case str():
            return "other"
        case _:
            raise AssertionError(f"{path}: {value!r}")


def other_peers(path: str) -> list[Any]:
    if path.endswith(("command", "imagePullSecrets")):
        return ["other"]
    if path.endswith("env"):
        return [{"name": "OTHER", "value": "1"}]
    if path.endswith("olerations"):
        return [{"key": "other", "operator": "Exists"}]
    return [{"namespaceSelector": {"matchLabels": {"name": "other"}}}]


def base_of(path: str) -> Object:
    best = max((prefix for prefix in _BASES if path == prefix or path.startswith(f"{prefix}.")), key=len, default="")
    case, more = _BASES[best] if best else ("everything", {})
    return merged(values_of(case), more)


def placed(path: str, value: object, base: Object) -> Object:
    """Return the value where it applies: what pools start from is told in every pool that may say otherwise."""
    if not path.startswith("poolDefaults."):
        return nested(path, value)
    rest = path.removeprefix("poolDefaults.")
    if rest == "model.name":
        return {"pools": {next(iter(base["pools"])): nested(rest, value)}}
    return {"pools": {pool: nested(rest, value) for pool in base["pools"]}}


def beside(table: dict[str, Object], path: str) -> Object:
    more = table.get(path, {})
    if "poolDefaults" in more:
        return {"pools": dict.fromkeys(base_of(path)["pools"], more["poolDefaults"])}
    return more


def paths() -> list[str]:
    return [path for path in leaves(defaults()) if path not in _NO_EFFECT]


def at(values: Any, path: str) -> Any:
    for key in path.split("."):
        values = values[key]
    return values


def effective(path: str, base: Object) -> Any:
    """Return the value that holds in the first place where it applies."""
    if path.startswith("poolDefaults."):
        pool = next(iter(base["pools"].values()))
        return at(merged(defaults(), base, {"poolDefaults": merged(base.get("poolDefaults", {}), pool)}), path)
    return at(merged(defaults(), base), path)


@pytest.mark.parametrize("path", paths())
def test_06_every_value_changes_some_render(path: str) -> None:
    base = merged(base_of(path), beside(_TOGETHER, path))
    changed = merged(base, beside(_WITH, path), placed(path, other(path, effective(path, base)), base))
    assert render_text(changed) != render_text(base)


def test_06_every_value_is_described() -> None:
    assert len(documented(CHART / "values.yaml")) > 200
    assert all(value.text.endswith(".") or value.text.endswith("`") for value in documented(CHART / "values.yaml"))


@pytest.mark.parametrize("path", [path for path in paths() if isinstance(at(defaults(), path), bool)])
def test_07_false_is_obeyed(path: str) -> None:
    base = merged(base_of(path), beside(_TOGETHER, path))
    now = effective(path, base)
    changed = merged(base, beside(_WITH, path), placed(path, not now, base))
    assert render_text(merged(base, placed(path, now, base))) != render_text(changed)


_BEHAVIOR = "spec.advanced.horizontalPodAutoscalerConfig.behavior"
ZEROS = {
    "api.replicas": ("Deployment", "demo-diffleet-api", "spec.replicas"),
    "api.rollout.maxUnavailable": ("Deployment", "demo-diffleet-api", "spec.strategy.rollingUpdate.maxUnavailable"),
    "api.pdb.maxUnavailable": ("PodDisruptionBudget", "demo-diffleet-api", "spec.maxUnavailable"),
    "api.drain.delaySeconds": ("ConfigMap", "demo-diffleet-api", "data.DIFFLEET_DRAIN_DELAY_S"),
    "api.drain.seconds": ("ConfigMap", "demo-diffleet-api", "data.DIFFLEET_DRAIN_S"),
    "api.autoscaling.scaleDownWindowSeconds": (
        "HorizontalPodAutoscaler",
        "demo-diffleet-api",
        "spec.behavior.scaleDown.stabilizationWindowSeconds",
    ),
    "pools.x.replicas": ("Deployment", "demo-diffleet-worker-x", "spec.replicas"),
    "pools.x.drain.seconds": ("ConfigMap", "demo-diffleet-worker-x", "data.DIFFLEET_DRAIN_S"),
    "pools.x.rollout.maxSurge": ("Deployment", "demo-diffleet-worker-x", "spec.strategy.rollingUpdate.maxSurge"),
    "pools.x.pdb.maxUnavailable": ("PodDisruptionBudget", "demo-diffleet-worker-x", "spec.maxUnavailable"),
    "pools.x.settings.threads": ("ConfigMap", "demo-diffleet-worker-x", "data.DIFFLEET_THREADS"),
    "pools.s.scaling.min": ("ScaledObject", "demo-diffleet-worker-s", "spec.minReplicaCount"),
    "pools.s.scaling.activation": (
        "ScaledObject",
        "demo-diffleet-worker-s",
        "spec.advanced.scalingModifiers.activationTarget",
    ),
    "pools.s.scaling.scaleUp.windowSeconds": (
        "ScaledObject",
        "demo-diffleet-worker-s",
        f"{_BEHAVIOR}.scaleUp.stabilizationWindowSeconds",
    ),
}


@pytest.mark.parametrize("path", ZEROS)
def test_07_zero_is_obeyed(path: str) -> None:
    base: Object = {
        "redis": {"host": "redis"},
        "api": {"autoscaling": {"enabled": "autoscaling" in path}},
        "pools": {"x": {"model": {"name": "x"}}, "s": {"model": {"name": "s"}, "scaling": {"enabled": True}}},
    }
    kind, name, where = ZEROS[path]
    assert at(render(merged(base, nested(path, 0))).one(kind, name), where) in (0, "0")
