"""Checks 8, 9, 15 to 24, 27, 29, 30 and 32: what the pods are, and whether the code can live in them."""

import importlib.util
import re
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic_settings import BaseSettings
from starlette.routing import Match

from api.app import create_app
from api.jobs.settings import JobSettings
from api.settings import ApiSettings
from helm.schema import API_SET_BY_CHART, JOBS_SET_BY_CHART, NOT_IN_PODS, WORKER_SET_BY_CHART
from tests.helm.chart import (
    CASES,
    Object,
    Rendered,
    Workload,
    defaults,
    key_of,
    merged,
    render,
    render_case,
    selects,
    values_of,
)
from worker.readiness import Probe
from worker.settings import WorkerSettings

SETTINGS: dict[str, type[BaseSettings]] = {"api": ApiSettings, "jobs": JobSettings, "worker": WorkerSettings}
SET_BY_CHART = {"api": API_SET_BY_CHART, "jobs": JOBS_SET_BY_CHART, "worker": WORKER_SET_BY_CHART}
# What only a server reads: not given to the jobs, though their settings are the api's.
SERVER_ONLY = JOBS_SET_BY_CHART - API_SET_BY_CHART | {
    "host",
    "port",
    "drain_delay_s",
    "ready_without_workers",
    "model_store",
}
SLACK_S = 15
# Every place that a process of ours writes to, with what writes there.
WRITABLE = {"/tmp": "HOME and temporary files", "/cache": "compiled kernels", "/dev/shm": "torch"}


def pools_of(case: str) -> Iterator[tuple[Workload, Object]]:
    """Yield each pool's Deployment with its whole values."""
    values = merged(defaults(), values_of(case))
    for workload in render_case(case).deployments("worker"):
        pool = workload.labels["diffleet/pool"]
        yield workload, merged(values["poolDefaults"], values["pools"][pool])


@pytest.mark.parametrize("case", CASES)
def test_08_each_selector_matches_its_own_pods_and_no_others(case: str) -> None:
    rendered = render_case(case)
    for workload in rendered.deployments():
        selector = workload.owner["spec"]["selector"]
        assert [other.name for other in rendered.workloads() if selects(selector, other.labels)] == [workload.name]
        assert not {"helm.sh/chart", "app.kubernetes.io/version"} & selector["matchLabels"].keys()


@pytest.mark.parametrize("case", CASES)
def test_09_whatever_selects_finds_pods_and_their_ports(case: str) -> None:
    rendered = render_case(case)
    workloads = list(rendered.workloads())

    def ports(selector: Object) -> set[str]:
        found = [workload for workload in workloads if selects(selector, workload.labels)]
        assert found, selector
        return {port["name"] for one in found for container in one.containers for port in container.get("ports", [])}

    for service in rendered.of("Service"):
        names = ports({"matchLabels": service["spec"]["selector"]})
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names
    for budget in rendered.of("PodDisruptionBudget"):
        ports(budget["spec"]["selector"])
    for policy in rendered.of("NetworkPolicy"):
        names = ports(policy["spec"]["podSelector"])
        named = [port["port"] for rule in policy["spec"].get("ingress", []) for port in rule["ports"]]
        assert {port for port in named if isinstance(port, str)} <= names
    for monitor in rendered.of("PodMonitor"):
        assert {one["port"] for one in monitor["spec"]["podMetricsEndpoints"]} <= ports(monitor["spec"]["selector"])
    for monitor in rendered.of("ServiceMonitor"):
        services = [
            one for one in rendered.of("Service") if selects(monitor["spec"]["selector"], one["metadata"]["labels"])
        ]
        (service,) = services
        assert {one["port"] for one in monitor["spec"]["endpoints"]} <= {
            port["name"] for port in service["spec"]["ports"]
        }


@pytest.mark.parametrize("case", CASES)
def test_15_the_grace_period_covers_the_drain_that_the_process_is_told(case: str) -> None:
    rendered = render_case(case)
    for workload in rendered.deployments():
        env = rendered.env(workload)
        if "DIFFLEET_DRAIN_S" not in env:
            assert workload.component == "redis"
            continue
        drain = float(env["DIFFLEET_DRAIN_S"]) + float(env.get("DIFFLEET_DRAIN_DELAY_S", 0))
        assert "lifecycle" not in workload.container, "a preStop hook would eat from the same period"
        assert workload.spec["terminationGracePeriodSeconds"] >= drain + SLACK_S


@pytest.mark.parametrize("case", CASES)
def test_16_gpu_pools_ask_for_their_device_and_cpu_pools_for_none(case: str) -> None:
    rendered = render_case(case)
    for workload, pool in pools_of(case):
        resource, count = pool["gpu"]["resource"], pool["gpu"]["count"]
        amounts = workload.container["resources"]
        tolerated = {toleration.get("key") for toleration in workload.spec.get("tolerations", [])}
        assert rendered.env(workload)["DIFFLEET_DEVICE"] == ("cuda" if count else "cpu")
        assert rendered.env(workload)["DIFFLEET_TENSOR_PARALLEL"] == str(max(1, count))
        assert (resource in tolerated) == bool(count and pool["gpu"]["toleration"])
        rolling = workload.owner["spec"]["strategy"]["rollingUpdate"]
        assert rolling == {"maxSurge": 0, "maxUnavailable": 1}
        if count:
            assert amounts["requests"][resource] == amounts["limits"][resource] == str(count)
        else:
            assert not any("/" in name for kind in ("requests", "limits") for name in amounts[kind])
            assert workload.container["image"].endswith("-cpu")


def test_16_a_surge_is_used_only_when_asked_for() -> None:
    (worker,) = render(
        merged(values_of("default"), {"pools": {"sdar-8b": {"rollout": {"maxSurge": 1, "maxUnavailable": 0}}}})
    ).deployments("worker")
    assert worker.owner["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


@pytest.mark.parametrize("case", CASES)
def test_17_a_loading_worker_has_its_whole_budget(case: str) -> None:
    rendered = render_case(case)
    for workload, pool in pools_of(case):
        startup, budget = workload.container["startupProbe"], pool["startup"]["budgetSeconds"]
        assert budget <= startup["periodSeconds"] * startup["failureThreshold"] < budget + startup["periodSeconds"]
        assert float(rendered.env(workload)["DIFFLEET_LOAD_S"]) == budget
        assert workload.owner["spec"]["progressDeadlineSeconds"] > budget + pool["drain"]["seconds"]
    for workload in rendered.workloads():
        probes = {name: probe for name, probe in workload.container.items() if name.endswith("Probe")}
        assert not any("initialDelaySeconds" in probe for probe in probes.values())
        if "livenessProbe" in probes:
            patience = {n: probes[n]["periodSeconds"] * probes[n]["failureThreshold"] for n in probes}
            assert patience["livenessProbe"] > patience["readinessProbe"]


def probe_paths(component: str) -> set[str]:
    (workload, *_) = render_case("default").deployments(component)
    return {workload.container[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}


def test_18_the_api_serves_the_paths_that_are_probed_and_scraped() -> None:
    routes = create_app(ApiSettings()).routes
    for path in probe_paths("api") | {"/metrics"}:
        request = {"type": "http", "method": "GET", "path": path, "headers": []}
        assert any(route.matches(request)[0] is Match.FULL for route in routes), path


def test_18_the_worker_serves_the_paths_that_are_probed_and_scraped() -> None:
    ready = threading.Event()
    ready.set()
    probe = Probe("127.0.0.1", 0, ready.is_set, lambda: b"")
    probe.start()
    try:
        for path in probe_paths("worker") | {"/metrics"}:
            with urllib.request.urlopen(f"http://127.0.0.1:{probe.port}{path}", timeout=10) as answer:
                assert answer.status == 200
    finally:
        probe.stop()


@pytest.mark.parametrize("component", SETTINGS)
def test_19_settings_and_chart_know_the_same_fields(component: str) -> None:
    set_by_chart = SET_BY_CHART[component]
    fields = set(SETTINGS[component].model_fields)
    assert set_by_chart <= fields
    assert NOT_IN_PODS.keys() <= {field for model in SETTINGS.values() for field in model.model_fields}
    rendered = render_case("everything")
    (workload,) = (w for w in rendered.deployments(component) if w.labels.get("diffleet/pool") in (None, "chat"))
    given = set_by_chart - SERVER_ONLY if component == "jobs" else set_by_chart
    names = {f"DIFFLEET_{field.upper()}" for field in given}
    assert names <= rendered.env(workload).keys()


@pytest.mark.parametrize("case", CASES)
def test_19_each_process_reads_the_environment_that_the_chart_gives_it(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered = render_case(case)
    for workload in rendered.deployments():
        if workload.component not in SETTINGS:
            continue
        model = SETTINGS[workload.component]
        ours = {name: value for name, value in rendered.env(workload).items() if name.startswith("DIFFLEET_")}
        assert {name.removeprefix("DIFFLEET_").lower() for name in ours} <= model.model_fields.keys()
        with monkeypatch.context() as patch:
            for name, value in ours.items():
                patch.setenv(name, value if isinstance(value, str) else "s3cr/et@")
            settings: Any = model()
            defaults: Any = model.model_construct()
        assert {name for name in ours if str(getattr(settings, name[9:].lower())) == "None"} == set()
        assert settings.redis_url.startswith(("redis://", "rediss://")) and settings.redis_url != defaults.redis_url


@pytest.mark.parametrize("case", CASES)
def test_20_commands_are_modules_of_this_project(case: str) -> None:
    for workload in render_case(case).deployments():
        command = workload.container["command"]
        if workload.component == "redis":
            assert command == ["valkey-server"]
            continue
        interpreter, flag, module = command
        assert (interpreter, flag) == ("python", "-m")
        assert importlib.util.find_spec(f"{module}.__main__"), module


def test_20_the_jobs_read_the_settings_of_the_api_and_their_own_on_top() -> None:
    assert not render_case("default").deployments("jobs")
    rendered = render_case("everything")
    (jobs,), (api,) = rendered.deployments("jobs"), rendered.deployments("api")
    assert rendered.env(jobs)["DIFFLEET_QUEUE_LIMIT"] == rendered.env(api)["DIFFLEET_QUEUE_LIMIT"] == "2000000"
    assert (rendered.env(jobs)["DIFFLEET_LOG_LEVEL"], rendered.env(api)["DIFFLEET_LOG_LEVEL"]) == ("info", "debug")


@pytest.mark.parametrize(
    ("volume", "secret", "setting"),
    [
        ("keys", "api-keys", "DIFFLEET_API_KEYS_FILE"),
        ("webhooks", "webhook-secrets", "DIFFLEET_WEBHOOK_SECRETS_FILE"),
    ],
)
def test_24_api_keys_and_what_signs_webhooks_are_mounted_secrets(volume: str, secret: str, setting: str) -> None:
    rendered = render_case("everything")
    for component in ("api", "jobs"):
        (workload,) = rendered.deployments(component)
        assert workload.volumes[volume]["secret"]["secretName"] == secret
        (mount,) = (one for one in workload.container["volumeMounts"] if one["name"] == volume)
        (item,) = workload.volumes[volume]["secret"]["items"]
        assert mount["readOnly"] is True
        assert rendered.env(workload)[setting] == f"{mount['mountPath']}/{item['path']}"


ALLOWED_VOLUMES = {
    "configMap",
    "secret",
    "emptyDir",
    "projected",
    "downwardAPI",
    "csi",
    "persistentVolumeClaim",
    "ephemeral",
    "image",
}


@pytest.mark.parametrize("case", CASES)
def test_21_pods_meet_the_restricted_standard(case: str) -> None:
    for workload in render_case(case).workloads():
        spec = workload.spec
        context = spec["securityContext"]
        assert not any(spec.get(name) for name in ("hostNetwork", "hostPID", "hostIPC", "hostUsers"))
        assert context["runAsNonRoot"] is True and context["seccompProfile"] == {"type": "RuntimeDefault"}
        if case in {"zero", "openshift"}:
            assert not {"runAsUser", "runAsGroup", "fsGroup"} & context.keys()
        else:
            assert min(context["runAsUser"], context["runAsGroup"], context["fsGroup"]) > 0
        for container in workload.containers:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False and security["privileged"] is False
            assert security["capabilities"] == {"drop": ["ALL"]} and security["runAsNonRoot"] is True
            assert not any("hostPort" in port for port in container.get("ports", []))
        kinds = {kind for volume in workload.volumes.values() for kind in volume if kind != "name"}
        assert kinds <= ALLOWED_VOLUMES | ({"hostPath"} if case == "host-path" else set())


@pytest.mark.parametrize("case", CASES)
def test_22_the_root_is_read_only_and_every_writable_place_is_bounded(case: str) -> None:
    for workload in render_case(case).workloads():
        for volume in workload.volumes.values():
            assert "emptyDir" not in volume or volume["emptyDir"].get("sizeLimit"), volume
        for container in workload.containers:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
            writable = {path for path, mount in mounts.items() if not mount.get("readOnly")}
            if container["name"] == "worker":
                assert writable == set(WRITABLE)
                assert all(mount["readOnly"] for path, mount in mounts.items() if path not in WRITABLE)
            elif workload.component != "redis" and container["name"] != "model":
                assert writable == {"/tmp"}
            assert {mount["name"] for mount in mounts.values()} <= workload.volumes.keys()


def test_22_caches_of_libraries_lie_in_writable_places() -> None:
    rendered = render_case("default")
    for workload in rendered.deployments():
        env = rendered.env(workload)
        folders = {
            name: value for name, value in env.items() if name == "HOME" or name.endswith(("_HOME", "_DIR", "TMPDIR"))
        }
        assert {"HOME", "TMPDIR"} <= folders.keys()
        places = {"/tmp"} if workload.component == "api" else set(WRITABLE)
        for name, folder in folders.items():
            assert any(folder == place or folder.startswith(f"{place}/") for place in places), (name, folder)


@pytest.mark.parametrize("case", CASES)
def test_23_no_pod_holds_a_token_and_nothing_is_granted(case: str) -> None:
    rendered = render_case(case)
    assert not rendered.of("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")
    accounts = {one["metadata"]["name"] for one in rendered.of("ServiceAccount")}
    for account in rendered.of("ServiceAccount"):
        assert account["automountServiceAccountToken"] is False
    for workload in rendered.workloads():
        assert workload.spec["automountServiceAccountToken"] is False
        assert workload.spec["enableServiceLinks"] is False
        assert workload.spec["serviceAccountName"] in (accounts or {"diffleet"})


_SECRET_NAME = re.compile(r"PASSWORD|TOKEN$|SECRET|API_KEY$|CREDENTIAL", re.IGNORECASE)


@pytest.mark.parametrize("case", CASES)
def test_24_secrets_are_referred_to_never_rendered(case: str) -> None:
    rendered = render_case(case)
    assert not rendered.of("Secret")
    for one in rendered.of("ConfigMap"):
        # A name that ends so holds where a mounted Secret lies, see test_24_api_keys_and_what_signs_webhooks_...
        assert not [key for key in one["data"] if _SECRET_NAME.search(key) and not key.endswith("_FILE")]
        assert not re.search(r"://[^/\s\"]*:[^/\s\"@]+@", str(one["data"]))
    for workload in rendered.workloads():
        for container in workload.containers:
            for variable in container.get("env", []):
                if _SECRET_NAME.search(variable["name"]):
                    assert variable["valueFrom"].keys() == {"secretKeyRef"}, variable["name"]


def test_24_each_role_gets_its_own_credentials_only() -> None:
    rendered = render_case("private-tls")
    for component in ("api", "worker"):
        (workload,) = rendered.deployments(component)
        references = [value["secretKeyRef"] for value in rendered.env(workload).values() if isinstance(value, dict)]
        assert references == [
            {"name": "redis-users", "key": f"{component}-user"},
            {"name": "redis-users", "key": f"{component}-password"},
        ]


def others(rendered: Rendered, pool: str) -> dict[tuple[str, str], Object]:
    return {key_of(one): one for one in rendered.objects if not one["metadata"]["name"].endswith(f"worker-{pool}")}


def test_27_a_pool_that_comes_or_goes_changes_nothing_else() -> None:
    base = values_of("pools")
    before = others(render(base), "spare")
    assert others(render(merged(base, {"pools": {"spare": {"enabled": True}}})), "spare") == before
    gone = others(render(merged(base, {"pools": {"rare": {"enabled": False}}})), "rare")
    assert gone == {key: one for key, one in before.items() if not key[1].endswith("worker-rare")}


@pytest.mark.parametrize("case", CASES)
def test_29_budgets_for_disruptions_have_one_bound_that_lets_nodes_drain(case: str) -> None:
    rendered = render_case(case)
    for budget in rendered.of("PodDisruptionBudget"):
        spec = budget["spec"]
        bounds = {"minAvailable", "maxUnavailable"} & spec.keys()
        assert len(bounds) == 1
        if "minAvailable" in bounds:
            (workload,) = (w for w in rendered.deployments() if selects(spec["selector"], w.labels))
            assert spec["minAvailable"] < workload.owner["spec"]["replicas"]


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        ("default", "persistentVolumeClaim"),
        ("image-volume", "image"),
        ("host-path", "hostPath"),
        ("init-model", "emptyDir"),
    ],
)
def test_30_the_worker_reads_its_model_from_a_read_only_mount(case: str, kind: str) -> None:
    rendered = render_case(case)
    (workload,) = rendered.deployments("worker")
    assert kind in workload.volumes["model"]
    (mount,) = (one for one in workload.container["volumeMounts"] if one["name"] == "model")
    assert mount["readOnly"] is True
    folder = rendered.env(workload)["DIFFLEET_MODEL"]
    assert folder == mount["mountPath"] or folder.startswith(f"{mount['mountPath']}/")


def test_30_only_the_init_container_may_write_the_model() -> None:
    (workload,) = render_case("init-model").deployments("worker")
    (init,) = workload.spec["initContainers"]
    assert init["image"] == "registry.example.com/tools/fetch:3.1"
    assert {mount["mountPath"] for mount in init["volumeMounts"] if not mount.get("readOnly")} == {"/model", "/tmp"}


@pytest.mark.parametrize("case", CASES)
def test_32_pods_spread_over_their_own_kind(case: str) -> None:
    for workload in render_case(case).workloads():
        for constraint in workload.spec.get("topologySpreadConstraints", []):
            assert selects(constraint["labelSelector"], workload.labels)
            assert constraint["labelSelector"]["matchLabels"].items() >= {
                ("app.kubernetes.io/component", workload.component)
            }


def test_32_placement_reaches_every_pod_hooks_too() -> None:
    rendered = render_case("everything")
    for workload in rendered.workloads():
        spec = workload.spec
        assert spec["nodeSelector"]["kubernetes.io/arch"] == "amd64"
        assert {"key": "all", "operator": "Exists"} in spec["tolerations"]
        assert spec["schedulerName"] == "binpack" and spec["affinity"]
        assert spec["priorityClassName"] == ("front" if workload.component == "api" else "serving")
    (api,) = rendered.deployments("api")
    assert api.spec["nodeSelector"]["role"] == "front" and "podAntiAffinity" in api.spec["affinity"]
    (worker,) = render_case("openshift").deployments("worker")
    assert worker.spec["runtimeClassName"] == "rocm"


@pytest.mark.parametrize(
    ("case", "folder"), [("everything", "/store/team-a"), ("host-path", "/store"), ("default", None)]
)
def test_the_api_and_every_worker_see_the_same_adapters_and_only_read_them(case: str, folder: str | None) -> None:
    rendered = render_case(case)
    workloads = [*rendered.deployments("api"), *rendered.deployments("worker")]
    assert len(workloads) > 1
    volumes: list[Object] = []
    for workload in workloads:
        assert rendered.env(workload).get("DIFFLEET_MODEL_STORE") == folder
        volumes += [volume for volume in workload.spec["volumes"] if volume["name"] == "store"]
        mounts = [mount for mount in workload.container["volumeMounts"] if mount["name"] == "store"]
        assert mounts == ([{"name": "store", "mountPath": "/store", "readOnly": True}] if folder else [])
    assert len(volumes) == (len(workloads) if folder else 0)
    assert all(volume == volumes[0] for volume in volumes)
