"""The supervisor of one machine's fleet, over stand-ins for the api and the worker that only start, log and stop."""

import asyncio
import contextlib
import dataclasses
import io
import os
import resource
import shutil
import signal
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from shared.cli.data_lock import DataLock
from shared.cli.exits import Exit, Stop
from shared.cli.local_fleet import LocalFleet, LocalFleetOptions, check_port, free_port, until_silent
from shared.cli.progress import Reporter
from shared.connection import open_sync_client
from shared.embedded import EmbeddedServer

API = """
import http.server, os, signal, sys
def stop(*_):
    open(os.environ["ORDER"], "a").write("api\\n")
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
WORKER = """
import os, signal, sys, time
def stop(*_):
    open(os.environ["ORDER"], "a").write("worker\\n")
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
mode = os.environ.get("MODE", "")
if mode == "bad model":
    print("model folder lacks model.safetensors")
    sys.exit(3)
if mode == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if mode != "never ready":
    open(sys.argv[sys.argv.index("--ready-file") + 1], "w").close()
time.sleep(600)
"""

JOBS = """
import time
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, code in {"api/__init__": "", "api/__main__": API, "api/jobs": JOBS, "worker": WORKER}.items():
        (tmp_path / f"{name}.py").parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("ORDER", str(tmp_path / "order"))


@pytest.fixture
def options(tmp_path: Path) -> LocalFleetOptions:
    return LocalFleetOptions(
        host="127.0.0.1",
        port=free_port("127.0.0.1"),
        workers=2,
        model="demo",
        model_name=None,
        redis_url="redis://127.0.0.1:1/0",
        data_dir=tmp_path / "data",
        start_timeout_s=60.0,
        drain_s=20.0,
    )


@contextlib.asynccontextmanager
async def watching(fleet: LocalFleet) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(fleet.watch())
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(out: io.StringIO, text: str) -> None:
    async with asyncio.timeout(60):
        while text not in out.getvalue():
            await asyncio.sleep(0.01)


async def failure_of(watch: asyncio.Task[None]) -> Stop:
    """Return what a fleet ends with that cannot go on."""
    with pytest.raises(ExceptionGroup) as group:
        async with asyncio.timeout(60):
            await watch
    (stop,) = group.value.exceptions
    assert isinstance(stop, Stop) and stop.exit_code is Exit.FAILED
    return stop


def alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


async def test_everything_starts_and_stops_workers_first(options: LocalFleetOptions, tmp_path: Path) -> None:
    out = io.StringIO()
    async with LocalFleet(options, Reporter(out)) as fleet:
        pids = fleet.pids
        assert len(pids) == 4 and all(map(alive, pids))
        assert not (tmp_path / "order").exists()
    assert not any(map(alive, pids))
    assert (tmp_path / "order").read_text().split() == ["worker", "worker", "api"]
    assert not list(options.data_dir.glob("*.ready"))
    assert "\x1b" not in out.getvalue()
    for phrase in ("api ready", "worker 1 ready", "worker 2 ready", "workers stopped"):
        assert phrase in out.getvalue()


async def test_a_worker_that_cannot_start_is_shown_with_its_log(
    options: LocalFleetOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODE", "bad model")
    fleet = LocalFleet(options, Reporter(io.StringIO()))
    with pytest.raises(Stop) as stopped:
        async with fleet:
            pass
    assert stopped.value.exit_code is Exit.NOT_STARTED
    assert "ended with exit code 3" in str(stopped.value)
    assert stopped.value.details == ("model folder lacks model.safetensors",)
    assert not any(map(alive, fleet.pids))


async def test_a_worker_that_never_becomes_ready_ends_the_start(
    options: LocalFleetOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODE", "never ready")
    impatient = dataclasses.replace(options, start_timeout_s=1.0)
    fleet = LocalFleet(impatient, Reporter(io.StringIO()))
    with pytest.raises(Stop, match="not ready after 1 s"):
        async with fleet:
            pass
    assert not any(map(alive, fleet.pids))


async def test_a_killed_worker_is_started_again_and_told(options: LocalFleetOptions) -> None:
    out = io.StringIO()
    async with LocalFleet(options, Reporter(out)) as fleet, watching(fleet):
        api, worker, other, _ = fleet.pids
        os.kill(worker, signal.SIGKILL)
        await until(out, "worker 1 ready again")
        assert "worker 1 was ended by SIGKILL; restarting in 0.5 s" in out.getvalue()
        assert fleet.pids[0] == api and fleet.pids[2] == other
        assert fleet.pids[1] != worker and alive(fleet.pids[1])


async def test_a_worker_that_does_not_come_back_is_given_up_though_the_killed_one_was_ready(
    options: LocalFleetOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    async with LocalFleet(options, Reporter(out)) as fleet:
        impatient = dataclasses.replace(options, start_timeout_s=0.5)
        monkeypatch.setattr(fleet, "_options", impatient)
        monkeypatch.setenv("MODE", "never ready")
        async with watching(fleet):
            os.kill(fleet.pids[1], signal.SIGKILL)
            await until(out, "worker 1 was ended by SIGKILL; restarting in 1.0 s")
    assert "ready again" not in out.getvalue()


@pytest.mark.parametrize("taken", ["logs", "logs/worker-1.log", "worker-1.ready"])
async def test_a_file_of_the_data_folder_that_cannot_be_made_is_named(options: LocalFleetOptions, taken: str) -> None:
    path = options.data_dir / taken
    if taken == "logs":
        options.data_dir.mkdir()
        path.touch()
    else:
        path.mkdir(parents=True)
    fleet = LocalFleet(options, Reporter(io.StringIO()))
    with pytest.raises(Stop, match=rf"cannot start (api|worker 1): {path}: ") as stopped:
        async with fleet:
            pass
    assert stopped.value.exit_code is Exit.NOT_STARTED
    assert not any(map(alive, fleet.pids))


async def test_a_log_that_can_be_written_no_more_ends_the_fleet_by_its_name(options: LocalFleetOptions) -> None:
    async with LocalFleet(options, Reporter(io.StringIO())) as fleet:
        log = options.data_dir / "logs" / "worker-1.log"
        log.unlink()
        log.mkdir()
        watch = asyncio.create_task(fleet.watch())
        os.kill(fleet.pids[1], signal.SIGKILL)
        stop = await failure_of(watch)
    assert str(stop).startswith(f"cannot start worker 1: {log}: ")


async def test_a_worker_that_keeps_dying_ends_the_fleet(
    options: LocalFleetOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.cli.local_fleet.restart_delay_s", lambda failures: 0.0)
    async with LocalFleet(options, Reporter(io.StringIO())) as fleet:
        monkeypatch.setenv("MODE", "bad model")
        watch = asyncio.create_task(fleet.watch())
        os.kill(fleet.pids[1], signal.SIGKILL)
        stop = await failure_of(watch)
    assert "6 times in a row" in str(stop)
    assert not any(map(alive, fleet.pids))


async def test_a_second_signal_kills_the_workers_and_still_lets_the_api_end_its_streams(
    options: LocalFleetOptions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MODE", "deaf")
    out = io.StringIO()
    fleet = LocalFleet(dataclasses.replace(options, drain_s=100.0), Reporter(out))
    async with fleet:
        leaving = asyncio.create_task(fleet.__aexit__())
        await until(out, "stopping workers")
        fleet.kill()
        async with asyncio.timeout(60):
            await leaving
    assert (tmp_path / "order").read_text().split() == ["api"]
    assert not any(map(alive, fleet.pids))


def server_pid(data_dir: Path) -> int:
    return int((data_dir / "valkey" / "valkey.pid").read_text())


async def test_a_fleet_whose_data_folder_is_removed_gets_a_new_server_and_still_stops(
    options: LocalFleetOptions, short_folder: Path
) -> None:
    data_dir = short_folder / "data"
    out = io.StringIO()
    embedded = dataclasses.replace(options, redis_url=None, data_dir=data_dir)
    async with asyncio.timeout(100), LocalFleet(embedded, Reporter(out)) as fleet, watching(fleet) as watch:
        before = server_pid(data_dir)
        shutil.rmtree(data_dir)
        while not (data_dir / "valkey" / "valkey.pid").exists():
            assert not watch.done()
            await asyncio.sleep(0.01)
        after = server_pid(data_dir)
        assert not alive(before) and alive(after)
        await until(out, "embedded server ready again")
        with pytest.raises(Stop, match="another `diffleet up`"):
            DataLock(data_dir, "url").take()
    assert "or the lock in it, was removed; it is held again; what runs now writes no logs" in out.getvalue()
    assert "the embedded server's files were removed: requests" in out.getvalue()
    assert "embedded server stopped" in out.getvalue()
    assert not any(map(alive, [*fleet.pids, after]))


async def test_a_fleet_whose_server_loses_its_files_says_so_and_starts_another(
    options: LocalFleetOptions, short_folder: Path
) -> None:
    data_dir = short_folder / "data"
    out = io.StringIO()
    embedded = dataclasses.replace(options, redis_url=None, data_dir=data_dir)
    async with asyncio.timeout(100), LocalFleet(embedded, Reporter(out)) as fleet, watching(fleet):
        before = server_pid(data_dir)
        shutil.rmtree(data_dir / "valkey")
        await until(out, "embedded server ready again")
        assert not alive(before) and alive(server_pid(data_dir))
    assert "the embedded server's files were removed: requests" in out.getvalue()
    assert "the lock in it" not in out.getvalue()


async def test_a_fleet_whose_lock_alone_is_removed_takes_it_again(options: LocalFleetOptions) -> None:
    out = io.StringIO()
    async with LocalFleet(options, Reporter(out)) as fleet, watching(fleet):
        (options.data_dir / "up.lock").unlink()
        await until(out, f"the data folder {options.data_dir}, or the lock in it, was removed; it is held again\n")
        with pytest.raises(Stop, match="another `diffleet up`"):
            DataLock(options.data_dir, "url").take()
    later = DataLock(options.data_dir, "url")
    later.take()
    later.release()


async def test_a_fleet_whose_folder_is_another_ones_ends_and_leaves_that_one_alone(
    options: LocalFleetOptions, short_folder: Path
) -> None:
    data_dir = short_folder / "data"
    embedded = dataclasses.replace(options, redis_url=None, data_dir=data_dir)
    theirs, server = DataLock(data_dir, "http://there"), EmbeddedServer(data_dir)
    try:
        async with asyncio.timeout(100), LocalFleet(embedded, Reporter(io.StringIO())) as fleet:
            watch = asyncio.create_task(fleet.watch())
            await asyncio.sleep(0)
            before = server_pid(data_dir)
            # At one time, as the fleet sees it.
            shutil.rmtree(data_dir)
            theirs.take()
            server.start()
            (data_dir / "worker-1.ready").touch()
            stop = await failure_of(watch)
        assert "was removed while it was in use: another `diffleet up`" in str(stop)
        assert "http://there" in str(stop)
        assert server.running and theirs.held and (data_dir / "worker-1.ready").exists()
        assert not any(map(alive, [*fleet.pids, before]))
    finally:
        server.stop()
        theirs.release()


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="a disk is filled by prlimit, which is Linux's")
async def test_a_fleet_whose_disk_is_full_waits_for_room_and_tells_of_it_once(
    options: LocalFleetOptions, short_folder: Path
) -> None:
    data_dir = short_folder / "data"
    out = io.StringIO()
    embedded = dataclasses.replace(options, redis_url=None, data_dir=data_dir)
    async with asyncio.timeout(100), LocalFleet(embedded, Reporter(out)) as fleet, watching(fleet):
        server, client = server_pid(data_dir), open_sync_client(EmbeddedServer(data_dir).url)
        resource.prlimit(server, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        client.set("k", "v")
        client.close()
        await until(out, "the embedded server refuses requests until it can write again: MISCONF Errors writing")
        resource.prlimit(server, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        await until(out, "the embedded server takes requests again")
        assert server_pid(data_dir) == server and alive(server)
    assert out.getvalue().count("refuses requests") == 1
    assert "does not answer" not in out.getvalue()


async def test_a_fleet_with_a_frozen_server_hears_that_it_shall_stop_and_a_second_time_kills_it(
    options: LocalFleetOptions, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.cli.local_fleet._SERVER_STOP_S", 600.0)
    data_dir = short_folder / "data"
    out = io.StringIO()
    fleet = LocalFleet(dataclasses.replace(options, redis_url=None, data_dir=data_dir), Reporter(out))
    async with asyncio.timeout(60):
        async with fleet:
            async with watching(fleet):
                server = server_pid(data_dir)
                os.kill(server, signal.SIGSTOP)
                await until(out, "the embedded server does not answer")
            leaving = asyncio.create_task(fleet.__aexit__())
            await until(out, "stopping the embedded server")
            fleet.kill()
            await leaving
    assert not any(map(alive, [*fleet.pids, server]))


async def test_who_cannot_hand_back_over_a_frozen_server_is_not_waited_for(
    options: LocalFleetOptions, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODE", "deaf")
    monkeypatch.setattr("shared.cli.local_fleet._STOP_SPARE_S", 600.0)
    monkeypatch.setattr("shared.cli.local_fleet._SERVER_STOP_S", 600.0)
    monkeypatch.setattr("shared.cli.local_fleet._SILENCE_S", 0.5)
    data_dir = short_folder / "data"
    out = io.StringIO()
    fleet = LocalFleet(dataclasses.replace(options, redis_url=None, data_dir=data_dir), Reporter(out))
    async with asyncio.timeout(60):
        async with fleet:
            server = server_pid(data_dir)
            os.kill(server, signal.SIGSTOP)
    assert f"the embedded server (process {server}) does not answer" in out.getvalue()
    assert not any(map(alive, [*fleet.pids, server]))


@pytest.mark.parametrize("answers", [[True], [False, False, True]])
async def test_a_server_that_answers_again_is_waited_for(answers: list[bool]) -> None:
    told: list[None] = []
    coming = iter(answers)
    asked_often = asyncio.Event()

    async def answering() -> bool:
        answer = next(coming, None)
        if answer is None:
            asked_often.set()
            await asyncio.Event().wait()
        return bool(answer)

    silence = asyncio.create_task(until_silent(answering, 600.0, lambda: told.append(None)))
    async with asyncio.timeout(60):
        await asked_often.wait()
    assert not silence.done() and len(told) == (False in answers)
    silence.cancel()


async def test_a_silence_is_told_once_each_time_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.cli.local_fleet._LOOK_S", 0.0)
    answers = iter([False, False, True, *[False] * 100])
    told: list[None] = []

    async def answering() -> bool:
        return next(answers)

    await until_silent(answering, 3.0, lambda: told.append(None), iter(range(100)).__next__)
    assert len(told) == 2


async def test_a_second_fleet_on_the_same_data_says_who_holds_it(options: LocalFleetOptions) -> None:
    lock = DataLock(options.data_dir, options.url)
    for _ in range(2):
        lock.take()
        with pytest.raises(Stop, match=rf"another `diffleet up` \(process {os.getpid()}, {options.url}\)"):
            async with LocalFleet(options, Reporter(io.StringIO())):
                pass
        lock.release()


async def test_a_port_in_use_is_refused_before_anything_starts(options: LocalFleetOptions) -> None:
    with socket.create_server(("127.0.0.1", options.port)):
        fleet = LocalFleet(options, Reporter(io.StringIO()))
        with pytest.raises(Stop, match=f"port {options.port}.*in use") as stopped:
            async with fleet:
                pass
        assert str(stopped.value).endswith("choose another --port")
    assert fleet.pids == []
    check_port("127.0.0.1", options.port)


@pytest.mark.parametrize("host", ["nobody.invalid", "", "192.0.2.1"])
@pytest.mark.parametrize("look", [free_port, lambda host: check_port(host, 8000)])
def test_a_host_that_is_not_here_is_what_to_choose_anew(host: str, look: Callable[[str], object]) -> None:
    with pytest.raises(Stop, match=f"cannot listen on {host}.*; choose another --host$") as stopped:
        look(host)
    assert stopped.value.exit_code is Exit.NOT_STARTED


def test_a_data_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Stop, match="cannot write in the data folder"):
        DataLock(tmp_path / "file" / "data", "url").take()


def test_a_lock_that_cannot_be_written_is_not_held_and_is_told(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    lock = DataLock(tmp_path, "url")
    # As on a full disk: the file comes to be, and takes no byte.
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(Stop, match=f"cannot write in the data folder {tmp_path}: "):
            lock.take()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not lock.held
    lock.take()
    assert lock.held
    lock.release()


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:80"), ("0.0.0.0", "http://127.0.0.1:80"), ("::", "http://[::1]:80")],
)
def test_the_url_is_one_that_can_be_asked(options: LocalFleetOptions, host: str, url: str) -> None:
    assert dataclasses.replace(options, host=host, port=80).url == url
