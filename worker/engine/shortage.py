"""How much a step may hold after one for which the device had no memory."""

from worker.engine.plan import Plan

_PATIENCE = 32


class Shortage:
    """Halves what steps hold until there is memory for them, and doubles it again once all has gone well for a while.

    Each row comes to its turn before it doubles: one that finds no memory at all is then alone at last, and known.
    """

    def __init__(self, whole: int) -> None:
        self._whole = whole
        self._good = 0
        self.budget: int | None = None
        """Query tokens of a step while memory is short; None while it is not."""

    def halve(self, plan: Plan) -> bool:
        """Let steps hold half of what this one did; False if it was one row that cannot be cut, and is to leave."""
        # What holds more than it may was as small as it gets.
        if len(plan.rows) == 1 and plan.tokens > (self._whole if self.budget is None else self.budget):
            self.budget = None
            return False
        self.budget, self._good = plan.tokens // 2, 0
        return True

    def passed(self, running: int) -> None:
        """A step had memory, while so many requests run."""
        if self.budget is None:
            return
        self._good += 1
        # A step holds one row at least.
        if self._good >= running + _PATIENCE:
            doubled = 2 * max(1, self.budget)
            self.budget, self._good = (doubled if doubled < self._whole else None), 0
