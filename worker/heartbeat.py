"""Lease renewal from a thread of its own, for as long as the decode loop advances."""

import logging
import threading
import time
from collections.abc import Callable, Mapping

from shared.connection import FleetUnavailable
from shared.heart import Heart, Held, HeldState
from shared.roster import WorkerInfo
from worker.pulse import Pulse

log = logging.getLogger(__name__)


class Heartbeat:
    """Beat for all held requests; a live heart must not keep a dead brain's leases.

    The loop's rest is counted in beats, not in seconds of the clock: a process that was frozen as a whole finds itself
    fenced when it wakes, but not stuck.
    """

    def __init__(
        self,
        heart: Heart,
        pulse: Pulse,
        beat_s: float,
        held: Callable[[], dict[str, int]],
        judge: Callable[[Mapping[str, int], Mapping[str, Held]], None],
        info: Callable[[], WorkerInfo],
        on_stuck: Callable[[], None],
    ) -> None:
        """`held` gives the epochs to beat for, `judge` gets them back with the answers, `info` is what the worker
        announces of itself, `on_stuck` ends the process."""
        self._heart = heart
        self._pulse = pulse
        self._beat_s = beat_s
        self._held = held
        self._judge = judge
        self._info = info
        self._on_stuck = on_stuck
        self._stop = threading.Event()
        self._answered_at = time.monotonic()
        self._thread = threading.Thread(target=self._main, name="heartbeat", daemon=True)

    @property
    def age_s(self) -> float:
        """Time since the last beat that was answered; before the first, since the beginning."""
        return time.monotonic() - self._answered_at

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        self._stop.set()
        self._thread.join(timeout_s)

    def _main(self) -> None:
        seen, rest_s = self._pulse.count, 0.0
        while True:
            if rest_s < self._pulse.patience_s:
                self._beat()
            else:
                log.error("the decode loop has not advanced for %.0f s", rest_s)
                self._on_stuck()
                return
            if self._stop.wait(self._beat_s):
                return
            rest_s = rest_s + self._beat_s if self._pulse.count == seen else 0.0
            seen = self._pulse.count

    def _beat(self) -> None:
        held = self._held()
        try:
            verdicts = self._heart.beat(held, self._info())
        except FleetUnavailable as error:
            log.warning("beat failed: %s", error)
            return
        self._answered_at = time.monotonic()
        if any(verdict.state is not HeldState.OK for verdict in verdicts.values()):
            self._judge(held, verdicts)
