"""What a process has loaded when it begins to serve is no part of its garbage collections."""

import socket
import subprocess
import sys
from pathlib import Path

from shared.embedded import EmbeddedServer
from tests.fleet.processes import REPOSITORY
from worker.parallel.messages import Channel, Start

_TELL = """
import gc, sys

def tell(*_):
    print(gc.get_freeze_count(), len(gc.get_objects()), flush=True)
    return False
"""
_API = f"""{_TELL}
from api import process
process.Server.run = tell
process.main(sys.argv[1:])
"""
_WORKER = f"""{_TELL}
from worker import process
from worker.exits import ExitCode
process.Service.run = lambda self: ExitCode(int(tell()))
process.main(sys.argv[1:])
"""
_RANK = f"""{_TELL}
from worker.parallel import __main__ as rank, follower
follower.Follower.follow = tell
rank.main(int(sys.argv[1]))
"""


def _kept_and_walked(program: str, *arguments: str, descriptor: int | None = None) -> tuple[int, int]:
    """Return how many objects collections pass over, and how many a full one walks, as the process begins to serve."""
    kept_open = () if descriptor is None else (descriptor,)
    command = [sys.executable, "-c", program, *arguments]
    ended = subprocess.run(command, cwd=REPOSITORY, pass_fds=kept_open, capture_output=True, text=True, timeout=120)
    assert ended.stdout, ended.stderr
    kept, walked = ended.stdout.split()
    assert int(kept) > 50_000  # it has loaded what it serves with
    return int(kept), int(walked)


def test_an_api_passes_over_what_it_has_loaded() -> None:
    kept, walked = _kept_and_walked(_API)
    assert kept > 50 * walked


def test_a_worker_passes_over_what_it_has_loaded(fleet_server: EmbeddedServer, tiny_model: Path) -> None:
    flags = ("--redis-url", fleet_server.url, "--model", str(tiny_model), "--model-name", "heap")
    kept, walked = _kept_and_walked(_WORKER, *flags, "--num-pages", "16")
    assert kept > 50 * walked


def test_a_rank_passes_over_what_it_has_loaded(tiny_model: Path, tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        start = Start(
            0, 1, str(tmp_path / "meet"), str(tiny_model), "cpu", "float32", 1, "auto", "auto", "info", "text"
        )
        Channel(ours).send(start)
        kept, walked = _kept_and_walked(_RANK, str(theirs.fileno()), descriptor=theirs.fileno())
    assert kept > 50 * walked
