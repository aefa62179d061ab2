"""How a command ends: what stopped it becomes a message on stderr and an exit code."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

import typer

from shared.cli.exits import Exit, Stop

T = TypeVar("T")


@contextlib.contextmanager
def reporting() -> Generator[None]:
    """Turn `Stop`, an interrupt and a closed pipe into an exit code."""
    try:
        yield
    except Stop as stop:
        sys.stdout.flush()
        tell(stop)
        raise typer.Exit(stop.exit_code) from None
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise typer.Exit(Exit.INTERRUPTED) from None
    except BrokenPipeError:
        # Whoever read our output has had enough; Python must not complain about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(128 + signal.SIGPIPE) from None


def tell(stop: Stop) -> None:
    """Print the message on stderr."""
    print(f"diffleet: {stop}", file=sys.stderr)
    for line in stop.details:
        print(f"    {line}", file=sys.stderr)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end; raises `typer.Exit` for what stopped it."""
    with reporting():
        try:
            return asyncio.run(work)
        except BaseExceptionGroup as group:
            # A task group wraps what ended it; a Stop inside is the message to show.
            stops, others = group.split(Stop)
            if stops is None or others is not None:
                raise
            raise _first(stops) from None


def _first(group: BaseExceptionGroup[Stop]) -> Stop:
    leaf: BaseException = group
    while isinstance(leaf, BaseExceptionGroup):
        leaf = leaf.exceptions[0]
    assert isinstance(leaf, Stop)
    return leaf
