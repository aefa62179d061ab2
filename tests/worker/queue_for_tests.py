"""A queue in memory with the outcomes of the real one, and faults on demand."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.card import ModelCard
from shared.commands import Generate, encode_command
from shared.connection import FleetUnavailable
from shared.events import Delta, Failed, Finished, Snapshot, Started
from shared.orders import Orders
from shared.queue import Claim, Outcome, Published


@dataclass
class Request:
    epoch: int
    log: list[Delta] = field(default_factory=list[Delta])
    terminal: Finished | Failed | None = None
    handed_back_ms: int | None = None

    @property
    def seq(self) -> int:
        return len(self.log) + 1


class QueueForTests:
    """The face of `WorkerQueue`. The test's thread sets faults and reads results, the bridge's thread does the rest."""

    def __init__(self) -> None:
        self.waiting: list[Claim] = []
        self.requests: dict[str, Request] = {}
        self.abort_reasons: dict[str, str] = {}
        self.previews: list[Started | Snapshot] = []
        self.card: ModelCard | None = None
        self.calls: list[str] = []
        self.limits: list[int] = []
        self.faults: list[bool] = []
        """For each coming write: True if it fails. Then all succeed."""
        self.orders_now = Orders()
        self.unable: dict[str, int] = {}
        self.wants_room = False
        """Suspects wait for this worker, and others for what it runs."""
        self.alone = True
        """No other worker serves the model."""
        self.held_in_wait: set[int] = set()
        """How many requests the worker held when it waited for news."""
        self._held = 0
        self.down = False
        self.closed = False

    def submit(self, request: Generate | tuple[str, bytes], epoch: int = 1, log: Sequence[Delta] = ()) -> None:
        request_id, payload = request if isinstance(request, tuple) else (request.id, encode_command(request))
        self.requests[request_id] = Request(epoch, list(log))
        seq = len(log) + 1
        self.waiting.append(Claim(request_id, epoch, epoch, payload, len(log), seq, 0, list(log)))

    @property
    def dropped(self) -> int:
        return 0

    @property
    def on_probation(self) -> bool:
        return self.wants_room

    async def orders(self) -> Orders:
        self._fail_if_down()
        return self.orders_now

    async def pass_on(self, request_id: str, epoch: int, delay_ms: int, most: int) -> bool:
        self.unable[request_id] = self.unable.get(request_id, 0) + 1
        if self.unable[request_id] >= most:
            return False
        await self.hand_back(request_id, epoch, delay_ms)
        return True

    def pause_s(self, poll_s: float, found: bool) -> float:
        return poll_s

    async def take(self, limit: int, held: int = 0) -> list[Claim]:
        self._fail_if_down()
        self.limits.append(limit)
        self._held = held
        taken, self.waiting = self.waiting[:limit], self.waiting[limit:]
        return taken

    async def wait(self, timeout_ms: int, limit: int = 1) -> list[Claim]:
        held = self._held
        self.held_in_wait.add(held)
        await asyncio.sleep(0.002)
        return await self.take(limit, held)

    async def emit(self, events: Sequence[Delta]) -> list[Outcome]:
        self.calls.append(f"emit {len(events)}")
        self._fail_if_down()
        outcomes = [self._append(event) for event in events]
        self._fail_if_told()
        return outcomes

    async def finish_all(self, ends: Sequence[tuple[Delta | None, Finished | Failed]]) -> list[Outcome]:
        self.calls.append(f"finish {len(ends)}")
        self._fail_if_down()
        return [self._finish(last, terminal) for last, terminal in ends]

    def _finish(self, last: Delta | None, terminal: Finished | Failed) -> Outcome:
        request = self.requests[terminal.id]
        if request.terminal is not None:
            return Outcome.DUPLICATE if request.terminal == terminal else Outcome.FENCED
        if terminal.epoch != request.epoch:
            return Outcome.FENCED
        if last is not None and (outcome := self._append(last)) not in (Outcome.OK, Outcome.DUPLICATE):
            return outcome
        if terminal.seq != request.seq + 1:
            return Outcome.GAP
        request.terminal = terminal
        self._fail_if_told()
        return Outcome.OK

    async def hand_back(self, request_id: str, epoch: int, delay_ms: int = 0) -> Outcome:
        self._fail_if_down()
        request = self.requests[request_id]
        if request.epoch != epoch:
            return Outcome.FENCED
        request.epoch += 1
        request.handed_back_ms = delay_ms
        return Outcome.OK

    async def preview(self, events: Sequence[Started | Snapshot]) -> None:
        if not self.down:
            self.previews.extend(events)

    async def find_aborted(self, request_ids: Sequence[str]) -> dict[str, str]:
        self._fail_if_down()
        return {name: reason for name, reason in self.abort_reasons.items() if name in request_ids}

    async def publish_card(self, card: ModelCard) -> Published:
        self._fail_if_down()
        self.card = card
        return Published()

    async def restore_card(self, card: ModelCard) -> None:
        self._fail_if_down()
        self.card = self.card or card

    async def reclaim_card(self, card: ModelCard) -> Published | None:
        self._fail_if_down()
        return None

    async def close(self) -> None:
        self.closed = True

    def _append(self, event: Delta) -> Outcome:
        request = self.requests[event.id]
        if event.epoch != request.epoch or request.terminal is not None:
            return Outcome.FENCED
        if event.seq <= request.seq:
            return Outcome.DUPLICATE
        if event.seq != request.seq + 1:
            return Outcome.GAP
        request.log.append(event)
        return Outcome.OK

    def _fail_if_down(self) -> None:
        if self.down:
            raise FleetUnavailable("Redis does not answer: told so")

    def _fail_if_told(self) -> None:
        """Lose the reply of a write that has run."""
        if self.faults and self.faults.pop(0):
            raise FleetUnavailable("Redis does not answer: the reply is lost")
