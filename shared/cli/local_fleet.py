"""One machine's fleet: a Redis server, the api, workers and jobs as child processes, watched until told to stop.

The order is server, api, workers and jobs up; workers (they drain) and jobs, api, server down. A child that dies while
serving is started again after a growing pause, a bounded number of times. Everything that the fleet writes lies in one
data folder, which one fleet at a time may use.
"""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from shared.cli.children import Child, Recipe, describe_exit, flags_of, on_a_leash, restart_delay_s
from shared.cli.data_lock import DataLock
from shared.cli.exits import Exit, Stop
from shared.cli.progress import Reporter
from shared.embedded import EmbeddedServer, EmbeddedServerError

_POLL_S = 0.05
_LOOK_S = 0.25
_DATA_LOOK_S = 1.0
_PROBE_TIMEOUT_S = 2.0
_STABLE_S = 60.0
_MAX_FAILURES = 5
_API_DRAIN_S = 2.0
_STOP_SPARE_S = 10.0
_SERVER_STOP_S = 15.0
_SERVER_HURRIED_STOP_S = 2.0
_SILENCE_S = 4.0
"""A server that has been silent for so long while the fleet stops is not waited for any more."""
_HURRIED_SPARE_S = 1.0
_LOCAL_BATCH_CONCURRENCY = 8


@dataclass(frozen=True, slots=True)
class LocalFleetOptions:
    """What `diffleet up` was asked for. `redis_url` None means the embedded server."""

    host: str
    port: int
    workers: int
    model: str
    model_name: str | None
    redis_url: str | None
    data_dir: Path
    start_timeout_s: float
    drain_s: float
    lease_ms: int = 3000
    """Short: on one machine a worker that is silent is dead or frozen, and its requests wait for so long."""
    model_store: Path | None = None
    """Folder with adapters, for the api and the workers."""
    fake: bool = False
    """Workers make answers up, and need no model: of its folder they take the tokenizer."""

    @property
    def served_name(self) -> str:
        """The name that requests ask for, as the worker derives it."""
        return self.model_name or Path(self.model).name

    @property
    def url(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


@dataclass(slots=True)
class _Member:
    """A child, who must say when it is ready, and how often in a row it has died."""

    recipe: Recipe
    log: Path
    ready: Callable[[], Awaitable[bool]]
    ready_file: Path | None = None
    """What a worker makes once it takes requests. One that was killed leaves it."""
    child: Child | None = None
    failures: int = 0
    started: float = field(default_factory=time.monotonic)


class LocalFleet:
    """`async with LocalFleet(options, reporter) as fleet` serves; `await fleet.watch()` inside keeps it so."""

    def __init__(self, options: LocalFleetOptions, reporter: Reporter) -> None:
        self._options = options
        self._reporter = reporter
        self._server: EmbeddedServer | None = None
        self._members: list[_Member] = []
        self._lock = DataLock(options.data_dir, options.url)
        self.stopping = False
        self._killed = False
        self._refused = False
        self._stopping_server = False

    async def __aenter__(self) -> "LocalFleet":
        """Start everything; raises `Stop` with nothing left running."""
        self._lock.take()
        try:
            check_port(self._options.host, self._options.port)
            await self._start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    @property
    def logs(self) -> Path:
        return self._options.data_dir / "logs"

    @property
    def pids(self) -> list[int]:
        """Process ids of the children, the api first; those of the last ones once they have ended."""
        return [member.child.pid for member in self._members if member.child is not None]

    def kill(self) -> None:
        """Cut every pending stop short. At first the api may still end its streams in order: it does so at once."""
        for member in self._members:
            if member.child is not None:
                spared = member is self._members[0] and not self._killed
                member.child.signal(signal.SIGTERM if spared else signal.SIGKILL)
        if self._server is not None and self._stopping_server:
            self._server.kill()
        self._killed = True

    async def watch(self) -> None:
        """Restart what dies, until cancelled; raises `Stop` when a member fails too often in a row."""
        async with asyncio.TaskGroup() as tasks:
            for member in self._members:
                tasks.create_task(self._keep_alive(member))
            tasks.create_task(self._keep_data())

    async def _start(self) -> None:
        redis_url = self._options.redis_url
        if redis_url is None:
            with self._reporter.phase("starting the embedded server", "embedded server ready"):
                redis_url = await self._start_server()
        self._members = self._plan(redis_url)
        for member in self._members:
            await self._spawn(member)
        deadline = time.monotonic() + self._options.start_timeout_s
        for member in self._members:
            name = member.recipe.name
            with self._reporter.phase(f"starting {name}", f"{name} ready"):
                await self._until_ready(member, deadline)

    async def _start_server(self) -> str:
        # Started by this thread, here and later: the leash ends when the thread that started it does.
        server = EmbeddedServer(self._options.data_dir, launcher=on_a_leash())
        # Known before it runs: a signal may end the start at any time.
        self._server = server
        try:
            await server.start_unblocked()
        except EmbeddedServerError as error:
            # What does not answer here is not asked to stop.
            server.kill()
            self._server = None
            raise Stop(Exit.NOT_STARTED, f"the embedded server did not start: {error}") from error
        return server.url

    def _plan(self, redis_url: str) -> list[_Member]:
        options = self._options
        # By the environment, not by flags: a URL may hold a password, and everyone can read a command line.
        env = [
            ("DIFFLEET_REDIS_URL", redis_url),
            ("DIFFLEET_DATA_DIR", str(options.data_dir)),
            ("DIFFLEET_LOG_FORMAT", os.environ.get("DIFFLEET_LOG_FORMAT", "text")),
        ]
        if self._server is not None:
            # Credentials in the environment are for some other Redis.
            env += [("DIFFLEET_REDIS_USERNAME", ""), ("DIFFLEET_REDIS_PASSWORD", "")]
        if options.model_store is not None:
            env.append(("DIFFLEET_MODEL_STORE", str(options.model_store)))
        # The workers have had their time before the api is stopped: what is open then would only wait.
        api_flags = {"host": options.host, "port": options.port, "drain-s": min(_API_DRAIN_S, options.drain_s)}
        api = Recipe("api", "api", tuple(flags_of(api_flags)), tuple(env))
        members = [_Member(api, self.logs / "api.log", self._api_ready)]
        for number in range(1, options.workers + 1):
            ready_file = options.data_dir / f"worker-{number}.ready"
            flags = {
                "model": options.model,
                "model-name": options.served_name if options.fake else options.model_name,
                "ready-file": ready_file,
                "drain-s": options.drain_s,
                "lease-ms": options.lease_ms,
            }
            if options.workers > 1 and not options.fake:
                flags["threads"] = max(1, (os.cpu_count() or 1) // options.workers)
            module = "shared.fake" if options.fake else "worker"
            recipe = Recipe(f"worker {number}", module, tuple(flags_of(flags)), tuple(env))
            members.append(_Member(recipe, self.logs / f"worker-{number}.log", _exists(ready_file), ready_file))
        # Last: batches wait without harm until it is there.
        jobs_flags = flags_of({"batch-concurrency": _LOCAL_BATCH_CONCURRENCY})
        members.append(
            _Member(Recipe("jobs", "api.jobs", tuple(jobs_flags), tuple(env)), self.logs / "jobs.log", _at_once)
        )
        return members

    async def _spawn(self, member: _Member, exit_code: Exit = Exit.NOT_STARTED) -> None:
        try:
            if member.ready_file is not None:
                member.ready_file.unlink(missing_ok=True)
            member.child = await Child.start(member.recipe, member.log)
        except OSError as error:
            why = error.strerror or str(error)
            raise Stop(exit_code, f"cannot start {member.recipe.name}: {error.filename or 'process'}: {why}") from error
        member.started = time.monotonic()

    async def _api_ready(self) -> bool:
        """True once the api answers for itself; that a worker serves is each worker's own to say."""
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=_PROBE_TIMEOUT_S) as client:
                return (await client.get(f"{self._options.url}/health/live")).status_code == 200
        except httpx.HTTPError:
            return False

    async def _until_ready(self, member: _Member, deadline: float) -> None:
        while True:
            for other in self._members:
                child = other.child
                if child is not None and child.exit_code is not None:
                    raise _failed(child, describe_exit(child.exit_code))
            if await member.ready():
                return
            if time.monotonic() > deadline:
                assert member.child is not None
                seconds = self._options.start_timeout_s
                raise _failed(member.child, f"was not ready after {seconds:.0f} s (--start-timeout)")
            await asyncio.sleep(_POLL_S)

    async def _keep_alive(self, member: _Member) -> None:
        while True:
            assert member.child is not None
            child = member.child
            how = describe_exit(await child.wait())
            lasted = time.monotonic() - member.started
            member.failures = 1 if lasted > _STABLE_S else member.failures + 1
            if member.failures > _MAX_FAILURES:
                raise _failed(child, f"{how}, {member.failures} times in a row", Exit.FAILED)
            delay = restart_delay_s(member.failures)
            self._reporter.line(f"{member.recipe.name} {how}; restarting in {delay:.1f} s (log: {member.log})")
            await asyncio.sleep(delay)
            await self._spawn(member, Exit.FAILED)
            # A member that comes up broken ends by itself and is met here again; one that hangs is given up as well.
            await self._until_ready_again(member)

    async def _until_ready_again(self, member: _Member) -> None:
        child = member.child
        assert child is not None
        deadline = time.monotonic() + self._options.start_timeout_s
        while child.exit_code is None:
            if await member.ready():
                self._reporter.line(f"{member.recipe.name} ready again")
                return
            if time.monotonic() > deadline:
                child.signal(signal.SIGKILL)
                return
            await asyncio.sleep(_POLL_S)

    async def _keep_data(self) -> None:
        """See to the lock first: what answers at the server's socket may be that of whoever has the folder now."""
        while True:
            await asyncio.sleep(_DATA_LOOK_S)
            if not self._lock.held:
                self._hold_again()
            if self._server is not None:
                await self._keep_server(self._server)

    def _hold_again(self) -> None:
        what = f"the data folder {self._options.data_dir}, or the lock in it, was removed"
        try:
            self._lock.take()
        except Stop as stop:
            raise Stop(Exit.FAILED, f"{what} while it was in use: {stop}") from stop
        logs = "" if self.logs.exists() else "; what runs now writes no logs until it is started again"
        self._reporter.line(f"{what}; it is held again{logs}")

    async def _keep_server(self, server: EmbeddedServer) -> None:
        if server.lost:
            self._reporter.line(
                "the embedded server's files were removed: requests, responses, files and batches that were in them "
                "are lost; starting it on what is there"
            )
        elif await server.is_running():
            await self._tell_of_refusal(server)
            return
        else:
            self._reporter.line("the embedded server does not answer; restarting it if it is gone")
        try:
            await server.start_unblocked()
        except EmbeddedServerError as error:
            raise Stop(Exit.FAILED, f"the embedded server did not come back: {error}") from error
        self._reporter.line("embedded server ready again")

    async def _tell_of_refusal(self, server: EmbeddedServer) -> None:
        """Say once that the server takes no commands: it does again by itself, and has lost nothing."""
        refusal = await server.refusal()
        if refusal is not None and not self._refused:
            self._reporter.line(f"the embedded server refuses requests until it can write again: {refusal}")
        elif refusal is None and self._refused:
            self._reporter.line("the embedded server takes requests again")
        self._refused = refusal is not None

    async def _stop(self) -> None:
        """Workers first: they hand back over the server what they cannot finish. Then the api, then the server.

        Of a server that answers nobody there is nothing to wait for: all that is left is ended in seconds.
        """
        self.stopping = True
        silent = None if self._server is None else asyncio.create_task(self._await_silence(self._server))
        # The jobs are among the workers: what they have begun goes on in the queue.
        api, workers = self._members[:1], self._members[1:]
        try:
            await self._end(workers, "workers", self._options.drain_s + _STOP_SPARE_S, silent)
            hurried = silent is not None and silent.done()
            await self._end(api, "api", _API_DRAIN_S + (_HURRIED_SPARE_S if hurried else _STOP_SPARE_S))
            # In a folder that is another fleet's by now such files are that one's.
            for member in workers if self._lock.held else ():
                if member.ready_file is not None:
                    with contextlib.suppress(OSError):
                        member.ready_file.unlink()
            if self._server is not None:
                with self._reporter.phase("stopping the embedded server", "embedded server stopped"):
                    self._stopping_server = True
                    hurried = hurried or self._killed
                    await self._server.stop_unblocked(_SERVER_HURRIED_STOP_S if hurried else _SERVER_STOP_S)
        finally:
            if silent is not None:
                silent.cancel()
        self._lock.release()

    async def _end(
        self, members: list[_Member], name: str, grace_s: float, cut: asyncio.Task[None] | None = None
    ) -> None:
        """Stop the members that live, each within `grace_s`; those that do when `cut` is done are killed."""
        alive = [m.child for m in members if m.child is not None and m.child.exit_code is None]
        if not alive:
            return
        with self._reporter.phase(f"stopping {name}", f"{name} stopped"):
            async with asyncio.TaskGroup() as tasks:
                stops = {tasks.create_task(child.stop(grace_s)) for child in alive}
                if cut is None:
                    return
                while (pending := {stop for stop in stops if not stop.done()}) and not cut.done():
                    await asyncio.wait({*pending, cut}, return_when=asyncio.FIRST_COMPLETED)
                if cut.done():
                    for child in alive:
                        child.signal(signal.SIGKILL)

    async def _await_silence(self, server: EmbeddedServer) -> None:
        def tell() -> None:
            self._reporter.line(
                f"the embedded server (process {server.pid}) does not answer: what runs is ended without it "
                f"if it does not within {_SILENCE_S:.0f} s"
            )

        await until_silent(server.is_running, _SILENCE_S, tell)


async def until_silent(
    answers: Callable[[], Awaitable[bool]],
    patience_s: float,
    tell: Callable[[], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Return once nothing has answered for `patience_s`; `tell` is called whenever a silence begins."""
    since: float | None = None
    while since is None or clock() - since < patience_s:
        if await answers():
            since = None
        elif since is None:
            since = clock()
            tell()
        await asyncio.sleep(_LOOK_S)


async def _at_once() -> bool:
    return True


def _exists(path: Path) -> Callable[[], Awaitable[bool]]:
    async def ready() -> bool:
        return path.exists()

    return ready


def _failed(child: Child, how: str, exit_code: Exit = Exit.NOT_STARTED) -> Stop:
    lines = child.last_lines() or ["(it wrote nothing)"]
    return Stop(exit_code, f"{child.recipe.name} {how}; the end of {child.log}:", tuple(lines))


def check_port(host: str, port: int) -> None:
    """Raise `Stop` if nothing can listen at host:port, before anything is started for it."""
    _listen(host, port)


def free_port(host: str) -> int:
    """Return a port that was free a moment ago; raises `Stop` if nothing can listen at the host."""
    return _listen(host, 0)


def _listen(host: str, port: int) -> int:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return probe.getsockname()[1]
    except OSError as error:
        # Taken, or for others than this user; what else there is to say is about the address.
        option = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
        where = f"{host or 'an empty host'} port {port}"
        why = error.strerror or error
        raise Stop(Exit.NOT_STARTED, f"cannot listen on {where}: {why}; choose another {option}") from error
