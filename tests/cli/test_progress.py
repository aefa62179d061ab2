"""What is told of the progress: whether anybody reads it or not, the work goes on."""

import errno
import os
import pty
from collections.abc import Callable
from typing import TextIO

import pytest

from shared.cli.progress import Reporter


def deserted_terminal() -> TextIO:
    other_end, terminal = pty.openpty()
    os.close(other_end)
    return os.fdopen(terminal, "w")


def deserted_pipe() -> TextIO:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


@pytest.mark.parametrize("make", [deserted_terminal, deserted_pipe])
def test_work_that_nobody_reads_of_is_done_to_its_end(make: Callable[[], TextIO]) -> None:
    with make() as file:
        with pytest.raises(OSError) as failure:
            os.write(file.fileno(), b"x")
        assert failure.value.errno in (errno.EIO, errno.EPIPE)
        reporter = Reporter(file)
        done = []
        reporter.line("before")
        with reporter.phase("stopping workers", "workers stopped"):
            done.append(1)
        reporter.line("after")
        assert done == [1]
    # Closed without an error: nothing is left that would fail at the exit.


def test_on_a_terminal_a_deserted_phase_draws_without_an_error() -> None:
    other_end, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as file:
        reporter = Reporter(file)
        with reporter.phase("stopping workers", "workers stopped"):
            os.close(other_end)
        reporter.line("after")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_loses_lines_and_ends_no_work() -> None:
    file = open("/dev/full", "w")
    reporter = Reporter(file)
    reporter.line("lost")
    with reporter.phase("stopping workers", "workers stopped"):
        pass
    with pytest.raises(OSError):
        file.close()


def test_an_error_of_the_work_itself_is_not_swallowed() -> None:
    with deserted_pipe() as file, pytest.raises(BrokenPipeError), Reporter(file).phase("doing", "done"):
        raise BrokenPipeError
