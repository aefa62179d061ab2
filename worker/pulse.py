"""The decode loop's sign of life."""

from collections.abc import Iterator
from contextlib import contextmanager


class Pulse:
    """A counter that the loop moves and the heartbeat watches.

    One writer; the watcher reads two plain attributes, which needs no lock.
    """

    def __init__(self, patience_s: float) -> None:
        self.count = 0
        self.patience_s = patience_s
        """How long the count may stand still before the loop counts as stuck."""

    def advance(self) -> None:
        self.count += 1

    @contextmanager
    def declare(self, patience_s: float) -> Iterator[None]:
        """Announce a phase that may take longer than a step: loading, compiling."""
        usual, self.patience_s = self.patience_s, patience_s
        try:
            yield
        finally:
            self.advance()
            self.patience_s = usual
