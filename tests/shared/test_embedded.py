"""The embedded server: started once, adopted by whoever comes later, its data kept."""

import asyncio
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.connection import open_sync_client
from shared.embedded import EmbeddedServer, EmbeddedServerError


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="df-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def server(folder: Path) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(folder)
    yield server
    server.stop()


def test_data_survives_a_stop_and_a_start(server: EmbeddedServer) -> None:
    assert server.start() is False
    client = open_sync_client(server.url)
    client.set("k", "v")
    client.close()
    server.stop()
    assert not server.running

    assert server.start() is False
    client = open_sync_client(server.url)
    assert client.get("k") == b"v"
    assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
    client.close()


def test_a_server_that_outlived_its_program_is_adopted_and_can_be_stopped(server: EmbeddedServer, folder: Path) -> None:
    program = textwrap.dedent(f"""
        import os, pathlib, signal
        from shared.embedded import EmbeddedServer
        EmbeddedServer(pathlib.Path({str(folder)!r})).start()
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    subprocess.run([sys.executable, "-c", program], timeout=30, cwd=Path(__file__).parents[2])
    pid = server.pid
    assert server.running and pid is not None

    assert server.start() is True
    assert server.pid == pid
    server.stop()
    assert not server.running
    server.stop()


def test_a_start_while_the_server_before_is_on_its_way_out_starts_one_anew(
    server: EmbeddedServer, folder: Path
) -> None:
    server.start()
    pid = server.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    # It answers nobody and holds the lock; then it is gone.
    threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
    later = EmbeddedServer(folder)
    assert later.start() is False
    assert later.running and later.pid != pid
    later.stop()


def test_the_server_is_not_in_the_process_group_that_ctrl_c_reaches(server: EmbeddedServer) -> None:
    server.start()
    assert server.pid is not None
    assert os.getpgid(server.pid) != os.getpgid(0)


def test_a_server_killed_hard_keeps_what_it_acknowledged_if_it_flushes_each_write(folder: Path) -> None:
    server = EmbeddedServer(folder, fsync="always")
    server.start()
    client = open_sync_client(server.url)
    client.set("k", "v")
    client.set("k", "w")
    client.close()
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    while server.running:
        pass

    assert server.start() is False
    client = open_sync_client(server.url)
    assert client.get("k") == b"w"
    assert client.config_get("appendfsync") == {"appendfsync": "always"}
    client.close()
    server.stop()


def test_a_second_server_never_opens_the_same_data_while_the_first_is_deaf(
    server: EmbeddedServer, folder: Path
) -> None:
    server.start()
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    try:
        with pytest.raises(EmbeddedServerError, match="does not answer"):
            EmbeddedServer(folder).start(timeout_s=0.1)
    finally:
        os.kill(server.pid, signal.SIGCONT)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("lost", ["socket", "folder"])
def test_a_server_of_ours_that_nobody_can_reach_any_more_is_ended_and_one_started_anew(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, lost: str, frozen: bool
) -> None:
    server.start()
    client = open_sync_client(server.url)
    client.set("k", "v")
    client.close()
    before = server.pid
    assert before is not None
    if lost == "socket":
        server.socket_path.unlink()
    else:
        shutil.rmtree(server.socket_path.parent)
    if frozen:
        monkeypatch.setattr("shared.embedded._END_S", 0.3)
        os.kill(before, signal.SIGSTOP)

    assert server.start() is False

    assert server.running and server.pid != before
    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)
    client = open_sync_client(server.url)
    assert client.get("k") == (b"v" if lost == "socket" else None)
    client.close()


def test_a_server_whose_folder_is_gone_is_stopped(server: EmbeddedServer) -> None:
    server.start()
    pid = server.pid
    assert pid is not None
    shutil.rmtree(server.socket_path.parent)
    server.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_server_is_stopped_without_a_word_to_another_one_that_has_its_place(server: EmbeddedServer) -> None:
    server.start()
    pid = server.pid
    assert pid is not None and not server.lost
    shutil.rmtree(server.socket_path.parent)
    assert server.lost
    other = EmbeddedServer(server.socket_path.parent.parent)
    assert other.start() is False
    try:
        assert server.lost
        server.stop()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        assert other.running and other.pid is not None and not other.lost
    finally:
        other.stop()


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="a disk is filled by prlimit, which is Linux's")
async def test_a_server_whose_disk_is_full_runs_and_says_so_until_there_is_room(folder: Path) -> None:
    # Python ignores the signal that a file is too long, and so does the server that it becomes.
    python = (sys.executable, "-c", "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])")
    server = EmbeddedServer(folder, launcher=python)
    try:
        server.start()
        assert server.pid is not None and await server.refusal() is None
        client = open_sync_client(server.url)
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        client.set("k", "v")
        async with asyncio.timeout(60):
            while (refusal := await server.refusal()) is None:
                await asyncio.sleep(0.01)
        assert refusal.startswith("MISCONF Errors writing to the AOF file")
        assert server.running and server.start() and EmbeddedServer(folder).start()
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        async with asyncio.timeout(60):
            while await server.refusal() is not None:
                await asyncio.sleep(0.01)
        assert client.get("k") == b"v"
        client.close()
    finally:
        server.stop()


async def test_waiting_for_a_frozen_server_leaves_the_loop_free_and_can_be_cut_short(server: EmbeddedServer) -> None:
    server.start()
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    for waiting in (server.start_unblocked(timeout_s=600.0), server.stop_unblocked(timeout_s=600.0)):
        task = asyncio.create_task(waiting)
        for _ in range(20):
            await asyncio.sleep(0.01)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    stopping = asyncio.create_task(server.stop_unblocked(timeout_s=600.0))
    server.kill()
    await stopping


def test_a_long_data_path_still_gets_a_socket_that_fits(folder: Path) -> None:
    deep = folder / ("d" * 100)
    server = EmbeddedServer(deep)
    assert len(os.fsencode(server.socket_path)) <= 103
    server.start()
    try:
        assert server.running
    finally:
        server.stop()


def test_a_folder_that_cannot_be_made_is_a_clear_error(folder: Path) -> None:
    (folder / "file").write_text("")
    with pytest.raises(EmbeddedServerError, match="cannot write"):
        EmbeddedServer(folder / "file").start()
