"""`diffleet up` as a user starts it: a process, its output, and everything that it has started."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.fleet.processes import until

ROOT = Path(__file__).parents[2]
DIFFLEET = (sys.executable, "-c", "from shared.cli import main; main()")


def environment(**more: str) -> dict[str, str]:
    """Return an environment with this checkout first, and nothing that would set options behind a test's back."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("DIFFLEET_")}
    return {**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "120"} | more


def diffleet(*arguments: str, stdin: str | None = None, **more_environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    command = [*DIFFLEET, *arguments]
    return subprocess.run(
        command,
        input=stdin,
        env=environment(**more_environment),
        capture_output=True,
        text=True,
        errors="replace",
        timeout=100,
    )


class Up:
    """A running `diffleet up`; its streams go to files beside its data, or elsewhere; `more` is its environment."""

    def __init__(self, folder: Path, model: Path, *flags: str, stderr: int | None = None, **more: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.data_dir = folder / "data"
        self._out, self._err = folder / "stdout", folder / "stderr"
        command = [*DIFFLEET, "up", "--model", str(model), "--data-dir", str(self.data_dir), *flags]
        if "--port" not in flags:
            command += ["--port", "0"]
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                command,
                env=environment(**more),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err if stderr is None else stderr,
            )

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    @property
    def url(self) -> str:
        """Address of the api; known once it serves."""
        return next(word for word in self.out.split() if word.startswith("http://"))

    @property
    def redis_url(self) -> str:
        return f"unix://{self.socket}"

    @property
    def socket(self) -> Path:
        return self.data_dir / "valkey" / "valkey.sock"

    def wait_serving(self) -> "Up":
        until(lambda: "docs: " in self.out or self.process.poll() is not None, "the fleet serves")
        assert self.process.poll() is None, self.err
        return self

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=60)

    def family(self) -> list[int]:
        """Return the process ids of everything that works on this data folder, the supervisor included."""
        return [pid for pid in _pids() if _mentions(pid, str(self.data_dir))]

    def put_down(self) -> None:
        """Leave nothing behind, whatever a test has left."""
        for pid in self.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(timeout=30)


def _pids() -> Sequence[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _mentions(pid: int, word: str) -> bool:
    """True if the word is in the command line or environment of a living process."""
    with contextlib.suppress(OSError):
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            texts = (Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ"))
            return any(word.encode() in text for text in texts)
    return False
