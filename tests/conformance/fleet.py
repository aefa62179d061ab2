"""A live fleet on the bundled model: server, worker, two fronts and the jobs, each a process of its own."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from redis import Redis

from api.webhooks.signing import new_secret
from shared.connection import open_sync_client
from shared.embedded import EmbeddedServer
from tests.fleet.processes import WorkerProcess, until

REPOSITORY = Path(__file__).parents[2]
MODEL = "demo-nano"
MODEL_FOLDER = REPOSITORY / "worker" / "demo" / "models" / MODEL
LEASE_MS = 2000
PATIENCE_S = 60.0


class Process:
    """`python -m <module>` with a log of its own."""

    def __init__(self, module: str, log: Path, flags: Sequence[str]) -> None:
        self.log = log
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DIFFLEET_")}
        with log.open("ab") as sink:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", module, *flags], cwd=REPOSITORY, stdout=sink, stderr=sink, env=environment
            )

    def send(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def end(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait(PATIENCE_S)


class Front(Process):
    """`python -m api` on a port that it has chosen."""

    def __init__(self, folder: Path, redis_url: str, *flags: str) -> None:
        self.port = free_port()
        own = ("--redis-url", redis_url, "--port", str(self.port))
        super().__init__("api", folder / f"api-{self.port}.log", (*own, *flags))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_live(self) -> "Front":
        until(lambda: self._answers() or self.popen.poll() is not None, "the front answers")
        assert self.popen.poll() is None, self.log.read_text()
        return self

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health/live", timeout=5) as reply:
                return reply.status == 200
        except OSError:
            return False


class LiveFleet:
    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="df-"))
        self.server = EmbeddedServer(self.folder / "data")
        self._processes: list[Process] = []
        self.workers: list[WorkerProcess] = []
        self.webhook_secret = new_secret()

    @property
    def secrets(self) -> Path:
        return self.folder / "webhooks.json"

    @property
    def webhook_flags(self) -> tuple[str, ...]:
        """Flags with which receivers on this machine may be called."""
        own = ("--webhook-secrets-file", str(self.secrets), "--webhook-allow-http")
        return (*own, "--webhook-networks", '["127.0.0.1/32"]')

    def start(self) -> "LiveFleet":
        self.server.start()
        self.worker = self.start_worker(MODEL)
        self.secrets.write_text(json.dumps({"*": [self.webhook_secret]}))
        self.front = self.start_front("--keepalive-s", "0.5", *self.webhook_flags)
        self.other = self.start_front("--keepalive-s", "0.5", *self.webhook_flags)
        self.start_jobs()
        self.worker.wait_ready()
        self.front.wait_live()
        self.other.wait_live()
        return self

    def start_worker(self, name: str, *flags: str) -> WorkerProcess:
        """Start a worker on the bundled model, under a name of its own if it is for one test alone."""
        folder = self.folder / f"worker-{len(self.workers)}"
        lease = ("--lease-ms", str(LEASE_MS))
        self.workers.append(WorkerProcess(folder, self.server.url, MODEL_FOLDER, name, *lease, *flags))
        return self.workers[-1]

    def start_front(self, *flags: str) -> Front:
        front = Front(self.folder, self.server.url, *flags)
        self._processes.append(front)
        return front

    def start_jobs(self, *flags: str) -> Process:
        own = ("--redis-url", self.server.url, *self.webhook_flags, *flags)
        self.jobs = Process("api.jobs", self.folder / "jobs.log", own)
        self._processes.append(self.jobs)
        return self.jobs

    @property
    def redis(self) -> Redis:
        return open_sync_client(self.server.url)

    @property
    def logs(self) -> str:
        """Everything that fronts and jobs have written."""
        return "\n".join(process.log.read_text() for process in self._processes)

    def stop(self) -> None:
        for process in self._processes:
            process.end()
        for worker in self.workers:
            worker.end()
        self.server.stop()
        shutil.rmtree(self.folder)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
