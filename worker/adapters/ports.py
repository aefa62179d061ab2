"""What the queue's side of a worker needs of its adapters; no torch."""

from collections.abc import Sequence
from typing import Literal, Protocol, Self

from shared.commands import LoraUse


class AdapterUnavailable(Exception):
    """An adapter cannot be loaded here, or not now; the message tells why, and names it.

    Another worker may be able to.
    """

    def __init__(self, message: str, param: Literal["lora", "model"] = "lora") -> None:
        """`param` is the caller's field at fault."""
        super().__init__(message)
        self.param: Literal["lora", "model"] = param

    @classmethod
    def of(cls, use: LoraUse, why: object) -> Self:
        """Return the complaint about one adapter of a request."""
        return cls(f"adapter {use.name}: {why}", use.param)


class AdaptersFull(AdapterUnavailable):
    """There is no room for it beside those in use; there will be once some of their requests have ended."""


class AdapterFaulty(AdapterUnavailable):
    """No worker will ever load it: its own files, the ones that were registered, do not go with the model."""


class AdapterWatch(Protocol):
    """Who wants to know what becomes of adapters; each method may be called from any thread."""

    def count_adapter_load(self, seconds: float) -> None: ...

    def count_adapter_failure(self) -> None: ...

    def count_adapter_eviction(self) -> None: ...

    def show_adapters(self, count: int, size: int) -> None:
        """`size` in bytes."""
        ...


class Adapters(Protocol):
    def hold(self, uses: Sequence[LoraUse]) -> None:
        """Make all of them resident, and keep them so until `release`; raises `AdapterUnavailable`, holding none."""
        ...

    def release(self, uses: Sequence[LoraUse]) -> None: ...
