"""Sentinels and Clusters: one description for the pods, their network policies and KEDA."""

from typing import Any

import helm_python
import pytest

from shared.cluster import ClusterUrl
from shared.sentinel import Sentinels
from tests.helm.chart import Object, merged, render

HOSTS = ["redis-0.data.svc:26379", "redis-1.data.svc:26379"]
POOL: Object = {"pools": {"chat": {"model": {"name": "m"}, "scaling": {"enabled": True}}}, "checkApis": False}


def redis(**more: Any) -> Object:
    return merged(POOL, {"redis": {"addresses": HOSTS, **more}})


def triggers(rendered: Any) -> list[Any]:
    (scaled,) = rendered.of("ScaledObject")
    return scaled["spec"]["triggers"]


def url_of(rendered: Any) -> str:
    urls = {rendered.env(workload)["DIFFLEET_REDIS_URL"] for workload in rendered.deployments()}
    (url,) = urls
    return url


def test_sentinels_are_asked_by_the_pods_and_by_keda() -> None:
    rendered = render(redis(kind="sentinel", service="fleet", db=3))
    asked = Sentinels.from_url(url_of(rendered))
    assert asked.hosts == (("redis-0.data.svc", 26379), ("redis-1.data.svc", 26379))
    assert (asked.service, asked.db) == ("fleet", 3)
    for trigger in triggers(rendered):
        assert trigger["type"] == "redis-sentinel-streams"
        told = trigger["metadata"]
        assert (told["addresses"], told["sentinelMaster"], told["databaseIndex"]) == (",".join(HOSTS), "fleet", "3")


@pytest.mark.parametrize("tls", [False, True])
def test_a_cluster_is_named_by_some_of_its_nodes(tls: bool) -> None:
    rendered = render(redis(kind="cluster", tls={"enabled": tls}))
    url = url_of(rendered)
    assert ClusterUrl.from_url(url).seeds == (("redis-0.data.svc", 26379), ("redis-1.data.svc", 26379))
    assert url.startswith("rediss+cluster://" if tls else "redis+cluster://")
    for trigger in triggers(rendered):
        assert trigger["type"] == "redis-cluster-streams"
        assert trigger["metadata"]["addresses"] == ",".join(HOSTS) and "databaseIndex" not in trigger["metadata"]
        assert (trigger["metadata"].get("enableTLS") == "true") == tls


def test_pods_may_reach_the_sentinels_and_the_primary_that_they_name() -> None:
    rendered = render(redis(kind="sentinel"))
    policies = [one for one in rendered.of("NetworkPolicy") if one["metadata"]["name"].endswith("-api")]
    ports = {port["port"] for rule in policies[0]["spec"]["egress"] for port in rule["ports"]}
    assert {6379, 26379} <= ports


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"redis": {"kind": "server", "host": "r"}}, "redis.addresses is for sentinels and Clusters"),
        ({"redis": {"kind": "cluster", "addresses": []}}, "redis.kind is cluster: list some host:port"),
        ({"redis": {"kind": "cluster", "host": "r"}}, "leave redis.host empty"),
        ({"redis": {"kind": "cluster", "db": 2}}, "a Cluster has no database but 0"),
        ({"redis": {"kind": "sentinel", "tls": {"enabled": True}}}, "through sentinels there is no TLS"),
        ({"redis": {"kind": "cluster"}, "jobs": {"enabled": True}}, "name a server in jobs.settings.jobs_redis_url"),
        ({"redis": {"kind": "cluster", "addresses": ["a.example.com:1"]}}, "a.example.com is outside the cluster"),
    ],
)
def test_what_cannot_be_together_is_refused(more: Object, said: str) -> None:
    with pytest.raises(helm_python.HelmRenderError, match=said):
        render(merged(redis(), more))


def test_jobs_on_a_cluster_have_a_server_for_their_own_queue() -> None:
    jobs = {"enabled": True, "settings": {"jobs_redis_url": "redis://arq.data.svc:6379/0"}}
    rendered = render(merged(redis(kind="cluster"), {"jobs": jobs}))
    (workload,) = rendered.deployments("jobs")
    assert rendered.env(workload)["DIFFLEET_JOBS_REDIS_URL"] == "redis://arq.data.svc:6379/0"
