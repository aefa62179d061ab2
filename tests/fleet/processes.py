"""Worker processes for tests: real ones, each with its log, ready file and metrics port."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

REPOSITORY = Path(__file__).parents[2]
PATIENCE_S = 150.0

T = TypeVar("T")


def until(look: Callable[[], T], why: str, patience_s: float = PATIENCE_S) -> T:
    """Return what `look` returns once that is true."""
    deadline = time.monotonic() + patience_s
    while not (found := look()):
        assert time.monotonic() < deadline, f"never happened: {why}"
        time.sleep(0.01)
    return found


class WorkerProcess:
    """`python -m worker` (or another program with its flags) on one model; started at once, ready later."""

    def __init__(
        self, folder: Path, redis_url: str, model: Path, name: str, *flags: str, program: str = "worker"
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "worker.log"
        self._ready_file = folder / "ready"
        self.port = _free_port()
        command = [sys.executable, "-m", program, "--redis-url", redis_url, "--model", str(model)]
        command += ["--model-name", name, "--ready-file", str(self._ready_file), "--threads", "1"]
        command += ["--metrics-host", "127.0.0.1", "--metrics-port", str(self.port), "--log-format", "text", *flags]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=log)

    def wait_ready(self) -> "WorkerProcess":
        until(lambda: self._ready_file.exists() or self._process.poll() is not None, "the worker is ready")
        assert self._ready_file.exists(), self.log.read_text()
        return self

    @property
    def ready(self) -> bool:
        return self._ready_file.exists()

    @property
    def id(self) -> str:
        return self._ready_file.read_text().strip()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def children(self) -> list[int]:
        """Process ids of the ranks that share the worker's model."""
        return [
            int(pid)
            for path in Path(f"/proc/{self._process.pid}/task").glob("*/children")
            for pid in path.read_text().split()
        ]

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait_exit(self) -> int:
        return self._process.wait(PATIENCE_S)

    def end(self) -> None:
        """Whatever its state, see it gone."""
        if self.alive:
            self.send(signal.SIGCONT)
            self._process.kill()
        self._process.wait(PATIENCE_S)

    def metrics(self) -> dict[str, float]:
        """Return the samples without their labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as reply:
            lines = reply.read().decode().splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name.partition("{")[0]: float(value) for name, value in samples}


def run_worker(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a worker that is expected to end by itself."""
    return subprocess.run(
        [sys.executable, "-m", "worker", *flags],
        cwd=REPOSITORY,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
