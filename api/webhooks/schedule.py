"""When a message that was not taken is tried again, and when it is given up: pure rules."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

DELAYS_S = (5.0, 300.0, 1800.0, 7200.0, 18_000.0, 36_000.0, 50_400.0, 72_000.0, 86_400.0)
"""As Standard Webhooks recommends: ten tries over three days."""
JITTER = 0.2
"""Each delay is drawn from so much below it to so much above it, or all that failed together come back together."""

Verdict = Literal["told", "again", "gone"]


@dataclass(frozen=True, slots=True)
class Again:
    delay_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    pass


def judge(status: int) -> Verdict:
    """Return what an answer means: 2xx took it, 410 wants nothing any more, all others (redirections too) failed."""
    if 200 <= status < 300:
        return "told"
    return "gone" if status == 410 else "again"


def next_try(
    attempt: int, delays_s: Sequence[float], retry_after_s: float | None = None, draw: float | None = None
) -> Again | GiveUp:
    """Return what follows the failure of try `attempt` (from 1).

    A receiver may ask for more patience, never for less. `draw`: where in the jitter, 0 to 1; unset: anywhere.
    """
    if attempt > len(delays_s):
        return GiveUp()
    where = random.random() if draw is None else draw
    delay_s = delays_s[attempt - 1] * (1 - JITTER + 2 * JITTER * where)
    return Again(max(delay_s, retry_after_s or 0.0))
