"""Run a command that ends with its starter: `python leash.py <starter pid> <command> ...`.

A child in a session of its own is not told when its starter is killed with SIGKILL. This program asks the kernel for
that (Linux), or leaves a watcher beside the command (elsewhere), and then becomes the command: same process id, same
standard streams. It imports only what it needs, since every child pays for it.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time

_PR_SET_PDEATHSIG = 1
_WATCH_INTERVAL_S = 0.5


def main() -> None:
    starter, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        # The starter may have died before the request was in place.
        if os.getppid() != starter:
            sys.exit(0)
    else:
        _leave_watcher(starter)
    os.execvp(command[0], command)


def _leave_watcher(starter: int) -> None:
    """Fork a process that sends SIGTERM to this one once `starter` is gone, and ends with either."""
    command = os.getpid()
    if os.fork():
        return
    while os.getppid() == command:
        try:
            os.kill(starter, 0)
        except ProcessLookupError:
            with contextlib.suppress(ProcessLookupError):
                os.kill(command, signal.SIGTERM)
            break
        time.sleep(_WATCH_INTERVAL_S)
    os._exit(0)


if __name__ == "__main__":
    main()
