"""Servers with a configuration of a test's own, on free ports, of the bundled program or another.

`DIFFLEET_TEST_REDIS` names the program of another server (a path, or a name on the search path) for all tests that
start one in their own process.
"""

import os
import shutil
import socket
import subprocess
from pathlib import Path

from shared import embedded


def named_program() -> Path | None:
    """Return the program that `DIFFLEET_TEST_REDIS` names; raises LookupError if it is none."""
    wanted = os.environ.get("DIFFLEET_TEST_REDIS")
    if not wanted:
        return None
    found = shutil.which(wanted)
    if found is None:
        raise LookupError(f"DIFFLEET_TEST_REDIS names {wanted!r}, which is no program here")
    return Path(found)


def tls_program() -> Path | None:
    """Return a server program that speaks TLS, None if there is none: the bundled one does not."""
    for name in (os.environ.get("DIFFLEET_TEST_REDIS"), "redis-server", "valkey-server"):
        found = shutil.which(name) if name else None
        if found is not None and b"TLS" not in _complaint(found):
            return Path(found)
    return None


def _complaint(program: str) -> bytes:
    # A server without TLS refuses the option; one with it misses its certificate, and says so in other words.
    answer = subprocess.run([program, "--port", "0", "--tls-port", "1"], capture_output=True, timeout=30)
    return b"TLS" if b"Failed finding TLS support" in answer.stdout or b"Bad directive" in answer.stderr else b""


class Servers:
    """Processes in folders below one; `end` kills them all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, port: int, config: str, *flags: str, program: Path | None = None) -> subprocess.Popen[bytes]:
        """Start a server whose configuration is `config` and a folder of its own, named after its port."""
        folder = self.folder / str(port)
        folder.mkdir(exist_ok=True)
        (folder / "conf").write_text(f"port {port}\nbind 127.0.0.1\ndir {folder}\nprotected-mode no\n{config}")
        # By its module: `tests.conftest` may have put another program there.
        command = [str(program or embedded._binary()), str(folder / "conf"), *flags]
        with (folder / "log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        self._processes.append(process)
        return process

    def end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()


def free_port() -> int:
    """Return a port that is free now, and whose bus port (10,000 higher, of a Cluster) is one."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port < 55_000:
            return port
