"""Child processes: their output, their end, and that none outlives who started it."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.cli.children import Child, Recipe, describe_exit, flags_of, restart_delay_s, tail

ROOT = Path(__file__).parents[2]

SLEEPER = "import sys, time; print('ready', *sys.argv[1:], flush=True); time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
)
BROKEN = "import sys; print('the reason is here'); sys.exit(3)"

STARTER = """
import asyncio, sys, time
from pathlib import Path
from shared.cli.children import Child, Recipe

async def main():
    child = await Child.start(Recipe("sleeper", "sleeper"), Path(sys.argv[1]))
    print(child.pid, flush=True)
    time.sleep(600)

asyncio.run(main())
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment in which `python -m sleeper` and its like exist."""
    for name, code in {"sleeper": SLEEPER, "stubborn": STUBBORN, "broken": BROKEN}.items():
        (tmp_path / f"{name}.py").write_text(code)
    return {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}


async def until_ready(child: Child) -> None:
    async with asyncio.timeout(30):
        while not child.last_lines():
            await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


async def test_a_child_gets_its_flags_and_is_stopped_by_sigterm(tmp_path: Path, environ: dict[str, str]) -> None:
    child = await Child.start(Recipe("s", "sleeper", ("--port", "1")), tmp_path / "logs" / "s.log", environ)
    await until_ready(child)
    assert child.last_lines() == ["ready --port 1"]
    assert child.exit_code is None
    assert await child.stop(grace_s=20)
    assert child.exit_code == -signal.SIGTERM


async def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path, environ: dict[str, str]) -> None:
    child = await Child.start(Recipe("s", "stubborn"), tmp_path / "s.log", environ)
    await until_ready(child)
    assert not await child.stop(grace_s=0.1)
    assert child.exit_code == -signal.SIGKILL


async def test_a_child_is_out_of_reach_of_ctrl_c(tmp_path: Path, environ: dict[str, str]) -> None:
    child = await Child.start(Recipe("s", "sleeper"), tmp_path / "s.log", environ)
    try:
        assert os.getsid(child.pid) == child.pid != os.getsid(0)
    finally:
        await child.stop(20)


async def test_the_end_of_the_log_is_that_of_this_run(tmp_path: Path, environ: dict[str, str]) -> None:
    log = tmp_path / "b.log"
    log.write_text("an older run said this\n")
    child = await Child.start(Recipe("b", "broken"), log, environ)
    assert await child.wait() == 3
    assert child.last_lines() == ["the reason is here"]
    assert log.read_text().startswith("an older run")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_child_ends_when_its_starter_is_killed(tmp_path: Path, environ: dict[str, str]) -> None:
    command = [sys.executable, "-c", STARTER, str(tmp_path / "s.log")]
    starter = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    with starter.stdout:
        pid = int(starter.stdout.readline())
    assert alive(pid)
    starter.kill()
    starter.wait()
    deadline = time.monotonic() + 30
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(pid)


def test_an_unreadable_log_has_no_lines(tmp_path: Path) -> None:
    assert tail(tmp_path / "none.log", 5) == []


@given(lines=st.lists(st.text("ab \n", max_size=30), max_size=30), count=st.integers(1, 10))
def test_the_tail_is_the_last_lines_with_text(
    lines: list[str], count: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("tail") / "log"
    path.write_text("\n".join(lines))
    assert tail(path, count) == [line for line in "\n".join(lines).split("\n") if line.strip()][-count:]


def test_exits_are_told_in_words() -> None:
    assert describe_exit(3) == "ended with exit code 3"
    assert describe_exit(-9) == "was ended by SIGKILL"
    assert describe_exit(4, {4: "no Redis"}) == "ended with exit code 4 (no Redis)"


@given(st.integers(1, 10_000))
def test_pauses_before_restarts_grow_to_a_cap(failures: int) -> None:
    assert restart_delay_s(1) == 0.5
    assert restart_delay_s(failures) <= restart_delay_s(failures + 1) <= 30.0


def test_unset_values_make_no_flags() -> None:
    assert flags_of({"port": 1, "model": None, "host": "h"}) == ["--port", "1", "--host", "h"]
