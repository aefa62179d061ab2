"""Why a `diffleet` command ended."""

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of the command line.

    0    OK           done; `up`: stopped by a signal, everything closed
    1    FAILED       the fleet could not finish the request; `bench`: at least one of them; `up`: a process failed for
                      good while serving; any: standard output takes no more
    2    USAGE        an option or argument is wrong
    3    UNREACHABLE  no fleet answers at that address
    4    REFUSED      the fleet refused the request; the message names the field
    5    NOT_STARTED  `up` could not start; the message shows the log of what failed
    130  INTERRUPTED  Ctrl-C
    """

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    REFUSED = 4
    NOT_STARTED = 5
    INTERRUPTED = 130


class Stop(Exception):
    """End the command with a message and an exit code; `details` are further lines, as from a log."""

    def __init__(self, exit_code: Exit, message: str, details: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.details = details
