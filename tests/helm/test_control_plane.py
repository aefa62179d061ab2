"""Check 43, opt-in: the chart on a real control plane, and what the cluster of check 41 must agree with.

`python -m tests.helm.control_plane` builds it once; without it these tests skip themselves.
"""

import json
import os
import subprocess
import tempfile
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helm.binaries import CARRIERS, Carrier, helm
from tests.helm.chart import Object, merged
from tests.helm.control_plane import ControlPlane, built, chart_for_1_20, control_plane

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
