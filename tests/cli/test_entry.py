"""From the first moment of a command to its last: interrupts before anything runs, output that is full."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shared.cli.entry import start, written
from shared.cli.exits import Exit
from tests.cli.fleet_process import DIFFLEET, environment


@pytest.mark.parametrize("command", [["--version"], ["generate", "x"], ["up"]])
def test_ctrl_c_while_it_is_imported_ends_a_command_quietly(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n")
    first = f"{tmp_path}:{environment()['PYTHONPATH']}"
    ended = subprocess.run(
        [*DIFFLEET, *command],
        env={**environment(), "PYTHONPATH": first},
        capture_output=True,
        timeout=50,
        # Whoever runs the tests in the background may have them ignore it, which children inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (Exit.INTERRUPTED, b"", b"")


@pytest.mark.parametrize("module", ["api", "api.jobs", "worker", "shared.fake"])
def test_ctrl_c_while_it_is_imported_ends_a_process_quietly(module: str, tmp_path: Path) -> None:
    (tmp_path / "pydantic_settings.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\n")
    first = f"{tmp_path}:{environment()['PYTHONPATH']}"
    ended = subprocess.run(
        [sys.executable, "-P", "-m", module],
        env={**environment(), "PYTHONPATH": first},
        capture_output=True,
        timeout=50,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (Exit.INTERRUPTED, b"", b"")


def test_ctrl_c_before_a_process_listens_ends_it_quietly() -> None:
    def main() -> int:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        start(lambda: main)
    assert ended.value.code == Exit.INTERRUPTED


@pytest.mark.parametrize("buffered", ["", "1"])
@pytest.mark.parametrize(
    "command",
    [
        ["--version"],
        ["--help"],
        ["models", "--url", "http://127.0.0.1:1"],
        ["eval"],
        ["api", "--help"],
        ["worker", "--help"],
        ["jobs", "--help"],
    ],
)
def test_a_full_disk_under_the_output_is_told_in_one_line(command: list[str], buffered: str) -> None:
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(
            [*DIFFLEET, *command],
            env=environment(PYTHONUNBUFFERED=buffered),
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=60,
        )
    assert ended.returncode == Exit.FAILED
    assert ended.stderr == b"diffleet: cannot write to standard output: No space left on device\n"


@pytest.mark.parametrize("program", [["api.keys", "--id", "x"], ["api.webhooks"], ["shared.fake", "--help"]])
def test_a_full_disk_under_the_output_of_other_programs_is_told_too(program: list[str]) -> None:
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(
            [sys.executable, "-P", "-m", *program], env=environment(), stdout=full, stderr=subprocess.PIPE, timeout=60
        )
    assert ended.returncode == Exit.FAILED
    assert ended.stderr.splitlines()[-1] == b"diffleet: cannot write to standard output: No space left on device"
    assert b"Traceback" not in ended.stderr


def test_a_fault_of_another_file_is_not_blamed_on_the_output() -> None:
    before = sys.stdout
    with pytest.raises(FileNotFoundError), written():
        Path("/nowhere/at/all").read_bytes()
    assert sys.stdout is before


def test_what_was_printed_before_comes_first() -> None:
    program = "from shared.cli.entry import written\nprint(1)\nwith written():\n    print(2)\nprint(3)"
    ended = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, timeout=50)
    assert ended.stdout.split() == [b"1", b"2", b"3"]
