"""Check 31: a small evaluator of network policies proves who may talk to whom."""

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pytest

from tests.helm.chart import (
    CASES,
    NAMESPACE,
    Object,
    Rendered,
    Workload,
    merged,
    render,
    render_case,
    selects,
    values_of,
)


@dataclass(frozen=True)
class End:
    """A pod, or an address outside the cluster."""

    labels: Mapping[str, str] | None = None
    namespace: Mapping[str, str] | None = None
    address: str = "10.244.0.9"
    ports: Mapping[str, int] | None = None


HERE = {"kubernetes.io/metadata.name": NAMESPACE}


def end_of(workload: Workload) -> End:
    ports = {port["name"]: port["containerPort"] for port in workload.container.get("ports", [])}
    return End(workload.labels, HERE, ports=ports)


def pod(namespace: str, **labels: str) -> End:
    return End(labels, {"kubernetes.io/metadata.name": namespace})


INTERNET = End(address="203.0.113.7")


def allowed(rendered: Rendered, source: End, target: End, port: int | str, protocol: str = "TCP") -> bool:
    """Tell whether both ends' policies let a connection through; an end that no policy selects lets everything."""
    return _passes(rendered, "Egress", source, target, target, port, protocol) and _passes(
        rendered, "Ingress", target, source, target, port, protocol
    )


def _passes(
    rendered: Rendered, direction: str, subject: End, peer: End, target: End, port: int | str, protocol: str
) -> bool:
    if subject.labels is None or subject.namespace != HERE:
        return True
    policies = [
        policy["spec"]
        for policy in rendered.of("NetworkPolicy")
        if direction in policy["spec"]["policyTypes"] and selects(policy["spec"]["podSelector"], subject.labels)
    ]
    rules = [rule for policy in policies for rule in policy.get(direction.lower(), [])]
    peers = "to" if direction == "Egress" else "from"
    return not policies or any(
        _ports(rule.get("ports"), target, port, protocol) and _peers(rule.get(peers), peer) for rule in rules
    )


def _ports(ports: Iterable[Object] | None, target: End, port: int | str, protocol: str) -> bool:
    number = (target.ports or {}).get(port) if isinstance(port, str) else port
    return ports is None or any(
        one["protocol"] == protocol
        and ((target.ports or {}).get(one["port"]) if isinstance(one["port"], str) else one["port"]) == number
        for one in ports
    )


def _peers(peers: list[Object] | None, peer: End) -> bool:
    if not peers:  # an absent and an empty list both mean everyone
        return True
    for one in peers:
        if "ipBlock" in one:
            block, address = one["ipBlock"], ipaddress.ip_address(peer.address)
            excepted = any(address in ipaddress.ip_network(part) for part in block.get("except", []))
            if address in ipaddress.ip_network(block["cidr"]) and not excepted:
                return True
            continue
        if peer.labels is None or peer.namespace is None:
            continue
        where = (
            selects(one["namespaceSelector"], peer.namespace) if "namespaceSelector" in one else peer.namespace == HERE
        )
        if where and selects(one.get("podSelector", {}), peer.labels):
            return True
    return False


DNS = pod("kube-system", app="coredns")
PROMETHEUS = pod("monitoring", app="prometheus")
STRANGER = pod("elsewhere", app="stranger")
REDIS = pod("data", app="redis")


def ends(case: str) -> tuple[Rendered, dict[str, list[End]]]:
    rendered = render_case(case)
    found: dict[str, list[End]] = {}
    for workload in rendered.workloads():
        found.setdefault(workload.component, []).append(end_of(workload))
    return rendered, found


GUARDED = tuple(case for case in CASES if render_case(case).of("NetworkPolicy"))


@pytest.mark.parametrize("case", GUARDED)
def test_31_every_pod_is_denied_what_is_not_allowed(case: str) -> None:
    rendered, found = ends(case)
    for component, pods in found.items():
        for one in pods:
            for port in (1, 22, 443, 8000, 9100):
                if component != "api":
                    assert not allowed(rendered, STRANGER, one, port), (component, port)
            assert not allowed(rendered, one, STRANGER, 8080)


@pytest.mark.parametrize("case", GUARDED)
def test_31_the_fleet_reaches_dns_and_its_redis(case: str) -> None:
    rendered, found = ends(case)
    values = values_of(case)
    port = values.get("redis", {}).get("port", 6379)
    cidrs = values.get("redis", {}).get("networkPolicy", {}).get("cidrs", [])
    host = values.get("redis", {}).get("host", "")
    if "redis" in found:
        redis = found["redis"][0]
    elif cidrs:
        redis = End(address=str(next(ipaddress.ip_network(cidrs[0]).hosts())))
    elif host[0].isdigit():
        redis = End(address=host)
    else:
        redis = REDIS
    for component in found.keys() - {"redis"}:
        for one in found[component]:
            assert allowed(rendered, one, DNS, 53, "UDP") and allowed(rendered, one, DNS, 53)
            assert allowed(rendered, one, redis, port), component
            assert not allowed(rendered, one, INTERNET, port)


@pytest.mark.parametrize("case", GUARDED)
def test_31_workers_answer_prometheus_only_and_never_call_the_internet(case: str) -> None:
    rendered, found = ends(case)
    for worker in found["worker"]:
        assert allowed(rendered, PROMETHEUS, worker, "metrics")
        assert not allowed(rendered, STRANGER, worker, "metrics")
        assert not allowed(rendered, found["api"][0], worker, "metrics")
        if case != "init-model":  # whose init container fetches the checkpoint
            assert not any(allowed(rendered, worker, INTERNET, port) for port in (80, 443, 6379))


def test_31_the_init_container_s_way_out_is_the_one_that_was_given() -> None:
    rendered, found = ends("init-model")
    (worker,) = found["worker"]
    assert allowed(rendered, worker, INTERNET, 443)
    assert not allowed(rendered, worker, INTERNET, 80)
    assert not allowed(rendered, worker, End(address="10.3.4.5"), 443)


@pytest.mark.parametrize("case", GUARDED)
def test_31_the_api_is_called_by_the_chart_s_tests_and_by_whom_the_values_name(case: str) -> None:
    rendered, found = ends(case)
    (api,) = found["api"]
    for test in found["test"]:
        assert allowed(rendered, test, api, "http")
    open_to_all = "apiFrom" not in values_of(case).get("networkPolicy", {})
    assert allowed(rendered, STRANGER, api, "http") == open_to_all
    ingress = End({"app": "nginx"}, {"name": "ingress"})
    assert allowed(rendered, ingress, api, "http")
    assert not allowed(rendered, ingress, api, 22)


def test_31_a_narrowed_api_still_answers_prometheus() -> None:
    rendered, found = ends("everything")
    assert allowed(rendered, PROMETHEUS, found["api"][0], "http")


def test_31_the_trial_redis_answers_the_fleet_and_keda_alone() -> None:
    rendered, found = ends("trial")
    (redis,) = found["redis"]
    assert allowed(rendered, found["worker"][0], redis, "redis")
    assert allowed(rendered, pod("keda", app="keda-operator"), redis, "redis")
    assert not allowed(rendered, STRANGER, redis, "redis")


def test_31_chosen_redis_pods_are_the_only_ones() -> None:
    chosen = {"podSelector": {"matchLabels": {"app": "redis"}}, "namespaceSelector": {"matchLabels": {"team": "data"}}}
    rendered = render(merged(values_of("default"), {"redis": {"networkPolicy": chosen}}))
    (worker,) = rendered.deployments("worker")
    for labels, namespace, expected in (
        ({"app": "redis"}, {"team": "data"}, True),
        ({"app": "redis"}, {"team": "web"}, False),
        ({"app": "other"}, {"team": "data"}, False),
    ):
        assert allowed(rendered, end_of(worker), End(labels, namespace), 6379) == expected


def test_31_policies_can_be_switched_off() -> None:
    assert not render_case("zero").of("NetworkPolicy")
