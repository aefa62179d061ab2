"""Text that follows a grammar, decoded in any order.

llguidance tells which tokens may come next behind a prefix; `guard` makes of it a rule for a canvas, and `closing`
keeps every text closable within its length. The engine knows only `worker.engine.plan.Guard`.
"""

from worker.constraints.guards import Guards

__all__ = ["Guards"]
