"""A cluster small enough for one machine: it executes rendered manifests as local processes.

A pod is a process with the command and the environment of its container, an address of its own on the loopback network
(so that the ports are those of the manifest), and a folder for its volumes. Deployments roll by maxSurge and
maxUnavailable, probes gate, SIGTERM, the grace period and SIGKILL end, devices run out, and what exits is restarted.
It differs from Kubernetes where a machine must: names of services and paths of mounts are replaced in commands and
variables, `0.0.0.0` is the pod's address, a GPU is a place on the CPU, and probes and back-off are ten times as fast.
"""

import contextlib
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.helm.chart import Object, Rendered, Workload, selects

HASTE = 10.0
_TICK_S = 0.03
_DEVICE = "nvidia.com/gpu"


@dataclass(eq=False)
class Pod:
    name: str
    workload: Workload
    template: str
    """Digest of the pod template: pods of another one are old."""
    address: str
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    ready: bool = False
    started: bool = False
    """True once the startup probe has passed."""
    began: float = 0.0
    next_probe: float = 0.0
    failing_since: float | None = None
    restart_at: float = 0.0
    kill_at: float | None = None
    """Set while the pod is terminating."""
    killed: bool = False
    """True if the grace period ended before the process did."""
    exits: list[int] = field(default_factory=list[int])

    @property
    def owner(self) -> str:
        return self.workload.name

    @property
    def terminating(self) -> bool:
        return self.kill_at is not None

    @property
    def devices(self) -> int:
        return int(self.workload.container["resources"].get("limits", {}).get(_DEVICE, "0"))

    @property
    def pending(self) -> bool:
        return self.process is None and not self.exits

    def port(self, name: str) -> int:
        (port,) = (one["containerPort"] for one in self.workload.container["ports"] if one["name"] == name)
        return port

    @property
    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text() if path.exists() else ""


class Cluster:
    """Apply renders, then look; everything else happens in a thread until `close`."""

    def __init__(self, folder: Path, secrets: Mapping[str, Mapping[str, str]], devices: int = 0) -> None:
        self._folder = folder
        self._secrets = secrets
        self._devices = devices
        self._rendered = Rendered(())
        self._scale: dict[str, int] = {}
        self._pods: list[Pod] = []
        self._ended: list[Pod] = []
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._fault: BaseException | None = None
        self._most_running: dict[str, int] = {}
        self._least_ready: dict[str, int] = {}
        self._thread = threading.Thread(target=self._run, name="cluster", daemon=True)
        self._thread.start()

    def apply(self, rendered: Rendered) -> None:
        """Make the cluster what the render says, as install, upgrade and rollback do."""
        with self._lock:
            self._rendered = rendered

    def scale(self, deployment: str, replicas: int) -> None:
        """Set the number of pods as an autoscaler does; it stands until the next call."""
        with self._lock:
            self._scale[deployment] = replicas

    def story(self) -> str:
        """Return what every pod is at and the end of its log, for a test that has failed."""
        with self._lock:
            lines: list[str] = []
            for pod in [*self._pods, *self._ended]:
                lines.append(f"{pod.name}: ready={pod.ready} terminating={pod.terminating} exits={pod.exits}")
                lines += [f"    {line}" for line in pod.log.splitlines()[-8:]]
            return "\n".join(lines)

    def pods(self, deployment: str | None = None) -> list[Pod]:
        with self._lock:
            self._check()
            return [pod for pod in self._pods if deployment in (None, pod.owner)]

    def ended(self, deployment: str) -> list[Pod]:
        """Return pods that are gone."""
        with self._lock:
            self._check()
            return [pod for pod in self._ended if pod.owner == deployment]

    def rolled_out(self, deployment: str) -> bool:
        """Tell whether all pods are of the present template and ready."""
        with self._lock:
            pods, workload = self.pods(deployment), self._workload(deployment)
            current = _digest(self._rendered, workload)
            return len(pods) == self._wanted(workload) and all(p.ready and p.template == current for p in pods)

    def watch(self, deployment: str) -> None:
        """Begin to record how many pods run and how many are ready."""
        with self._lock:
            running = [pod for pod in self.pods(deployment) if pod.process is not None]
            self._most_running[deployment] = len(running)
            self._least_ready[deployment] = len([pod for pod in running if pod.ready])

    def watched(self, deployment: str) -> tuple[int, int]:
        """Return the most running and the least ready pods since `watch`."""
        with self._lock:
            return self._most_running[deployment], self._least_ready[deployment]

    def endpoints(self, service: str) -> list[str]:
        """Return host:port of the ready pods behind a service."""
        with self._lock:
            spec = self._rendered.one("Service", service)["spec"]
            (port,) = spec["ports"]
            selector = {"matchLabels": spec["selector"]}
            ready = [pod for pod in self.pods() if pod.ready and selects(selector, pod.workload.labels)]
            return [f"{pod.address}:{pod.port(port['targetPort'])}" for pod in ready]

    def run_hook(self, pod: Object, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a test pod to its end."""
        with self._lock:
            one = self._new_pod(Workload(pod, pod), "hook")
            command, environment = self._command(one), self._environment(one)
        return subprocess.run(
            command, env=environment, cwd=one.folder, capture_output=True, text=True, timeout=timeout_s
        )

    def close(self) -> None:
        """Kill what still runs."""
        self._stop.set()
        self._thread.join(30)
        for pod in self._pods:
            if pod.process is not None:
                pod.process.kill()
                pod.process.wait(10)

    def _check(self) -> None:
        if self._fault is not None:
            raise RuntimeError("the cluster has failed") from self._fault

    def _run(self) -> None:
        try:
            while not self._stop.wait(_TICK_S):
                with self._lock:
                    self._reconcile()
                    due = [pod for pod in self._pods if self._probe_due(pod)]
                for pod in due:  # without the lock: a probe may wait
                    self._probe(pod)
        except BaseException as error:  # shown by the next look
            self._fault = error

    def _reconcile(self) -> None:
        now = time.monotonic()
        workloads = {workload.name: workload for workload in self._rendered.deployments()}
        for pod in list(self._pods):
            self._advance(pod, now)
            if pod.owner not in workloads and not pod.terminating:
                self._terminate(pod, now)
        for workload in workloads.values():
            self._roll(workload, now)
        for name in self._most_running:
            running = [pod for pod in self._pods if pod.owner == name and pod.process is not None]
            ready = len([pod for pod in running if pod.ready])
            self._most_running[name] = max(self._most_running[name], len(running))
            self._least_ready[name] = min(self._least_ready[name], ready)

    def _advance(self, pod: Pod, now: float) -> None:
        if pod.process is not None and (code := pod.process.poll()) is not None:
            pod.exits.append(code)
            pod.process, pod.ready, pod.started = None, False, False
            pod.restart_at = now + min(10.0 * 2 ** (len(pod.exits) - 1), 300.0) / HASTE
        if pod.terminating:
            if pod.process is None:
                self._pods.remove(pod)
                self._ended.append(pod)
            elif pod.kill_at is not None and now >= pod.kill_at and not pod.killed:
                pod.killed = True
                pod.process.kill()
            return
        used = sum(other.devices for other in self._pods if other.process is not None or other.exits)
        if (
            pod.process is None
            and now >= pod.restart_at
            and (pod.exits or used + pod.devices <= self._devices or not pod.devices)
        ):
            self._start(pod, now)

    def _roll(self, workload: Workload, now: float) -> None:
        wanted = self._wanted(workload)
        current = _digest(self._rendered, workload)
        alive = [pod for pod in self._pods if pod.owner == workload.name and not pod.terminating]
        new = [pod for pod in alive if pod.template == current]
        old = [pod for pod in alive if pod.template != current]
        rolling = workload.owner["spec"]["strategy"]["rollingUpdate"]
        surge, unavailable = rolling["maxSurge"], rolling["maxUnavailable"]
        for _ in range(min(wanted - len(new), wanted + surge - len(alive))):
            self._pods.append(self._new_pod(workload, current))
        for pod in _victims(new)[: max(0, len(new) - wanted)]:
            self._terminate(pod, now)
        removable = len(alive) - (wanted - unavailable) - len([pod for pod in new if not pod.ready])
        for pod in _victims(old):
            if removable <= 0:
                break
            self._terminate(pod, now)
            removable -= 1

    def _wanted(self, workload: Workload) -> int:
        # Kubernetes' own default is 1 where the manifest leaves the number to an autoscaler.
        replicas: int = workload.owner["spec"].get("replicas", 1)
        return self._scale.get(workload.name, replicas)

    def _workload(self, deployment: str) -> Workload:
        (workload,) = (one for one in self._rendered.deployments() if one.name == deployment)
        return workload

    def _new_pod(self, workload: Workload, template: str) -> Pod:
        number = next(self._numbers)
        folder = self._folder / f"{workload.name}-{number}"
        folder.mkdir(parents=True)
        # Another network for each test process: several may run at a time.
        address = f"127.{10 + os.getpid() % 200}.{number // 250}.{1 + number % 250}"
        return Pod(folder.name, workload, template, address, folder)

    def _start(self, pod: Pod, now: float) -> None:
        with (pod.folder / "log").open("ab") as log:
            pod.process = subprocess.Popen(
                self._command(pod), env=self._environment(pod), cwd=pod.folder, stdout=log, stderr=log
            )
        pod.began, pod.next_probe, pod.failing_since = now, now, None

    def _terminate(self, pod: Pod, now: float) -> None:
        pod.ready = False
        pod.kill_at = now + pod.workload.spec["terminationGracePeriodSeconds"]
        if pod.process is not None:
            pod.process.send_signal(signal.SIGTERM)

    def _command(self, pod: Pod) -> list[str]:
        first, *rest = pod.workload.container["command"]
        assert first == "python", f"{first} is in no image of ours"
        return [sys.executable, *(self._resolve(word, pod) for word in rest)]

    def _environment(self, pod: Pod) -> dict[str, str]:
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
        for name, value in self._rendered.env(pod.workload).items():
            if isinstance(value, dict):
                reference = value["secretKeyRef"]
                environment[name] = self._secrets[reference["name"]][reference["key"]]
            else:
                environment[name] = self._resolve(value, pod)
        if pod.devices:
            environment["DIFFLEET_DEVICE"] = "cpu"
        return environment

    def _resolve(self, text: str, pod: Pod) -> str:
        for mount in pod.workload.container["volumeMounts"]:
            path = mount["mountPath"]
            if text == path or text.startswith(f"{path}/"):
                place = pod.folder / mount["name"]
                place.mkdir(exist_ok=True)
                return text.replace(path, str(place), 1)
        for service in self._rendered.of("Service"):
            name = service["metadata"]["name"]
            for port in service["spec"]["ports"]:
                if f"//{name}:{port['port']}" in text:
                    return text.replace(f"{name}:{port['port']}", self.endpoints(name)[0])
        return pod.address if text == "0.0.0.0" else text

    def _probe_due(self, pod: Pod) -> bool:
        return pod.process is not None and not pod.terminating and time.monotonic() >= pod.next_probe

    def _probe(self, pod: Pod) -> None:
        probes = {name: probe for name, probe in pod.workload.container.items() if name.endswith("Probe")}
        if not probes:
            pod.started = pod.ready = True  # as Kubernetes takes it
            return
        name = "readinessProbe" if pod.started else "startupProbe"
        probe = probes[name]
        passed = _asked(pod, probe)
        with self._lock:
            now = time.monotonic()
            pod.next_probe = now + probe["periodSeconds"] / HASTE
            if pod.terminating or pod.process is None:
                return
            if name == "startupProbe":
                pod.started = passed
                if not passed and now - pod.began > probe["periodSeconds"] * probe["failureThreshold"]:
                    pod.process.terminate()
                return
            pod.ready = passed
            alive = passed or _asked(pod, probes["livenessProbe"])
            pod.failing_since = None if alive else pod.failing_since or now
            patience = probes["livenessProbe"]["periodSeconds"] * probes["livenessProbe"]["failureThreshold"]
            if pod.failing_since is not None and now - pod.failing_since > patience:
                pod.process.terminate()


def _asked(pod: Pod, probe: Object) -> bool:
    request = probe["httpGet"]
    url = f"http://{pod.address}:{pod.port(request['port'])}{request['path']}"
    with contextlib.suppress(urllib.error.URLError, OSError):
        with urllib.request.urlopen(url, timeout=probe["timeoutSeconds"]) as answer:
            return answer.status == 200
    return False


def _victims(pods: list[Pod]) -> list[Pod]:
    """Order pods as a ReplicaSet removes them: not ready ones first, then the newest."""
    return sorted(pods, key=lambda pod: (pod.ready, -pod.began))


def _digest(rendered: Rendered, workload: Workload) -> str:
    return hashlib.sha256(json.dumps(workload.pod, sort_keys=True).encode()).hexdigest()


def eventually(look: Callable[[], Any], why: str, cluster: Cluster | None = None, patience_s: float = 180.0) -> None:
    """Return once `look` returns true."""
    deadline = time.monotonic() + patience_s
    while not look():
        assert time.monotonic() < deadline, f"never happened: {why}\n{cluster.story() if cluster else ''}"
        time.sleep(0.02)
