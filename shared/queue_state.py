"""How full a model's lanes are, and how long its oldest request has waited for a worker."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from shared.commands import LANES, Lane
from shared.connection import Failure, Link, classify, translate
from shared.keys import GROUP, Keys


@dataclass(frozen=True, slots=True)
class LaneState:
    lane: Lane
    length: int = 0
    """Requests queued and running: each leaves the stream when it ends."""
    claimed: int = 0
    """Those that a worker has claimed, also if it has been lost since."""
    waiting_s: float = 0.0
    """Age of the oldest one that no worker has ever claimed; 0 if there is none."""


@dataclass(frozen=True, slots=True)
class QueueState:
    lanes: tuple[LaneState, ...]
    dead_letters: int


async def read_queue(link: Link, partitions: Sequence[Keys]) -> QueueState:
    """Return the lanes of a model, its partitions taken together, in two round trips; raises `FleetUnavailable`.

    What is done is deleted, so the first entry behind the last pending one is the first that nobody was given. That
    needs neither the group's lag, which turns NULL, nor the right to XINFO.
    """
    places = [(keys.lane(lane), lane) for keys in partitions for lane in LANES]
    first = [command for stream, _ in places for command in (("XLEN", stream), ("XPENDING", stream, GROUP))]
    first += [("XLEN", keys.dead_letters()) for keys in partitions]
    replies = _checked(await link.pipeline(first))
    lengths, pending, dead = (
        replies[: 2 * len(places) : 2],
        replies[1 : 2 * len(places) : 2],
        replies[2 * len(places) :],
    )
    behind = [
        ("XRANGE", stream, _behind(one), "+", "COUNT", 1) for (stream, _), one in zip(places, pending, strict=True)
    ]
    (seconds, micros), *heads = _checked(await link.pipeline([("TIME",), *behind]))
    now_ms = int(seconds) * 1000 + int(micros) // 1000
    states = {lane: LaneState(lane) for lane in LANES}
    for (_, lane), length, one, head in zip(places, lengths, pending, heads, strict=True):
        so_far = states[lane]
        age_s = max(0, now_ms - int(head[0][0].partition(b"-")[0])) / 1000 if head else 0.0
        states[lane] = replace(
            so_far,
            length=so_far.length + length,
            claimed=so_far.claimed + _count(one),
            waiting_s=max(so_far.waiting_s, age_s),
        )
    return QueueState(tuple(states.values()), sum(dead))


def _checked(replies: Sequence[Any]) -> list[Any]:
    """Take a group that does not exist yet for an empty one."""
    for reply in replies:
        if isinstance(reply, Exception) and classify(reply) is not Failure.NOGROUP:
            raise translate(reply) from reply
    return [None if isinstance(reply, Exception) else reply for reply in replies]


def _behind(pending: Any) -> str:
    """Return where XRANGE begins behind the last entry of an XPENDING summary."""
    last = _last(pending)
    return "-" if last is None else f"({last.decode()}"


def _count(pending: Any) -> int:
    match pending:
        case None:
            return 0
        case {"pending": int(count)}:
            return count
        case _:
            return int(pending[0])


def _last(pending: Any) -> bytes | None:
    match pending:
        case None:
            return None
        case {"max": last}:
            return last
        case _:
            return pending[2]
