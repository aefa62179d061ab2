"""What workers under faults write down of their work, and what it says of each interruption.

One line for each claim, each block that is begun and each that is committed, in one file for all workers, with times of
the clock that the processes of one machine share. What happens to the workers comes from the monkey that does it.
"""

import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from shared.events import Delta, Failed, Finished
from shared.queue import Claim, Outcome, WorkerQueue

What = Literal["claims", "begins", "commits"]


@dataclass(frozen=True, slots=True)
class Line:
    at: float
    """Seconds of `time.monotonic`."""
    pid: int
    what: What
    request_id: str
    number: int
    """Of a claim its attempt, of a beginning the block's first position, of a commit its seq."""


class Pen:
    """One worker's hand in the diary. A line is written at once, for it must outlive a process that is killed now."""

    def __init__(self, file: int) -> None:
        self._file = file

    def note(self, what: What, entries: Iterable[tuple[str, int]]) -> None:
        at, pid = time.monotonic(), os.getpid()
        text = "".join(f"{at:.4f} {pid} {what} {request_id} {number}\n" for request_id, number in entries)
        if text:
            os.write(self._file, text.encode())


def queue_with(pen: Pen) -> type[WorkerQueue]:
    """Return the class of queues that note what they claim and commit."""
    written = (Outcome.OK, Outcome.DUPLICATE)

    class NotingQueue(WorkerQueue):
        async def take(self, limit: int, held: int = 0) -> list[Claim]:
            return self._note(await super().take(limit, held))

        async def wait(self, timeout_ms: int, limit: int = 1) -> list[Claim]:
            return self._note(await super().wait(timeout_ms, limit))

        def _note(self, claims: list[Claim]) -> list[Claim]:
            pen.note("claims", [(claim.id, claim.attempt) for claim in claims])
            return claims

        async def emit(self, events: Sequence[Delta]) -> list[Outcome]:
            outcomes = await super().emit(events)
            pairs = zip(events, outcomes, strict=True)
            pen.note("commits", [(event.id, event.seq) for event, outcome in pairs if outcome in written])
            return outcomes

        async def finish_all(self, ends: Sequence[tuple[Delta | None, Finished | Failed]]) -> list[Outcome]:
            outcomes = await super().finish_all(ends)
            pairs = zip(ends, outcomes, strict=True)
            pen.note("commits", [(end.id, end.seq) for (_, end), outcome in pairs if outcome in written])
            return outcomes

    return NotingQueue


def read_diary(path: Path) -> list[Line]:
    """Return the lines in the order of their times."""
    lines: list[Line] = []
    for text in path.read_text().splitlines():
        at, pid, what, request_id, number = text.split()
        lines.append(Line(float(at), int(pid), cast(What, what), request_id, int(number)))
    return sorted(lines, key=lambda line: line.at)


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time; `end` may be infinite."""

    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Fault:
    """Something done to workers."""

    kind: str
    span: Span
    pids: frozenset[int]
    """Of those that it hit."""


@dataclass(frozen=True, slots=True)
class Interruption:
    """A request whose worker was hit, until its next block was committed by another."""

    request_id: str
    kind: str
    """The fault that it met first; "none" if its worker lost it without one."""
    began: float
    claimed: float
    """The last claim before the block was committed."""
    committed: float
    claims: int
    """How many workers tried, until one committed."""
    attempt: int
    """Of the last claim."""
    dark_s: float
    """How much of the time no worker was there to go on."""

    @property
    def total_s(self) -> float:
        return self.committed - self.began

    @property
    def fleet_s(self) -> float:
        """The time that the fleet has to answer for."""
        return self.total_s - self.dark_s


def interruptions(lines: Iterable[Line], faults: Sequence[Fault], dark: Sequence[Span]) -> list[Interruption]:
    """Return the interruptions of each request, from the first fault to the next committed block.

    `lines` and `faults` in the order of their times; `dark`: when no worker was there.
    """
    stories: dict[str, list[Line]] = {}
    for line in lines:
        stories.setdefault(line.request_id, []).append(line)
    found: list[Interruption] = []
    for request_id, story in stories.items():
        owner: int | None = None
        last_sign = 0.0
        hit: Fault | None = None
        since = 0.0
        claims: list[Line] = []
        for line in story:
            match line.what:
                case "claims":
                    if owner is not None and not claims:
                        hit = _fault_of(owner, last_sign, line.at, faults)
                        since = last_sign if hit is None else min(line.at, max(hit.span.start, last_sign))
                    if owner is not None:
                        claims.append(line)
                    owner, last_sign = line.pid, line.at
                case "commits":
                    if claims and line.pid == claims[-1].pid:
                        kind = "none" if hit is None else hit.kind
                        claim = claims[-1]
                        in_dark = overlap_s(Span(since, line.at), dark)
                        found.append(
                            Interruption(request_id, kind, since, claim.at, line.at, len(claims), claim.number, in_dark)
                        )
                        claims = []
                    if line.pid == owner:
                        last_sign = line.at
                case "begins":
                    pass
    return found


def _fault_of(pid: int, last_sign: float, until: float, faults: Sequence[Fault]) -> Fault | None:
    """Return the first fault that a worker met, or was in, between its last sign of life and the next claim."""
    for fault in faults:
        if pid in fault.pids and fault.span.start < until and fault.span.end > last_sign:
            return fault
    return None


def blocks_begun_again(lines: Iterable[Line], faults: Sequence[Fault]) -> Counter[str]:
    """Count the blocks that a worker began although another had, by the fault of either; "none" if neither had one."""
    begun: dict[tuple[str, int], Line] = {}
    again: Counter[str] = Counter()
    for line in lines:
        if line.what != "begins":
            continue
        former = begun.get((line.request_id, line.number))
        if former is not None:
            fault = _fault_of(former.pid, former.at, line.at, faults) or _fault_of(line.pid, former.at, line.at, faults)
            again["none" if fault is None else fault.kind] += 1
        begun[line.request_id, line.number] = line
    return again


def overlap_s(span: Span, others: Iterable[Span]) -> float:
    """Return how much of `span` lies in `others`, which do not overlap each other."""
    return sum(max(0.0, min(span.end, other.end) - max(span.start, other.start)) for other in others)


def uncovered(whole: Span, spans: Iterable[Span]) -> list[Span]:
    """Return the parts of `whole` that none of `spans` covers, in order."""
    gaps: list[Span] = []
    at = whole.start
    for span in sorted(spans, key=lambda span: span.start):
        if span.start > at:
            gaps.append(Span(at, min(span.start, whole.end)))
        at = max(at, span.end)
        if at >= whole.end:
            return gaps
    return [*gaps, Span(at, whole.end)]


def without(span: Span, holes: Iterable[Span]) -> list[Span]:
    """Return what is left of `span` between `holes`."""
    return uncovered(span, holes) if span.end > span.start else []


def at_work(lives: Mapping[int, Span], faults: Sequence[Fault]) -> list[Span]:
    """Return when each worker could work: ready, and under no fault; the spans of different workers overlap."""
    return [
        part
        for pid, life in lives.items()
        for part in without(life, [fault.span for fault in faults if pid in fault.pids])
    ]
