"""What takes long, told while it takes long: a spinner with the time on a terminal, plain lines elsewhere."""

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Reporter:
    """Writes to `file` (standard error). Only finished phases stay on the screen."""

    def __init__(self, file: TextIO) -> None:
        self._console = Console(file=file, highlight=False, soft_wrap=True)

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
