"""Two workers of two processes each: whichever process dies, its whole worker goes, and the other one takes over."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shared.client import FleetClient
from shared.embedded import EmbeddedServer
from tests.fleet.conftest import SpawnWorker
from tests.fleet.processes import PATIENCE_S, REPOSITORY, WorkerProcess, run_worker, until
from tests.fleet.requests_for_tests import assert_whole, collect, sequential, text_of, tokens_of
from tests.fleet.test_failover import Pair, assert_same, disturbed, epochs, owners
from worker.exits import ExitCode

NAME = "ranks"
LENGTH = 300
FLAGS = ("--tensor-parallel", "2", "--metrics-host", "127.0.0.1")


@pytest.fixture(scope="module")
def module_pair(spawn_worker: SpawnWorker) -> Pair:
    return Pair(spawn_worker, NAME, *FLAGS)


@pytest.fixture
def pair(module_pair: Pair) -> Pair:
    return module_pair.complete()


def is_gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_killed_in_mid_request_ends_its_worker_and_the_other_goes_on_without_a_gap(
    pair: Pair, fleet: FleetClient, rank: int
) -> None:
    others: list[int] = []

    def kill(worker: WorkerProcess) -> None:
        others.extend(worker.children)
        if rank == 0:
            worker.send(signal.SIGKILL)
        else:
            os.kill(others[0], signal.SIGKILL)

    victim, events = await disturbed(fleet, pair, sequential(NAME, LENGTH, seed=11), kill)

    assert len(others) == 1
    assert victim.wait_exit() == (-signal.SIGKILL if rank == 0 else ExitCode.PEER_LOST)
    until(lambda: is_gone(others[0]), "the other rank has ended", patience_s=10.0)
    assert len(owners(events)) == 2
    assert set(epochs(events)) == {1, 2} and epochs(events) == sorted(epochs(events))
    calm = await collect(fleet.run(sequential(NAME, LENGTH, seed=11)))
    assert_same(events, calm)


async def test_two_processes_give_what_one_gives_and_leave_when_told(
    fleet: FleetClient, spawn_worker: SpawnWorker
) -> None:
    alone = spawn_worker("alone").wait_ready()
    shared = spawn_worker("shared", *FLAGS).wait_ready()
    expected = await collect(fleet.run(sequential("alone", 40, seed=3)))
    found = await collect(fleet.run(sequential("shared", 40, seed=3)))
    others = shared.children

    assert_whole(found)
    assert (text_of(found), tokens_of(found)) == (text_of(expected), tokens_of(expected))
    assert (shared.metrics()["diffleet_ranks"], alone.metrics()["diffleet_ranks"]) == (2, 1)
    devices = [worker.device for name in ("shared", "alone") for worker in await fleet.workers(name)]
    assert devices == ["cpu x2", "cpu"]
    shared.send(signal.SIGTERM)
    assert shared.wait_exit() == ExitCode.CLEAN
    assert [is_gone(process) for process in others] == [True]


def test_a_model_without_equal_shares_ends_the_worker_by_the_size_at_fault(
    fleet_server: EmbeddedServer, tiny_model: Path
) -> None:
    ended = run_worker("--redis-url", fleet_server.url, "--model", str(tiny_model), "--tensor-parallel", "3")

    assert ended.returncode == ExitCode.BAD_MODEL
    assert "tensor_parallel: 4 attention heads cannot be shared by 3 ranks" in ended.stderr


def test_adapters_are_refused_with_ranks(tmp_path: Path) -> None:
    ended = run_worker("--model-store", str(tmp_path), "--tensor-parallel", "2")

    assert ended.returncode == ExitCode.BAD_SETTINGS
    assert "model_store: adapters cannot be used with tensor_parallel 2" in ended.stderr


def test_a_rank_whose_first_leaves_before_it_has_said_anything_ends() -> None:
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-m", "worker.parallel", str(theirs.fileno())], cwd=REPOSITORY, pass_fds=[theirs.fileno()]
    )
    theirs.close()
    ours.close()

    assert process.wait(PATIENCE_S) == ExitCode.PEER_LOST
