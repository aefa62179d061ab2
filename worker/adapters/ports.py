"""What the queue's side of a worker needs of its adapters; no torch."""

from collections.abc import Sequence
from typing import Protocol

from shared.commands import LoraUse


class AdapterUnavailable(Exception):
    """An adapter cannot be loaded here, or not now; the message tells why, and names it."""


class Adapters(Protocol):
    def hold(self, uses: Sequence[LoraUse]) -> None:
        """Make all of them resident, and keep them so until `release`; raises `AdapterUnavailable`, holding none."""
        ...

    def release(self, uses: Sequence[LoraUse]) -> None: ...
