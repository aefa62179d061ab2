"""Commands on their way to the engine, from any thread."""

import queue
from dataclasses import dataclass

from worker.engine.ports import Arrival, Inbox


@dataclass(frozen=True, slots=True)
class _Abort:
    id: str
    reason: str


@dataclass(frozen=True, slots=True)
class _Hurry:
    id: str


@dataclass(frozen=True, slots=True)
class _GiveBack:
    id: str


@dataclass(frozen=True, slots=True)
class _Flush:
    pass


@dataclass(frozen=True, slots=True)
class _Drop:
    id: str


_Letter = Arrival | _Abort | _Drop | _Hurry | _GiveBack | _Flush | None


class Mailbox:
    """Many writers, one reader: the thread that owns the engine.

    Writers never block, and may be signal handlers: `SimpleQueue.put` is reentrant.
    """

    def __init__(self) -> None:
        self._letters: queue.SimpleQueue[_Letter] = queue.SimpleQueue()

    def arrive(self, arrival: Arrival) -> None:
        self._letters.put(arrival)

    def abort(self, request_id: str, reason: str) -> None:
        self._letters.put(_Abort(request_id, reason))

    def drop(self, request_id: str) -> None:
        """Make the engine forget a request without an event."""
        self._letters.put(_Drop(request_id))

    def hurry(self, request_id: str) -> None:
        """Make the engine end a request with what its next forward gives."""
        self._letters.put(_Hurry(request_id))

    def give_back(self, request_id: str) -> None:
        """Make the engine give a request back at its next block boundary, for another worker to go on with."""
        self._letters.put(_GiveBack(request_id))

    def flush(self) -> None:
        """Make the engine forget the texts whose pages others could share."""
        self._letters.put(_Flush())

    def wake(self) -> None:
        """Cut a running `collect` short."""
        self._letters.put(None)

    def collect(self, timeout_s: float) -> Inbox:
        """Return what has come, waiting up to `timeout_s` for the first letter; 0 does not wait."""
        inbox = Inbox()
        try:
            letter = self._letters.get(timeout=timeout_s) if timeout_s > 0 else self._letters.get_nowait()
            while True:
                _file(letter, inbox)
                letter = self._letters.get_nowait()
        except queue.Empty:
            return inbox


def _file(letter: _Letter, inbox: Inbox) -> None:
    match letter:
        case Arrival():
            inbox.arrivals.append(letter)
        case _Abort(request_id, reason):
            inbox.aborts.append((request_id, reason))
        case _Drop(request_id):
            # Lost, and claimed again in between: an arrival behind the drop is the request's next life.
            inbox.arrivals = [arrival for arrival in inbox.arrivals if arrival.request.id != request_id]
            inbox.drops.append(request_id)
        case _Flush():
            inbox.flush = True
        case _GiveBack(request_id):
            inbox.returns.append(request_id)
        case _Hurry(request_id):
            inbox.hurries.append(request_id)
        case None:
            pass
