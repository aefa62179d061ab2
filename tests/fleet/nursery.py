"""Worker processes forked from one that has torch loaded: a fresh one is at work in a fraction of a second.

`Nursery` is the test's side; `python -m tests.fleet.nursery` is the parent of the workers. One line of JSON for each
order (arguments of the worker, its log) and for each answer (its process id); `{"pid", "code"}` when one has ended.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue

from tests.fleet.diary import Pen, queue_with
from tests.fleet.processes import PATIENCE_S, REPOSITORY

DIARY = "DIFFLEET_TEST_DIARY"
"""Names the file in which workers note what they do, see `tests.fleet.diary`."""


class Child:
    """One forked worker."""

    def __init__(self, pid: int, ready_file: Path) -> None:
        self.pid = pid
        self.ready_file = ready_file
        self.remote = False
        """It reaches Redis over the network."""
        self.code: int | None = None

    @property
    def alive(self) -> bool:
        return self.code is None

    @property
    def ready(self) -> bool:
        return self.alive and self.ready_file.exists()

    def send(self, number: signal.Signals) -> None:
        """Send a signal; the nursery reaps, so a process that has just ended is no error."""
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            pass


class Nursery:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._answers: SimpleQueue[int] = SimpleQueue()
        self._children: dict[int, Child] = {}
        self._parent = subprocess.Popen(
            [sys.executable, "-m", "tests.fleet.nursery"],
            cwd=REPOSITORY,
            env=os.environ | {DIARY: str(self.diary), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def diary(self) -> Path:
        return self._folder / "diary"

    def spawn(self, *flags: str, remote: bool = False) -> Child:
        self._count += 1
        ready, log = self._folder / f"{self._count}.ready", self._folder / f"{self._count}.log"
        order = {"argv": [*flags, "--ready-file", str(ready)], "log": str(log)}
        assert self._parent.stdin is not None
        self._parent.stdin.write(json.dumps(order) + "\n")
        self._parent.stdin.flush()
        pid = self._answers.get(timeout=PATIENCE_S)
        child = self._children[pid]
        child.ready_file = ready
        child.remote = remote
        return child

    def close(self) -> None:
        """Kill whoever is left."""
        for child in self._children.values():
            if child.alive:
                child.send(signal.SIGKILL)
        assert self._parent.stdin is not None
        self._parent.stdin.close()
        self._parent.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        assert self._parent.stdout is not None
        self._parent.stdout.close()

    def _read(self) -> None:
        assert self._parent.stdout is not None
        for line in self._parent.stdout:
            answer = json.loads(line)
            if "code" in answer:
                self._children[answer["pid"]].code = answer["code"]
            else:
                self._children[answer["pid"]] = Child(answer["pid"], Path())
                self._answers.put(answer["pid"])


def serve(orders: Sequence[str] = ()) -> None:
    """Fork a worker for each line of standard input, tell of those that end; return when the input has."""
    import worker.assembly
    import worker.process
    from worker.device import guarded
    from worker.engine.plan import Plan
    from worker.engine.ports import Decision, Forward

    pen = Pen(os.open(os.environ[DIARY], os.O_WRONLY | os.O_CREAT | os.O_APPEND))

    def recording(forward: Forward) -> Forward:
        def run(plan: Plan) -> Decision:
            canvases = [(row.request_id, row.canvas) for row in plan.rows if row.canvas is not None]
            pen.note("begins", [(request_id, canvas.start) for request_id, canvas in canvases if canvas.step == 0])
            return forward(plan)

        return run

    worker.process.WorkerQueue = queue_with(pen)  # pyright: ignore[reportPrivateImportUsage]
    worker.assembly.guarded = lambda forward: recording(guarded(forward))  # pyright: ignore[reportPrivateImportUsage]
    alive: set[int] = set()
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    rest = b""
    open_ = True
    while open_ or alive:
        for pid in list(alive):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                alive.remove(pid)
                print(json.dumps({"pid": pid, "code": os.waitstatus_to_exitcode(status)}), flush=True)
        if not selector.select(timeout=0.02) or not open_:
            continue
        data = os.read(0, 65536)
        if not data:
            open_ = False
            selector.unregister(0)
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            order = json.loads(line)
            pid = os.fork()
            if pid == 0:
                _become_worker(order["argv"], order["log"])
            alive.add(pid)
            print(json.dumps({"pid": pid}), flush=True)


def _become_worker(argv: list[str], log: str) -> None:
    from worker.process import main

    code = 1
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(0)
        code = main(argv)
    except SystemExit as error:
        code = int(error.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
