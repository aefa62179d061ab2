"""One call for all who want the same at the same time."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Flights(Generic[T]):
    """Calls under way, by key. For one event loop.

    A caller who is cancelled leaves the call to the others; the call ends by itself, or with `cancel`.
    """

    def __init__(self) -> None:
        self._flights: dict[str, asyncio.Task[T]] = {}

    async def join(self, key: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return what the call under `key` returns, which is begun if there is none; raises what it raises."""
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = asyncio.create_task(call())
            flight.add_done_callback(lambda flight: self._land(key, flight))
        return await asyncio.shield(flight)

    def cancel(self) -> None:
        for flight in list(self._flights.values()):
            flight.cancel()

    def _land(self, key: str, flight: asyncio.Task[T]) -> None:
        del self._flights[key]
        if not flight.cancelled():
            flight.exception()  # Whoever waited may have left: nobody else would look at it.
