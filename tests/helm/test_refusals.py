"""Values that cannot work are refused at render time with a sentence that names them."""

import json
from pathlib import Path

import helm_python
import pytest

from tests.helm.binaries import CARRIERS, helm
from tests.helm.chart import CHART, NAMESPACE, RELEASE, Object, merged, nested, render
from tests.helm.test_rendering import run_helm

BASE: Object = {"redis": {"host": "redis"}, "pools": {"a": {"model": {"name": "m"}}}}
SCALED: Object = merged(BASE, {"pools": {"a": {"scaling": {"enabled": True}}}})


def pool(**keys: object) -> Object:
    return {"pools": {"a": keys}}


FAULTS: dict[str, tuple[Object, Object, str]] = {
    "no redis": (BASE, {"redis": {"host": ""}}, "redis.host is empty"),
    "two redis": (BASE, {"devRedis": {"enabled": True}}, "redis.host and devRedis.enabled exclude each other"),
    "trial redis with TLS": (
        {"devRedis": {"enabled": True}},
        {"redis": {"tls": {"enabled": True}}},
        "the trial server of devRedis has neither TLS nor users",
    ),
    "trial redis elsewhere": ({"devRedis": {"enabled": True}}, {"redis": {"port": 6380}}, "listens on port 6379"),
    "certificate without TLS": (
        BASE,
        {"redis": {"tls": {"caSecret": "ca"}}},
        "redis.tls.caSecret is set, but redis.tls.enabled is false",
    ),
    "user without secret": (
        BASE,
        {"redis": {"auth": {"usernameKeys": {"keda": "user"}}}},
        "redis.auth.usernameKeys.keda is set, but redis.auth.existingSecret is empty",
    ),
    "secret without password": (
        BASE,
        {"redis": {"auth": {"existingSecret": "s", "passwordKeys": {"keda": ""}}}},
        "redis.auth.passwordKeys.keda is empty",
    ),
    "webhooks without jobs": (
        BASE,
        {"api": {"webhooks": {"existingSecret": "s"}}},
        "api.webhooks.existingSecret is set, but jobs.enabled is false",
    ),
    "webhooks behind a policy": (
        BASE,
        {"api": {"webhooks": {"existingSecret": "s"}}, "jobs": {"enabled": True}},
        "list in jobs.egress where they may go",
    ),
    "policy for an unknown address": (
        BASE,
        {"redis": {"host": "redis.example.com"}},
        "list its addresses in redis.networkPolicy.cidrs",
    ),
    "api drain": (BASE, {"api": {"drain": {"seconds": 41}}}, "api.terminationGracePeriodSeconds is 60; .* = 61"),
    "api delay": (BASE, {"api": {"drain": {"delaySeconds": 21}}}, "api.terminationGracePeriodSeconds is 60; .* = 61"),
    "api bounds": (
        BASE,
        {"api": {"autoscaling": {"enabled": True, "minReplicas": 9}}},
        "api.autoscaling.minReplicas 9 is over maxReplicas 8",
    ),
    "api budget both": (BASE, {"api": {"pdb": {"minAvailable": 1}}}, "api.pdb has maxUnavailable and minAvailable"),
    "api budget none": (BASE, {"api": {"pdb": {"maxUnavailable": None}}}, "api.pdb has neither"),
    "api budget all": (
        BASE,
        {"api": {"pdb": {"maxUnavailable": None, "minAvailable": 2}}},
        "api.pdb.minAvailable 2 with 2 pods at least: no node could ever be drained",
    ),
    "api budget all percent": (
        BASE,
        {"api": {"pdb": {"maxUnavailable": None, "minAvailable": "100%"}}},
        "api.pdb.minAvailable 100%",
    ),
    "api rollout": (BASE, {"api": {"rollout": {"maxSurge": 0}}}, "api.rollout has maxSurge 0 and maxUnavailable 0"),
    "ingress without host": (
        BASE,
        {"api": {"ingress": {"enabled": True}}},
        "api.ingress.enabled needs api.ingress.hosts",
    ),
    "route without gateway": (BASE, {"api": {"gateway": {"enabled": True}}}, "needs api.gateway.parentRefs"),
    "jobs drain": (
        BASE,
        {"jobs": {"enabled": True, "drain": {"seconds": 46}}},
        "jobs.terminationGracePeriodSeconds is 60",
    ),
    "account": (
        BASE,
        {"podDefaults": {"serviceAccount": {"create": False}}},
        "podDefaults.serviceAccount.existingName",
    ),
    "own label": (
        BASE,
        {"commonLabels": {"app.kubernetes.io/name": "x"}},
        "commonLabels: the label app.kubernetes.io/name",
    ),
    "own pod label": (BASE, pool(podLabels={"diffleet/pool": "x"}), "pools.a.podLabels: the label diffleet/pool"),
    "nameless model": (BASE, pool(model={"name": ""}), "pools.a.model.name is empty"),
    "claim": (BASE, pool(model={"source": "pvc"}), "pools.a.model.source is pvc: set model.pvc.claimName"),
    "image": (BASE, pool(model={"source": "image"}), "pools.a.model.source is image: set model.image.reference"),
    "host path": (BASE, pool(model={"source": "hostPath"}), "pools.a.model.source is hostPath: set model.hostPath"),
    "init image": (BASE, pool(model={"source": "init"}), "pools.a.model.source is init: set model.init.image"),
    "claim for one": (
        BASE,
        pool(model={"source": "pvc", "pvc": {"claimName": "c", "accessMode": "ReadWriteOnce"}}, replicas=2),
        "pools.a may have 2 workers, but its claim c is ReadWriteOnce",
    ),
    "claim for one, scaled": (
        SCALED,
        pool(model={"source": "pvc", "pvc": {"claimName": "c", "accessMode": "ReadWriteOncePod"}}),
        "pools.a may have 4 workers, but its claim c is ReadWriteOncePod",
    ),
    "two stores": (
        BASE,
        {"modelStore": {"claimName": "a", "hostPath": "/a"}},
        "modelStore.claimName and modelStore.hostPath exclude each other",
    ),
    "store without a volume": (BASE, {"modelStore": {"path": "a"}}, "modelStore.path is a, but there is no volume"),
    "cache claim": (BASE, pool(compileCache={"type": "pvc"}), "set compileCache.claimName"),
    "pool drain": (BASE, pool(drain={"seconds": 76}), "pools.a.terminationGracePeriodSeconds is 90; .* = 91"),
    "pool rollout": (BASE, pool(rollout={"maxUnavailable": 0}), "pools.a.rollout has maxSurge 0 and maxUnavailable 0"),
    "pool budget": (
        SCALED,
        pool(pdb={"maxUnavailable": None, "minAvailable": 1}),
        "pools.a.pdb.minAvailable 1 with 1 pods at least",
    ),
    "pages": (BASE, pool(settings={"num_pages": 3, "kv_cache_mb": 3}), "num_pages and kv_cache_mb exclude each other"),
    "bounds": (SCALED, pool(scaling={"min": 5}), "pools.a.scaling.min 5 is over max 4"),
    "fallback": (
        SCALED,
        pool(scaling={"fallback": {"replicas": 5}}),
        "pools.a.scaling.fallback.replicas 5 is over max 4",
    ),
    "cooldown": (
        SCALED,
        pool(scaling={"cooldownPeriod": 899}),
        "pools.a.scaling.cooldownPeriod is 899 s, the start budget 900 s: a worker would be taken away while it loads",
    ),
    "first cooldown": (
        SCALED,
        pool(scaling={"initialCooldownPeriod": 0}),
        "pools.a.scaling.initialCooldownPeriod is 0 s",
    ),
    "window": (SCALED, pool(scaling={"scaleDown": {"windowSeconds": 299}}), "a GPU pool needs 300 at least"),
    "prometheus": (SCALED, pool(scaling={"prometheus": {"enabled": True}}), "needs scaling.prometheus.serverAddress"),
    "one model twice": (
        BASE,
        {"pools": {"b": {"model": {"name": "m"}}}},
        'pools.b and pools.a both serve the model "m"',
    ),
}


def test_the_bases_are_fine() -> None:
    assert render(BASE).objects and render(SCALED).objects


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_across_values_is_refused_with_a_sentence(fault: str) -> None:
    base, over, sentence = FAULTS[fault]
    with pytest.raises(helm_python.HelmRenderError, match=sentence):
        render(merged(base, over))


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(helm_python.HelmRenderError) as caught:
        render(merged(BASE, {"redis": {"host": ""}}, pool(drain={"seconds": 300}, compileCache={"type": "pvc"})))
    assert str(caught.value).count("\n    - ") + str(caught.value).count("\n- ") == 3


def test_two_pools_of_one_name_cannot_even_be_written() -> None:
    # They are a map: a second key of one name is YAML's fault. A name that no object can have is refused.
    for name in ("Upper", "-x", "x_y", "x" * 41):
        with pytest.raises(helm_python.HelmValuesError):
            render(merged(BASE, {"pools": {name: {"model": {"name": "other"}}}}))


@pytest.mark.parametrize(
    ("over", "group"),
    [
        ({"pools": {"a": {"scaling": {"enabled": True}}}}, "keda.sh/v1alpha1"),
        ({"monitoring": {"podMonitor": {"enabled": True}}}, "monitoring.coreos.com/v1"),
        ({"monitoring": {"serviceMonitor": {"enabled": True}}}, "monitoring.coreos.com/v1"),
        ({"monitoring": {"rules": {"enabled": True}}}, "monitoring.coreos.com/v1"),
        ({"api": {"gateway": {"enabled": True, "parentRefs": [{"name": "edge"}]}}}, "gateway.networking.k8s.io/v1"),
    ],
)
def test_34_objects_of_an_absent_api_are_refused_unless_told_otherwise(
    over: Object, group: str, tmp_path: Path
) -> None:
    values = tmp_path / "values.json"
    values.write_text(json.dumps(merged(BASE, over)))
    arguments = ["template", RELEASE, str(CHART), "--namespace", NAMESPACE, "-f", str(values)]
    binary = helm(CARRIERS[-1])
    assert f"the cluster has no {group}" in run_helm(binary, tmp_path, *arguments, expect=1)
    run_helm(binary, tmp_path, *arguments, "--api-versions", group)
    run_helm(binary, tmp_path, *arguments, "--set", "checkApis=false")


def test_30_image_volumes_need_a_kubernetes_that_has_them(tmp_path: Path) -> None:
    values = str(CHART / "ci" / "image-volume-values.yaml")
    arguments = ["template", RELEASE, str(CHART), "-f", values, "--kube-version"]
    binary = helm(CARRIERS[-1])
    assert "needs Kubernetes >= 1.33" in run_helm(binary, tmp_path, *arguments, "1.32.9", expect=1)
    run_helm(binary, tmp_path, *arguments, "1.33.0")


@pytest.mark.parametrize(
    "path", ["pools.a.gpu.count", "pools.a.scaling.fallback.replicas", "podDefaults.security.runAsUser"]
)
def test_a_number_out_of_range_is_refused_by_the_schema(path: str) -> None:
    value = 17 if path.endswith("count") else 0
    with pytest.raises(helm_python.HelmValuesError):
        render(merged(SCALED, nested(path, value)))


def test_settings_are_for_the_schema_what_they_are_for_the_process() -> None:
    for settings in ({"max_rows": 3}, {"dtype": "float16"}, {"lease_ms": 10}, {"token_budget": 0}, {"DTYPE": "auto"}):
        with pytest.raises(helm_python.HelmValuesError):
            render(merged(BASE, pool(settings=settings)))
    render(merged(BASE, pool(settings={"dtype": "bfloat16", "lease_ms": 400})))
