"""What an engine did, step by step, and what its worker took and wrote: a line each in a file that others may read.

Times are those of the system's monotonic clock, which all processes of a machine share.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import worker.assembly
from shared.events import Delta, Finished
from shared.queue import Claim, WorkerQueue
from worker.ahead import AheadRunner
from worker.engine.engine import Engine
from worker.engine.plan import Plan
from worker.engine.ports import Decision, Forward, Inbox, Outbox


@dataclass(frozen=True, slots=True)
class Step:
    began: float
    """s"""
    ended: float
    arrived: int
    """Requests that came with it."""
    rows: int
    """With a canvas."""
    postponed: int
    """Of them, those that it did not decide."""
    prompt_tokens: int
    accepted: int
    """Tokens decided."""
    blocks: int
    """Blocks told of."""
    ends: int
    """Requests that ended."""
    kind: str
    """Rows, slots and room of the captured step that was read."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Requests that a worker has taken from the queue at once."""

    asked: float
    """s"""
    told: float
    queued: list[float]
    """When each was queued, to the millisecond."""


@dataclass(frozen=True, slots=True)
class Written:
    """Ends of requests, in one call."""

    asked: float
    """s"""
    told: float


Line = Step | Taken | Written
_KINDS: dict[str, type[Line]] = {kind.__name__: kind for kind in (Step, Taken, Written)}


def record(file: Path) -> None:
    """Let the engine that this process assembles next, and its queue, write what they do to a file."""
    out = file.open("w", buffering=1)

    def write(line: Line) -> None:
        out.write(json.dumps({"line": type(line).__name__, **asdict(line)}) + "\n")

    _record_steps(write)
    _record_queue(write)


def _record_queue(write: Callable[[Line], None]) -> None:
    take, wait, finish = WorkerQueue.take, WorkerQueue.wait, WorkerQueue.finish_all

    def noted(claims: list[Claim], asked: float) -> list[Claim]:
        if claims:
            told = time.monotonic()
            write(Taken(asked, told, [told - claim.queued_ms / 1e3 for claim in claims]))
        return claims

    async def taking(queue: WorkerQueue, *args: Any) -> list[Claim]:
        asked = time.monotonic()
        return noted(await take(queue, *args), asked)

    async def waiting(queue: WorkerQueue, *args: Any) -> list[Claim]:
        asked = time.monotonic()
        return noted(await wait(queue, *args), asked)

    async def finishing(queue: WorkerQueue, *args: Any) -> Any:
        asked = time.monotonic()
        outcomes = await finish(queue, *args)
        write(Written(asked, time.monotonic()))
        return outcomes

    WorkerQueue.take, WorkerQueue.wait, WorkerQueue.finish_all = taking, waiting, finishing  # pyright: ignore


def _record_steps(write: Callable[[Line], None]) -> None:
    make_runner, made = worker.assembly.make_runner, list[Forward]()

    def make(*args: Any, **others: Any) -> Forward:
        made.append(make_runner(*args, **others))
        return made[-1]

    class Recorded(Engine):
        def __init__(self, *args: Any, **others: Any) -> None:
            super().__init__(*args, **others)
            self._inner, self._forward = self._forward, self._watched
            self._seen: list[tuple[Plan, Decision]] = []

        def _watched(self, plan: Plan) -> Decision:
            decision = self._inner(plan)
            self._seen.append((plan, decision))
            return decision

        def step(self, inbox: Inbox) -> Outbox:
            self._seen.clear()
            began = time.monotonic()
            outbox = super().step(inbox)
            ended = time.monotonic()
            for plan, decision in self._seen:
                leads = [len(row.token_ids) for row in plan.rows if row.canvas is None]
                rows, runner = len(plan.rows) - len(leads), made[-1]
                leads += [row.canvas.start - row.start for row in plan.rows if row.canvas is not None]
                step = Step(
                    began,
                    ended,
                    len(inbox.arrivals),
                    rows,
                    len(decision.postponed),
                    sum(lead for lead in leads if lead > self._spec.block_length),
                    sum(map(sum, decision.accepted)),
                    sum(isinstance(event, Delta) for event in outbox.events),
                    sum(isinstance(event, Finished) for event in outbox.events),
                    str(runner.last) if isinstance(runner, AheadRunner) else "",
                )
                write(step)
            return outbox

    worker.assembly.Engine, worker.assembly.make_runner = Recorded, make  # pyright: ignore


def read(file: Path, began: float) -> list[Line]:
    """Return what was recorded of a round, which has begun then."""
    found: list[Line] = []
    for text in file.read_text().splitlines():
        values = json.loads(text)
        line = _KINDS[values.pop("line")](**values)
        if (line.began if isinstance(line, Step) else line.told) >= began:
            found.append(line)
    return found


def tell(lines: Sequence[Line], began: float) -> dict[str, object]:
    """Return where the time of one round went, ms from its beginning."""
    steps = [line for line in lines if isinstance(line, Step)]
    taken = [line for line in lines if isinstance(line, Taken)]
    written = [line for line in lines if isinstance(line, Written)]
    if not steps:
        return {}
    most = max(step.rows for step in steps)
    coming = [step for step in steps if step.arrived]
    prompts = [step for step in steps if step.prompt_tokens]
    full = [i for i, step in enumerate(steps) if step.rows == most and not step.prompt_tokens and not step.arrived]
    between = [b.began - a.ended for a, b in zip(steps, steps[1:], strict=False)]

    def at(moment: float) -> float:
        return round((moment - began) * 1e3, 1)

    kinds: dict[str, list[float]] = {}
    for former, step in zip(steps, steps[1:], strict=False):
        kinds.setdefault(step.kind, []).append((step.ended - former.ended) * 1e3)
    queued = [moment for each in taken for moment in each.queued]
    told: dict[str, object] = {}
    if taken and written:
        told = {
            "first_queued": at(min(queued)),
            "last_queued": at(max(queued)),
            "taken": [(at(each.asked), at(each.told), len(each.queued)) for each in taken],
        }
    return told | {
        "first_came": at(coming[0].began),
        "last_came": at(coming[-1].began),
        "came": [step.arrived for step in coming],
        "last_prompt": at(prompts[-1].ended) if prompts else None,
        "prompt_steps": len(prompts),
        "prompt_tokens": sum(step.prompt_tokens for step in prompts),
        "all_run": at(steps[full[0]].began) if full else None,
        "first_end": at(next(step.ended for step in steps if step.ends)),
        "last_end": at(steps[-1].ended),
        "steps": len(steps),
        "full_steps": len(full),
        "full_step": round(median(steps[i].ended - steps[i - 1].ended for i in full) * 1e3, 2) if full else None,
        "kinds": {kind: (len(times), round(sum(times), 1)) for kind, times in sorted(kinds.items())},
        "postponed": sum(step.postponed for step in steps),
        "between": round(sum(between) * 1e3, 1),
        "longest_between": round(max(between, default=0.0) * 1e3, 1),
        **({"last_end_written": at(max(each.told for each in written))} if written else {}),
    }
