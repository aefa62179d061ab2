"""Child processes of one machine's fleet: start, watch, stop.

Every child has a session of its own, so that Ctrl-C in the terminal reaches only the supervisor, which then stops the
children in order; and a leash, so that none outlives a supervisor that was killed.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import shared.cli.leash as leash

_TAIL_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to start: `module` with `python -m`, its flags, and what is added to the environment."""

    name: str
    module: str
    flags: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()

    def command(self) -> list[str]:
        # -P: a folder named `api` where the user happens to stand must not be taken for ours.
        return [sys.executable, "-P", "-m", self.module, *self.flags]


class Child:
    """One running process. Its output goes to `log`, which is appended to."""

    def __init__(self, recipe: Recipe, process: asyncio.subprocess.Process, log: Path, log_start: int) -> None:
        self.recipe = recipe
        self.log = log
        self._process = process
        self._log_start = log_start

    @classmethod
    async def start(cls, recipe: Recipe, log: Path, environ: Mapping[str, str] | None = None) -> "Child":
        """Start the process. Call from the main thread: the leash ends when the thread that started it does."""
        log.parent.mkdir(parents=True, exist_ok=True)
        env = {**(os.environ if environ is None else environ), **dict(recipe.env), "PYTHONUNBUFFERED": "1"}
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *(*on_a_leash(), *recipe.command()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=env,
            )
            return cls(recipe, process, log, output.tell())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal."""
        return self._process.returncode

    async def wait(self) -> int:
        return await self._process.wait()

    async def stop(self, grace_s: float) -> bool:
        """Send SIGTERM, after `grace_s` SIGKILL, and wait. True if the first was enough."""
        self.signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), grace_s)
        except TimeoutError:
            self.signal(signal.SIGKILL)
            await self._process.wait()
            return False
        return True

    def signal(self, number: signal.Signals) -> None:
        """Signal the child and what it started; no error if it is gone."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def last_lines(self, count: int = 15) -> list[str]:
        """Return the end of what this process has written, without what an earlier one left in the same file."""
        return tail(self.log, count, self._log_start)


def on_a_leash() -> tuple[str, ...]:
    """Return what to put before a command that is to end with this process, or with the thread that starts it."""
    return (sys.executable, "-S", leash.__file__, str(os.getpid()))


def tail(path: Path, count: int, start: int = 0) -> list[str]:
    """Return the last `count` non-empty lines of a file from byte `start`; an unreadable file has none."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(start, end - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-count:]


def describe_exit(code: int, meanings: Mapping[int, str] | None = None) -> str:
    """Say in words how a process ended."""
    if code < 0:
        try:
            return f"was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"was ended by signal {-code}"
    meaning = (meanings or {}).get(code)
    return f"ended with exit code {code}" + (f" ({meaning})" if meaning else "")


def restart_delay_s(failures: int, base_s: float = 0.5, cap_s: float = 30.0) -> float:
    """Return how long to wait before restart number `failures` (1 = the first): doubling, capped."""
    return min(cap_s, base_s * 2 ** min(max(failures - 1, 0), 32))


def flags_of(values: Mapping[str, object]) -> Sequence[str]:
    """Return `--name value` pairs for those values that are set."""
    return [part for name, value in values.items() if value is not None for part in (f"--{name}", str(value))]
