"""Check 43, opt-in: the chart on a real control plane, and what the cluster of check 41 must agree with.

`python -m tests.helm.control_plane` builds it once; without it these tests skip themselves.
"""

import json
import os
import subprocess
import tempfile
import time
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.client import FleetClient
from shared.queue import WorkerQueue
from tests.helm.autoscaler import Autoscaler
from tests.helm.binaries import CARRIERS, Carrier, helm
from tests.helm.chart import Object, merged, render
from tests.helm.control_plane import HPA_SYNC_S, ControlPlane, built, chart_for_1_20, control_plane
from tests.helm.external_metrics import ExternalMetrics, hpa_for
from tests.shared.protocol_for_tests import MODEL, card_of, command_for, finish

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not built(), reason="python -m tests.helm.control_plane builds the control plane"),
]
WORKERS = "demo-diffleet-worker-chat"
VALUES: Object = {
    "devRedis": {"enabled": True},
    "checkApis": False,
    "pools": {"chat": {"model": {"name": "demo"}, "replicas": 2}},
}
helms = pytest.mark.parametrize("carrier", CARRIERS, ids=lambda one: one.helm)


@pytest.fixture
def plane() -> Iterator[ControlPlane]:
    with tempfile.TemporaryDirectory(prefix="df-") as folder, control_plane(Path(folder)) as plane:
        plane.add_node("gpu-0", devices=1)
        plane.add_node("gpu-1", devices=1)
        yield plane


@pytest.fixture
def chart(tmp_path: Path) -> Path:
    return chart_for_1_20(tmp_path)


def run_helm(plane: ControlPlane, carrier: Carrier, *arguments: str) -> str:
    homes = {f"HELM_{kind}_HOME": str(plane.kubeconfig.parent / kind) for kind in ("CACHE", "CONFIG", "DATA")}
    environment = {"PATH": os.environ["PATH"], "KUBECONFIG": str(plane.kubeconfig), "HOME": "/nowhere", **homes}
    done = subprocess.run([helm(carrier), *arguments], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def upgrade(plane: ControlPlane, chart: Path, values: Object, carrier: Carrier = CARRIERS[-1]) -> None:
    file = chart.parent / "values.json"
    file.write_text(json.dumps(values))
    run_helm(plane, carrier, "upgrade", "--install", "demo", str(chart), "-f", str(file))


def changed(values: Object, **pool: Any) -> Object:
    """Return values whose pods differ from those before."""
    return merged(values, {"pools": {"chat": {"settings": {"abort_poll_ms": 30}, **pool}}})


def crd_of(kind: str) -> Object:
    """Return a kind of KEDA's that takes any fields; its schema is check 4's."""
    plural = f"{kind.lower()}s"
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1alpha1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    names = {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.keda.sh"},
        "spec": {"group": "keda.sh", "names": names, "scope": "Namespaced", "versions": [version]},
    }


@helms
def test_43_a_release_is_installed_upgraded_rolled_back_and_removed(
    plane: ControlPlane, chart: Path, carrier: Carrier
) -> None:
    upgrade(plane, chart, VALUES, carrier)
    plane.until(lambda: plane.rolled_out(WORKERS), "two workers")
    first = {pod["metadata"]["name"] for pod in plane.pods()}
    upgrade(plane, chart, changed(VALUES), carrier)
    plane.until(lambda: plane.rolled_out(WORKERS), "two new workers")
    assert not first & {pod["metadata"]["name"] for pod in plane.pods()}
    run_helm(plane, carrier, "rollback", "demo", "1")
    plane.until(lambda: plane.rolled_out(WORKERS), "two workers of the first revision")
    history = json.loads(run_helm(plane, carrier, "history", "demo", "-o", "json"))
    assert [one["revision"] for one in history] == [1, 2, 3]
    run_helm(plane, carrier, "uninstall", "demo")
    plane.until(lambda: not plane.pods(), "all are gone")


def test_43_without_a_surge_a_full_pool_is_replaced_one_by_one(plane: ControlPlane, chart: Path) -> None:
    upgrade(plane, chart, VALUES)
    plane.until(lambda: plane.rolled_out(WORKERS), "two workers")
    assert {pod["spec"]["nodeName"] for pod in plane.pods()} == {"gpu-0", "gpu-1"}
    upgrade(plane, chart, changed(VALUES))
    most = 0

    def done() -> bool:
        nonlocal most
        most = max(most, sum("nodeName" in pod["spec"] for pod in plane.pods()))
        return plane.rolled_out(WORKERS)

    plane.until(done, "the rollout ends")
    # As in the cluster of check 41: a device never has two pods.
    assert most == 2


def test_43_a_surge_on_a_full_pool_waits_for_ever_while_the_old_workers_serve_on(
    plane: ControlPlane, chart: Path
) -> None:
    surging = merged(VALUES, {"pools": {"chat": {"rollout": {"maxSurge": 1, "maxUnavailable": 0}}}})
    upgrade(plane, chart, surging)
    plane.until(lambda: plane.rolled_out(WORKERS), "two workers")
    old = {pod["metadata"]["name"] for pod in plane.pods()}
    upgrade(plane, chart, changed(surging))

    def unschedulable() -> list[Object]:
        reasons = [(pod, pod["status"].get("conditions", [])) for pod in plane.pods()]
        return [pod for pod, ones in reasons if any(one.get("reason") == "Unschedulable" for one in ones)]

    plane.until(unschedulable, "a pod that fits nowhere")
    (new,) = unschedulable()
    assert new["metadata"]["name"] not in old
    assert old <= {pod["metadata"]["name"] for pod in plane.pods()}
    assert plane.deployment(WORKERS)["status"]["readyReplicas"] == 2


def test_43_the_budget_lets_one_worker_be_evicted_at_a_time(plane: ControlPlane, chart: Path) -> None:
    upgrade(plane, chart, VALUES)
    plane.until(lambda: plane.rolled_out(WORKERS), "two workers")
    budget = "/apis/policy/v1beta1/namespaces/default/poddisruptionbudgets/" + WORKERS
    plane.until(lambda: plane.get(budget)["status"].get("disruptionsAllowed") == 1, "the budget is counted")
    plane.leave_s = 3600.0
    answers: list[int] = []
    for pod in plane.pods():
        name = pod["metadata"]["name"]
        eviction = {"kind": "Eviction", "apiVersion": "policy/v1beta1", "metadata": {"name": name}}
        try:
            plane.call("POST", f"/api/v1/namespaces/default/pods/{name}/eviction", eviction)
            answers.append(201)
        except urllib.error.HTTPError as error:
            answers.append(error.code)
    assert answers == [201, 429]


@helms
def test_43_turning_scaling_on_keeps_the_workers_that_there_are(
    plane: ControlPlane, chart: Path, carrier: Carrier
) -> None:
    for crd in (crd_of("ScaledObject"), crd_of("TriggerAuthentication")):
        plane.call("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
    path = "/apis/keda.sh/v1alpha1/namespaces/default/scaledobjects"
    plane.until(lambda: plane.get(path) is not None, "KEDA's kind is served")
    upgrade(plane, chart, VALUES, carrier)
    plane.until(lambda: plane.rolled_out(WORKERS), "two workers")
    scaling = merged(VALUES, {"pools": {"chat": {"scaling": {"enabled": True, "max": 4}}}})
    upgrade(plane, chart, scaling, carrier)
    assert plane.deployment(WORKERS)["spec"]["replicas"] == 2
    (scaled,) = plane.get(path)["items"]
    assert scaled["spec"]["scaleTargetRef"]["name"] == WORKERS
    plane.scale(WORKERS, 4)
    upgrade(plane, chart, changed(scaling), carrier)
    assert plane.deployment(WORKERS)["spec"]["replicas"] == 4


class Replayed(Autoscaler):
    """The autoscaler of check 42, told what the real one was told."""

    def look(self) -> bool:
        return True


async def test_43_a_real_hpa_scales_on_the_queue_of_a_real_redis_as_the_simulated_one_does(
    plane: ControlPlane, chart: Path, tmp_path: Path, redis_url: str, fleet_redis: Any
) -> None:
    rules = {"windowSeconds": 0, "pods": 2, "periodSeconds": 4}, {"windowSeconds": 8, "pods": 1, "periodSeconds": 8}
    scaling = {"enabled": True, "min": 1, "max": 4, "target": 4, "scaleUp": rules[0], "scaleDown": rules[1]}
    pool = {"gpu": {"count": 0}, "replicas": 1, "model": {"name": MODEL}}
    upgrade(plane, chart, merged(VALUES, {"pools": {"chat": pool}}))
    plane.until(lambda: plane.rolled_out(WORKERS), "one worker")
    (scaled,) = render(merged(VALUES, {"pools": {"chat": {**pool, "scaling": scaling}}})).of("ScaledObject")

    queue = Autoscaler(scaled, fleet_redis, replicas=1)

    def outstanding() -> float:
        assert queue.look()
        return queue.value

    seen: list[tuple[float, int]] = []

    def at(replicas: int) -> Callable[[], bool]:
        def look() -> bool:
            now = plane.deployment(WORKERS)["spec"]["replicas"]
            if not seen or seen[-1][1] != now:
                seen.append((time.monotonic(), now))
            return now == replicas

        return look

    async with FleetClient.connect(redis_url) as fleet:
        queue_of_m = WorkerQueue.connect(redis_url, MODEL, "w", lease_ms=3_600_000, slots=64)
        await queue_of_m.publish_card(card_of(MODEL))
        with ExternalMetrics(plane, tmp_path, outstanding) as metrics:
            plane.call("POST", "/apis/autoscaling/v2beta2/namespaces/default/horizontalpodautoscalers", hpa_for(scaled))
            plane.until(lambda: at(1)() and bool(metrics.told), "the HPA looks at an empty queue")
            for _ in range(14):
                await fleet.submit(command_for(MODEL))
            plane.until(at(4), "four workers for fourteen requests")
            for claim in await queue_of_m.take(14):
                await finish(queue_of_m, claim)
            plane.until(at(1), "one worker for none")
            plane.until(lambda: plane.rolled_out(WORKERS), "the others have gone")
        await queue_of_m.close()

    # The numbers of the research: up by two, then by one, as 14 need 4; down one by one.
    assert [replicas for _, replicas in seen] == [1, 3, 4, 3, 2, 1]

    replay, replayed = Replayed(scaled, fleet_redis, replicas=1, sync_s=HPA_SYNC_S), [(seen[0][0], 1)]
    for now, value in metrics.told:
        replay.value = value
        replay.sync(now)
        if replay.replicas != replayed[-1][1]:
            replayed.append((now, replay.replicas))
    assert [replicas for _, replicas in replayed] == [replicas for _, replicas in seen]
