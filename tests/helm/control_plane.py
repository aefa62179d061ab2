"""A real control plane (check 43, opt-in): etcd, apiserver, controller manager and scheduler of Kubernetes 1.20.

No registry has their binaries; Debian's source package of 1.20 is the whole tree, and Debian has the Go that builds it.
`python -m tests.helm.control_plane` fetches with apt and builds, once per environment: 120 MB, some minutes, Debian 12.
The tests skip themselves until then.

1.20 is older than what the chart asks for, so a copy of the chart says so: other versions of two APIs, one field less.
Nodes and the kubelet are pretended here: objects, and a thread that calls pods running and lets them go.
"""

import argparse
import contextlib
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.certificates import self_signed
from tests.helm.chart import CHART, Object

PLACE = Path(sys.prefix) / "share" / "diffleet-tests" / "control-plane-1.20.2"
PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
_PACKAGES = ("golang-1.19-go", "golang-1.19-src", "etcd-server", "golang-github-modern-go-reflect2-dev")
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_TOKEN = "admin"
HPA_SYNC_S = 1
_TO_1_20 = (
    ("Chart.yaml", 'kubeVersion: ">=1.28.0-0"', 'kubeVersion: ">=0.0.0-0"'),
    ("templates/worker/pdb.yaml", "policy/v1\n", "policy/v1beta1\n"),
    ("templates/api/pdb.yaml", "policy/v1\n", "policy/v1beta1\n"),
    ("templates/api/hpa.yaml", "autoscaling/v2\n", "autoscaling/v2beta2\n"),
    ("templates/_pod.tpl", "unhealthyPodEvictionPolicy: AlwaysAllow\n", ""),
)


def built() -> bool:
    return all((PLACE / name).exists() for name in PROGRAMS)


def chart_for_1_20(folder: Path) -> Path:
    """Return a copy of the chart that this control plane takes."""
    chart = Path(shutil.copytree(CHART, folder / "diffleet"))
    for name, old, new in _TO_1_20:
        text = (chart / name).read_text()
        assert old in text, f"{name} has no {old!r}"
        (chart / name).write_text(text.replace(old, new))
    return chart


# --- build


def build(work: Path) -> None:
    """Fetch and compile into `PLACE`; raises CalledProcessError."""
    sources = work / "sources.list"
    archive = f"[signed-by={_KEYRING}] http://deb.debian.org/debian bookworm main\n"
    sources.write_text(f"deb {archive}deb-src {archive}")
    for name in ("lists/partial", "cache/archives/partial", "packages", "root"):
        (work / name).mkdir(parents=True, exist_ok=True)
    apt = ["apt-get", "-qq", "-o", f"Dir::Etc::sourcelist={sources}", "-o", "Dir::Etc::sourceparts=-"]
    apt += ["-o", f"Dir::State::lists={work}/lists", "-o", f"Dir::Cache={work}/cache", "-o", "APT::Sandbox::User=root"]
    packages = work / "packages"
    _say("fetching 120 MB from Debian")
    _run([*apt, "update"], packages)
    _run([*apt, "source", "--download-only", "kubernetes"], packages)
    _run([*apt, "download", *_PACKAGES], packages)
    for package in packages.glob("*.deb"):
        _run(["dpkg", "-x", str(package), str(work / "root")], packages)
    tree = work / "gopath" / "src" / "k8s.io"
    tree.mkdir(parents=True, exist_ok=True)
    (tarball,) = packages.glob("kubernetes_*.orig.tar.gz")
    _run(["tar", "xzf", str(tarball), "-C", str(tree)], packages)
    (unpacked,) = tree.glob("kubernetes-*")
    tree = unpacked.rename(tree / "kubernetes")
    # The vendored one breaks on maps since Go 1.18.
    reflect2 = Path("github.com/modern-go/reflect2")
    shutil.rmtree(tree / "vendor" / reflect2)
    shutil.copytree(work / "root/usr/share/gocode/src" / reflect2, tree / "vendor" / reflect2)
    go = [str(work / "root/usr/lib/go-1.19/bin/go"), "build"]
    environment = os.environ | {
        "GOROOT": str(work / "root/usr/lib/go-1.19"),
        "GOPATH": str(work / "gopath"),
        "GOCACHE": str(work / "gocache"),
        "GO111MODULE": "off",
        "CGO_ENABLED": "0",
    }
    _say("describing the API to itself")
    generator = work / "openapi-gen"
    _run([*go, "-o", str(generator), "./vendor/k8s.io/kube-openapi/cmd/openapi-gen"], tree, environment)
    _run([str(generator), *_openapi_arguments(tree, work)], tree, environment)
    for number, name in enumerate(PROGRAMS[1:], 1):
        _say(f"building {number}/3 {name}")
        out = ["-tags", "providerless,dockerless", "-ldflags", "-s -w", "-o", str(work / name), f"./cmd/{name}"]
        _run([*go, *out], tree, environment)
    PLACE.mkdir(parents=True, exist_ok=True)
    shutil.copy(work / "root/usr/bin/etcd", PLACE / "etcd")
    for name in PROGRAMS[1:]:
        shutil.copy(work / name, PLACE / name)


def _openapi_arguments(tree: Path, work: Path) -> list[str]:
    """Return what makes the one generated file that the source package lacks."""
    others = ("sample-", "code-generator", "kube-openapi", "testdata")
    roots = [tree / "pkg", tree / "cmd", *(path for path in (tree / "vendor/k8s.io").iterdir() if path.is_dir())]
    folders: set[str] = set()
    for root in roots:
        for file in root.resolve().rglob("*.go"):
            where = root / file.relative_to(root.resolve())
            if file.name.endswith("_test.go") or any(word in str(where) for word in others):
                continue
            if "+k8s:openapi-gen=" in file.read_text(errors="replace"):
                folders.add(f"k8s.io/kubernetes/{where.parent.relative_to(tree)}")
    arguments = ["--logtostderr", "-i", ",".join(sorted(folders)), "-p", "k8s.io/kubernetes/pkg/generated/openapi"]
    arguments += ["-O", "zz_generated.openapi", "-h", "hack/boilerplate/boilerplate.generatego.txt"]
    return [*arguments, "-r", str(work / "violations")]


def _run(command: list[str], where: Path, environment: dict[str, str] | None = None) -> None:
    subprocess.run(command, cwd=where, env=environment, check=True, timeout=3600)


def _say(text: str) -> None:
    print(f"== {text}", file=sys.stderr, flush=True)


# --- run


class ControlPlane:
    """Start in a folder; everything listens on the loopback network alone. Close it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._etcd, peer, self._port = _free_port(), _free_port(), _free_port()
        self.kubeconfig = folder / "kubeconfig"
        self._kubelet = threading.Thread(target=self._run_kubelet, name="kubelet", daemon=True)
        self._stop = threading.Event()
        self.start_s = 0.1
        """From placed to ready."""
        self.leave_s = 0.3
        """From told to gone."""
        (folder / "tokens.csv").write_text(f"{_TOKEN},admin,1,system:masters\n")
        self.kubeconfig.write_text(json.dumps(self._config()))
        key = folder / "sa.key"
        subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True, timeout=60)
        proxy, proxy_key = map(str, self_signed(folder, "proxy", "aggregator"))
        url = f"http://127.0.0.1:{self._etcd}"
        self._spawn(
            "etcd", "--data-dir", str(folder / "etcd"), "--listen-client-urls", url, "--advertise-client-urls", url,
            "--listen-peer-urls", f"http://127.0.0.1:{peer}", "--unsafe-no-fsync",
        )  # fmt: skip
        self._spawn(
            "kube-apiserver", "--etcd-servers", url, "--secure-port", str(self._port), "--bind-address", "127.0.0.1",
            "--advertise-address", "127.0.0.1", "--endpoint-reconciler-type", "none", "--cert-dir",
            str(folder / "certs"), "--token-auth-file", str(folder / "tokens.csv"), "--authorization-mode",
            "AlwaysAllow", "--service-account-key-file", str(key), "--service-account-signing-key-file", str(key),
            "--service-account-issuer", "https://local", "--service-cluster-ip-range", "10.0.0.0/24",
            "--disable-admission-plugins", "ServiceAccount,TaintNodesByCondition",
            "--requestheader-client-ca-file", proxy, "--requestheader-username-headers",
            "X-Remote-User", "--requestheader-group-headers", "X-Remote-Group", "--requestheader-extra-headers-prefix",
            "X-Remote-Extra-", "--proxy-client-cert-file", proxy, "--proxy-client-key-file", proxy_key,
        )  # fmt: skip
        self.until(lambda: self.get("/readyz") is not None, "the apiserver is ready")
        controllers = "deployment,replicaset,disruption,garbagecollector,namespace,endpoint,endpointslice"
        controllers += ",horizontalpodautoscaling"
        common = ("--kubeconfig", str(self.kubeconfig), "--leader-elect=false", "--port=0", "--secure-port=0")
        hpa = ("--horizontal-pod-autoscaler-sync-period", f"{HPA_SYNC_S}s")
        self._spawn("kube-controller-manager", *common, "--controllers", controllers, *hpa)
        self._spawn("kube-scheduler", *common)
        self.until(lambda: self.get("/api/v1/namespaces/default") is not None, "the namespace is there")
        self._kubelet.start()

    def close(self) -> None:
        self._stop.set()
        if self._kubelet.is_alive():
            self._kubelet.join(10)
        for process in reversed(self._processes):
            process.kill()
            process.wait(10)

    def add_node(self, name: str, devices: int) -> None:
        room = {
            "cpu": "64",
            "memory": "512Gi",
            "pods": "50",
            "ephemeral-storage": "1Ti",
            "nvidia.com/gpu": str(devices),
        }
        self.call("POST", "/api/v1/nodes", {"kind": "Node", "apiVersion": "v1", "metadata": {"name": name}})
        ready = {"type": "Ready", "status": "True", "reason": "Here", "message": "here"}
        status = {"status": {"capacity": room, "allocatable": room, "conditions": [ready]}}
        self.call("PATCH", f"/api/v1/nodes/{name}/status", status)

    def call(self, verb: str, path: str, body: object = None) -> Any:
        """Return the answer's object; raises HTTPError."""
        kind = "application/merge-patch+json" if verb == "PATCH" else "application/json"
        request = urllib.request.Request(
            f"https://127.0.0.1:{self._port}{path}",
            None if body is None else json.dumps(body).encode(),
            {"Authorization": f"Bearer {_TOKEN}", "Content-Type": kind},
            method=verb,
        )
        trusting = ssl.create_default_context()
        trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
        with urllib.request.urlopen(request, timeout=10, context=trusting) as answer:
            text = answer.read()
            return json.loads(text) if text.startswith(b"{") else text.decode()

    def get(self, path: str) -> Any:
        """Return an object, None if it is not there."""
        with contextlib.suppress(urllib.error.HTTPError, OSError):
            return self.call("GET", path)
        return None

    def pods(self, component: str = "worker") -> list[Object]:
        """Return the pods of a component, those on their way out included."""
        selector = f"?labelSelector=app.kubernetes.io/component%3D{component}"
        return self.call("GET", f"/api/v1/namespaces/default/pods{selector}")["items"]

    def deployment(self, name: str) -> Object:
        return self.call("GET", f"/apis/apps/v1/namespaces/default/deployments/{name}")

    def scale(self, name: str, replicas: int) -> None:
        """As an autoscaler does."""
        path = f"/apis/apps/v1/namespaces/default/deployments/{name}/scale"
        self.call("PATCH", path, {"spec": {"replicas": replicas}})

    def rolled_out(self, name: str) -> bool:
        one = self.deployment(name)
        status, wanted = one.get("status", {}), one["spec"]["replicas"]
        fresh = status.get("observedGeneration") == one["metadata"]["generation"]
        counts = [status.get(key, 0) for key in ("replicas", "updatedReplicas", "readyReplicas")]
        return fresh and counts == [wanted] * 3

    def until(self, look: Callable[[], Any], why: str, patience_s: float = 60.0) -> None:
        deadline = time.monotonic() + patience_s
        while not look():
            assert time.monotonic() < deadline, f"never happened: {why}\n{self._story()}"
            time.sleep(0.05)

    def _story(self) -> str:
        tails = [(log.name, log.read_text(errors="replace")[-600:]) for log in self._folder.glob("*.log")]
        return "\n".join(f"{name}: {tail}" for name, tail in tails)

    def _spawn(self, name: str, *arguments: str) -> None:
        with (self._folder / f"{name}.log").open("wb") as log:
            command = [str(PLACE / name), *arguments]
            self._processes.append(subprocess.Popen(command, cwd=self._folder, stdout=log, stderr=log))

    def _config(self) -> Object:
        cluster = {"server": f"https://127.0.0.1:{self._port}", "insecure-skip-tls-verify": True}
        context = {"cluster": "here", "user": "admin", "namespace": "default"}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [{"name": "here", "cluster": cluster}],
            "users": [{"name": "admin", "user": {"token": _TOKEN}}],
            "contexts": [{"name": "here", "context": context}],
        }

    def _run_kubelet(self) -> None:
        since: dict[str, float] = {}
        while not self._stop.wait(0.05):
            with contextlib.suppress(urllib.error.HTTPError, OSError):
                for pod in self.call("GET", "/api/v1/pods")["items"]:
                    self._tend(pod, since)

    def _tend(self, pod: Object, since: dict[str, float]) -> None:
        meta = pod["metadata"]
        path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
        leaving = "deletionTimestamp" in meta
        age_s = time.monotonic() - since.setdefault(f"{meta['uid']} {leaving}", time.monotonic())
        if leaving and age_s >= self.leave_s:
            self.call("DELETE", path, {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 0})
        elif (
            not leaving and "nodeName" in pod["spec"] and pod["status"]["phase"] == "Pending" and age_s >= self.start_s
        ):
            ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
            self.call("PATCH", f"{path}/status", {"status": {"phase": "Running", "conditions": [ready]}})


@contextlib.contextmanager
def control_plane(folder: Path) -> Iterator[ControlPlane]:
    plane = None
    try:
        plane = ControlPlane(folder)
        yield plane
    finally:
        if plane is not None:
            plane.close()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path, nargs="?", default=PLACE.with_name("control-plane-work"), help="scratch")
    target: Path = parser.parse_args().work
    if not built():
        target.mkdir(parents=True, exist_ok=True)
        build(target)
    print(PLACE)
