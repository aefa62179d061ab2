"""Checks 10 to 14: KEDA's objects."""

import re
from typing import Any

import pytest

from shared.commands import LANES, Lane
from shared.keys import Keys, partition
from tests.helm.chart import CASES, Object, Rendered, defaults, merged, render, render_case, values_of

SCALED = tuple(case for case in CASES if render_case(case).of("ScaledObject"))


def pool_of(case: str, scaled: Object) -> Object:
    values = merged(defaults(), values_of(case))
    return merged(values["poolDefaults"], values["pools"][scaled["metadata"]["labels"]["diffleet/pool"]])


def streams(scaled: Object) -> list[Object]:
    return [trigger for trigger in scaled["spec"]["triggers"] if trigger["type"] == "redis-streams"]


@pytest.mark.parametrize("case", CASES)
def test_10_each_scaled_object_owns_one_deployment_alone(case: str) -> None:
    rendered = render_case(case)
    deployments = {workload.name for workload in rendered.deployments()}
    targets = [one["spec"]["scaleTargetRef"]["name"] for one in rendered.of("ScaledObject", "HorizontalPodAutoscaler")]
    assert len(targets) == len(set(targets)) and set(targets) <= deployments
    for scaled in rendered.of("ScaledObject"):
        assert scaled["metadata"]["name"] == scaled["spec"]["scaleTargetRef"]["name"]


@pytest.mark.parametrize("case", CASES)
def test_11_replicas_are_set_exactly_where_nothing_scales(case: str) -> None:
    rendered = render_case(case)
    scaled = {one["spec"]["scaleTargetRef"]["name"] for one in rendered.of("ScaledObject", "HorizontalPodAutoscaler")}
    for workload in rendered.deployments():
        assert ("replicas" in workload.owner["spec"]) == (workload.name not in scaled)


@pytest.mark.parametrize("case", SCALED)
def test_12_bounds_and_patience_fit_the_start_of_a_worker(case: str) -> None:
    for scaled in render_case(case).of("ScaledObject"):
        spec, pool = scaled["spec"], pool_of(case, scaled)
        assert 0 <= spec["minReplicaCount"] <= spec["maxReplicaCount"]
        # KEDA refuses idle replicas other than 0, and with 0 it would skip the cooldown's sense.
        assert "idleReplicaCount" not in spec
        assert 1 <= spec["fallback"]["replicas"] <= spec["maxReplicaCount"]
        assert spec["fallback"]["behavior"] == "currentReplicasIfHigher"
        assert spec["cooldownPeriod"] >= pool["startup"]["budgetSeconds"] <= spec["initialCooldownPeriod"]
        down = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
        assert down["stabilizationWindowSeconds"] >= (300 if pool["gpu"]["count"] else 0)


@pytest.mark.parametrize("case", SCALED)
def test_13_triggers_reach_the_redis_of_the_pods(case: str) -> None:
    rendered = render_case(case)
    values = merged(defaults(), values_of(case))
    for scaled in rendered.of("ScaledObject"):
        (workload,) = (w for w in rendered.deployments("worker") if w.name == scaled["metadata"]["name"])
        env = rendered.env(workload)
        url = re.fullmatch(r"(rediss?)://([^/]+)/(\d+)(\?ssl_ca_certs=.+)?", env["DIFFLEET_REDIS_URL"])
        assert url
        authentication = authentication_of(rendered, scaled)
        parameters = {
            one["parameter"]
            for source in ("secretTargetRef", "configMapTargetRef")
            for one in authentication.get(source, [])
        }
        for trigger in streams(scaled):
            metadata = trigger["metadata"]
            assert (metadata["address"], metadata["databaseIndex"]) == (url[2], url[3])
            # One of the two switches, never both: KEDA refuses that.
            assert (metadata.get("enableTLS") == "true") + ("tls" in parameters) == (url[1] == "rediss")
            assert ("ca" in parameters) == bool(url[4])
            assert ("password" in parameters) == ("DIFFLEET_REDIS_PASSWORD" in env)
            assert ("username" in parameters) == bool(values["redis"]["auth"]["usernameKeys"]["keda"])


def authentication_of(rendered: Rendered, scaled: Object) -> Object:
    """Return the spec that all triggers on Redis refer to, or nothing."""
    names = {trigger.get("authenticationRef", {}).get("name") for trigger in streams(scaled)}
    (name,) = names
    return rendered.one("TriggerAuthentication", name)["spec"] if name else {}


def test_13_the_switch_for_tls_with_a_private_authority_is_where_the_authentication_looks() -> None:
    rendered = render_case("private-tls")
    (authentication,) = rendered.of("TriggerAuthentication")
    (reference,) = authentication["spec"]["configMapTargetRef"]
    assert rendered.one("ConfigMap", reference["name"])["data"][reference["key"]] == "enable"


@pytest.mark.parametrize("case", SCALED)
def test_13_triggers_watch_the_streams_of_the_model(case: str) -> None:
    for scaled in render_case(case).of("ScaledObject"):
        pool = pool_of(case, scaled)
        lanes: list[Lane] = pool["scaling"]["lanes"]
        assert set(lanes) <= set(LANES)
        expected = {
            Keys(partition(pool["model"]["name"], number)).lane(lane)
            for lane in lanes
            for number in range(pool["partitions"])
        }
        assert {trigger["metadata"]["stream"] for trigger in streams(scaled)} == expected


@pytest.mark.parametrize("case", SCALED)
def test_13_triggers_count_length_and_never_lag(case: str) -> None:
    for scaled in render_case(case).of("ScaledObject"):
        for trigger in streams(scaled):
            assert not {"consumerGroup", "lagCount", "pendingEntriesCount"} & trigger["metadata"].keys()
            assert int(trigger["metadata"]["streamLength"]) >= 1


@pytest.mark.parametrize("case", SCALED)
def test_14_trigger_metadata_is_text_and_trigger_names_are_the_words_of_the_formula(case: str) -> None:
    for scaled in render_case(case).of("ScaledObject"):
        triggers, modifiers = scaled["spec"]["triggers"], scaled["spec"]["advanced"]["scalingModifiers"]
        assert all(isinstance(value, str) for trigger in triggers for value in trigger["metadata"].values())
        names = [trigger["name"] for trigger in triggers]
        assert len(names) == len(set(names))
        assert all(isinstance(modifiers[key], str) for key in ("formula", "target", "activationTarget"))
        assert set(re.findall(r"[A-Za-z_]\w*", modifiers["formula"])) - {"max"} == set(names)


@pytest.mark.parametrize(("rows", "asked", "target"), [(32, 0, "25"), (1, 0, "1"), (8, 0, "6"), (32, 7, "7")])
def test_the_target_is_what_one_worker_should_hold(rows: int, asked: int, target: str) -> None:
    pool: dict[str, Any] = {"model": {"name": "m"}, "maxRows": rows, "scaling": {"enabled": True, "target": asked}}
    (scaled,) = render({"redis": {"host": "redis"}, "pools": {"p": pool}}).of("ScaledObject")
    assert scaled["spec"]["advanced"]["scalingModifiers"]["target"] == target


def test_pausing_is_an_annotation() -> None:
    (paused,) = render_case("one-lane").of("ScaledObject")
    assert paused["metadata"]["annotations"] == {"autoscaling.keda.sh/paused": "true"}
    (held,) = render_case("everything").of("ScaledObject")
    assert held["metadata"]["annotations"] == {"autoscaling.keda.sh/paused-scale-in": "true"}
