"""Why a worker process ended."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of `python -m worker`; a supervisor may act on them.

    0  CLEAN             drained after a signal; whatever was unfinished has been handed back
    2  BAD_SETTINGS      an option or environment variable is wrong
    3  BAD_MODEL         the model folder is missing, incomplete or of an unknown kind
    4  REDIS_UNREACHABLE no answer from Redis at start
    5  STUCK             the decode loop stopped advancing; its requests move on with their leases
    6  INTERNAL          an error of the program; its requests move on with their leases
    7  INTERRUPTED       a second signal cut the drain short; likewise
    8  PEER_LOST         a rank that holds a part of the model has ended; likewise
    """

    CLEAN = 0
    BAD_SETTINGS = 2
    BAD_MODEL = 3
    REDIS_UNREACHABLE = 4
    STUCK = 5
    INTERNAL = 6
    INTERRUPTED = 7
    PEER_LOST = 8
