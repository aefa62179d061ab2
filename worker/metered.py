"""How much of a step's time its forward takes: what is left is the host's own work on rows, pages and text."""

import time

from worker.engine.plan import Plan
from worker.engine.ports import Decision, Forward


class Metered:
    """A forward that keeps the time. Where the device leads the host, its call is mostly the waiting for the device."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self.seconds = 0.0
        """Spent in calls so far."""

    def __call__(self, plan: Plan) -> Decision:
        began = time.perf_counter()
        try:
            return self._forward(plan)
        finally:
            self.seconds += time.perf_counter() - began
