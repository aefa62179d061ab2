"""Files of secrets that are changed while the process runs."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

logger = logging.getLogger("diffleet.api")

LOOK_S = 1.0
"""A change is seen within so long."""

T = TypeVar("T")


class KeptFile(Generic[T]):
    """What a file says, read anew once it has changed; as before where it then says nothing that can be used."""

    def __init__(self, path: Path, load: Callable[[Path], T], clock: Callable[[], float] = time.monotonic) -> None:
        """`load` raises ValueError with a message that never repeats a value; so does this."""
        self._path = path
        self._load = load
        self._clock = clock
        # Taken before it is read: what is written meanwhile is read next time.
        self._stamp = self._look()
        self._value = load(path)
        self._next_look = clock() + LOOK_S

    def __call__(self) -> T:
        now = self._clock()
        if now < self._next_look:
            return self._value
        self._next_look = now + LOOK_S
        stamp = self._look()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._value = self._load(self._path)
            except ValueError as error:
                logger.error("a changed file is not used, what it said before still holds: %s", error)
            else:
                logger.info("a changed file was read: %s", self._path)
        return self._value

    def _look(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        # A file that is replaced may be as old and as long as the one before it.
        return found.st_mtime_ns, found.st_size, found.st_ino
