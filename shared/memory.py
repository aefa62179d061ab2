"""How full Redis is, looked up at most once a second: what is dispensable gives way before it refuses everything.

At 80 % no bulk work is taken, at 90 % no work at all, and previews stop. At 100 % Redis itself refuses whatever adds,
except the scripts by which running requests go on and end.
"""

import time

from shared.connection import FleetUnavailable, Link
from shared.keys import Keys
from shared.lua import script

NO_BULK = 0.8
NO_WORK = 0.9
_FRESH_S = 1.0


class MemoryGauge:
    """For one event loop."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._seen: dict[str, tuple[float, float]] = {}

    async def share(self, keys: Keys) -> float:
        """Return the used share (0 to 1) of the memory behind a partition; 0 without a limit or an answer."""
        read_at, share = self._seen.get(keys.part, (float("-inf"), 0.0))
        if time.monotonic() - read_at >= _FRESH_S:
            # One asks; who comes meanwhile takes the last answer.
            self._seen[keys.part] = (time.monotonic(), share)
            try:
                used, allowed = await self._link.run(script("memory"), [keys.lane("std")], [])
            except FleetUnavailable:
                return 0.0
            share = used / allowed if allowed else 0.0
            self._seen[keys.part] = (time.monotonic(), share)
        return share
