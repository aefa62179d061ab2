"""What a process must survive from its first moment to its last: Ctrl-C before anything runs, output that is full.

Nothing heavy is imported here.
"""

import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable, Generator
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, TextIO

from shared.cli.exits import Exit

if TYPE_CHECKING:
    from typing_extensions import Buffer


def start(load: Callable[[], Callable[[], int]]) -> NoReturn:
    """Be a process: end with what the main function returns that `load` imports."""
    with early_interrupts():
        main = load()
    try:
        with written():
            sys.exit(main())
    except KeyboardInterrupt:  # before it listens to signals itself
        sys.exit(Exit.INTERRUPTED)


@contextlib.contextmanager
def early_interrupts() -> Generator[None]:
    """End quietly at a Ctrl-C within: imports have nothing to clean up, and their traceback tells nobody anything."""
    former = signal.getsignal(signal.SIGINT)
    if former is not signal.default_int_handler:  # whoever started it may want no interrupts
        yield
        return
    signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    os._exit(Exit.INTERRUPTED)


@contextlib.contextmanager
def written() -> Generator[None]:
    """Tell in one line that standard output takes no more, as on a full disk, and end with `Exit.FAILED`."""
    former: TextIO | None = sys.__stdout__
    if former is None:  # closed by whoever started it
        yield
        return
    # What was printed before would come behind all that is printed now.
    former.flush()
    output = _Output(former.fileno(), "w", closefd=False)
    stdout = io.TextIOWrapper(io.BufferedWriter(output), former.encoding, former.errors, line_buffering=former.isatty())
    before, sys.stdout = sys.stdout, stdout
    try:
        try:
            yield
        finally:
            # What is held back would fail when Python ends, with no word and no exit code of ours.
            stdout.flush()
    except (OSError, SystemExit):
        if output.fault is None:
            raise
        # Python must not try once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())
        if isinstance(output.fault, BrokenPipeError):
            raise SystemExit(128 + signal.SIGPIPE) from None
        print(f"diffleet: cannot write to standard output: {output.fault.strerror}", file=sys.stderr)
        raise SystemExit(Exit.FAILED) from None
    finally:
        sys.stdout = before


class _Output(io.FileIO):
    """Remembers why it could not write: an OSError does not say which file it is about."""

    fault: OSError | None = None

    def write(self, data: "Buffer", /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.fault = error
            raise
