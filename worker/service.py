"""The decode loop of a worker process, from the first claim to the end of its drain."""

import logging
import os
import signal
import time
from types import FrameType
from typing import Protocol

from shared.roster import WorkerState
from worker.bridge import BridgeError
from worker.engine.ports import Inbox, Load, Outbox
from worker.exits import ExitCode
from worker.mailbox import Mailbox
from worker.metrics import Metrics
from worker.pulse import Pulse
from worker.readiness import Readiness

log = logging.getLogger(__name__)

_REST_S = 0.25
_FLUSH_S = 10.0


class PageLeak(Exception):
    """The engine is idle, and some of its pages are not free: a fault of the program, which would grow."""


class Stepper(Protocol):
    """What the loop needs of `Engine`."""

    @property
    def idle(self) -> bool: ...

    def step(self, inbox: Inbox) -> Outbox: ...

    def load(self) -> Load: ...


class Desk(Protocol):
    """What the loop needs of `Bridge`."""

    @property
    def claims_ended(self) -> bool: ...

    def check(self) -> None: ...

    def deliver(self, outbox: Outbox, waiting: int) -> None: ...

    def held(self) -> dict[str, int]: ...

    def stop_taking(self) -> None: ...

    def close(self, timeout_s: float) -> bool: ...


class Service:
    """Collect the inbox, step, hand the outbox over; on a signal drain.

    The drain: claim nothing more, finish what ends within `drain_s`, hand the rest back at its next block boundary.
    Heartbeats go on until the last request has left. A second signal ends the process at once: leases do the rest.
    """

    def __init__(
        self,
        engine: Stepper,
        bridge: Desk,
        mailbox: Mailbox,
        pulse: Pulse,
        readiness: Readiness,
        metrics: Metrics,
        drain_s: float,
    ) -> None:
        self._engine = engine
        self._bridge = bridge
        self._mailbox = mailbox
        self._pulse = pulse
        self._readiness = readiness
        self._metrics = metrics
        self._drain_s = drain_s
        self._asked_to_stop = False
        self._draining = False
        self._give_back_at = float("inf")

    def listen_to_signals(self) -> None:
        """Drain on SIGTERM and SIGINT; to be called from the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def stop(self) -> None:
        """Ask for a drain; safe from signal handlers and other threads."""
        self._asked_to_stop = True
        self._mailbox.wake()

    @property
    def state(self) -> WorkerState:
        return "draining" if self._draining else "ready"

    def run(self) -> ExitCode:
        """Serve until a drain ends."""
        try:
            self._readiness.announce()
            self._loop()
        except BridgeError:
            log.exception("the queue's side has failed")
            return ExitCode.INTERNAL
        except Exception:
            # Whatever a half-done step left behind is worth nothing: end, and let the leases move the requests.
            log.exception("a step has failed")
            return ExitCode.INTERNAL
        finally:
            self._readiness.withdraw()
        if not self._bridge.close(_FLUSH_S):
            log.warning("events were left unwritten; their requests move on with their leases")
        return ExitCode.CLEAN

    def _loop(self) -> None:
        while True:
            self._pulse.advance()
            self._bridge.check()
            # Set after the last arrival was posted: what is collected behind it is all there is.
            claims_ended = self._bridge.claims_ended
            inbox = self._mailbox.collect(_REST_S if self._engine.idle else 0.0)
            if self._asked_to_stop:
                self._begin_drain()
            if self._draining and claims_ended and self._engine.idle and not inbox.arrivals:
                return
            inbox.hand_back = time.monotonic() >= self._give_back_at
            self._step(inbox)

    def _step(self, inbox: Inbox) -> None:
        if self._engine.idle and not (inbox.arrivals or inbox.aborts or inbox.drops or inbox.flush):
            return
        began = time.perf_counter()
        outbox = self._engine.step(inbox)
        load = self._engine.load()
        self._bridge.deliver(outbox, load.waiting)
        self._metrics.count_step(outbox, load, time.perf_counter() - began)
        if self._engine.idle and load.free_pages != load.total_pages:
            raise PageLeak(f"{load.total_pages - load.free_pages} KV pages belong to nobody")

    def _begin_drain(self) -> None:
        if self._draining:
            return
        log.info("draining: %d requests held", len(self._bridge.held()))
        self._draining = True
        self._readiness.withdraw()
        self._bridge.stop_taking()
        self._give_back_at = time.monotonic() + self._drain_s

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._asked_to_stop:
            self._readiness.withdraw()
            os._exit(ExitCode.INTERRUPTED)
        self.stop()
