"""What takes long, told while it takes long: a spinner with the time on a terminal, plain lines elsewhere."""

import contextlib
import errno
import io
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import IO, TextIO, cast

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

_NOBODY_READS = (errno.EIO, errno.EPIPE)


class Reporter:
    """Writes to `file` (standard error). Only finished phases stay on the screen.

    What cannot be written is lost without an error: no work ends because nobody reads of it.
    """

    def __init__(self, file: TextIO) -> None:
        self._console = Console(file=cast("IO[str]", _Unfailing(file)), highlight=False, soft_wrap=True)

    @contextmanager
    def phase(self, doing: str, done: str) -> Generator[None]:
        """Show `doing` until the block ends, then `done` with the seconds it took; an error leaves neither."""
        started = time.monotonic()
        if self._console.is_terminal:
            columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            with Progress(*columns, console=self._console, transient=True) as progress:
                progress.add_task(doing, total=None)
                yield
        else:
            self.line(f"{doing} ...")
            yield
        self.line(f"{done} ({time.monotonic() - started:.1f} s)")

    def line(self, text: str) -> None:
        self._console.print(text, markup=False)


class _Unfailing(io.TextIOBase):
    """A stream over `file` whose writes never fail."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._file.encoding

    def isatty(self) -> bool:
        return self._file.isatty()

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, text: str, /) -> int:
        try:
            return self._file.write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Lead the file nowhere if its terminal or pipe is gone: what it still holds would fail again at the exit."""
        if error.errno in _NOBODY_READS:
            with contextlib.suppress(OSError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._file.fileno())
                os.close(nowhere)
