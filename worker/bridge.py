"""The queue's side of a worker: claims in, events out, aborts polled; asyncio in a thread of its own, no torch.

The engine's thread meets it at one queue each way: a `Mailbox` for commands, `deliver` for outboxes. Nothing that
happens to Redis blocks the engine: durable events wait here, in order, until they are written or the request is lost
to another worker. What may wait is bounded by the requests held, for an outage also ends the claiming.
"""

import asyncio
import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from shared.card import ModelCard
from shared.commands import Generate, InvalidCommand, LoraUse, UnsupportedCommand, decode_command
from shared.connection import FleetUnavailable
from shared.events import Delta, FailCode, Failed, Finished, Queued, Snapshot, Started
from shared.heart import Held, HeldState
from shared.orders import Orders
from shared.queue import Claim, Outcome, WorkerQueue
from shared.tracing import NO_SPAN, Span, Tracing, Untraced, asked, close_with, span_name
from worker.adapters.ports import AdapterFaulty, Adapters, AdaptersFull, AdapterUnavailable
from worker.card_news import card_news, reclaimed_news
from worker.engine.ports import Arrival, Outbox, Resume
from worker.mailbox import Mailbox
from worker.metrics import Metrics

log = logging.getLogger(__name__)

_IDLE_WAIT_MS = 1000
_BUSY_WAIT_MS = 250
"""Short, for a worker that joins meanwhile is to get its part."""
_PORTIONS = 8
_UNSUPPORTED_DELAY_MS = 5000
_UNABLE_DELAY_MS = 500
_FULL_DELAY_MS = 500
_MOST_UNABLE = 3
"""Workers that try to load what a request needs before it fails."""
_CARD_CHECK_S = 3.0
_MAX_HEALS = 3
_EXPIRED = "expired"
"""The reason that makes the engine end a request as expired, not as aborted."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How much and how often."""

    slots: int
    """Requests held at most: a claim that cannot run at once is left to others."""
    claim_poll_s: float
    abort_poll_s: float
    preview_s: float
    """Least time between previews of one request."""

    def portion(self, held: int, alone: bool) -> int:
        """Return how many requests to take at once, at most.

        One of several workers that has requests takes more in small portions, a poll apart: of a burst, those that run
        nothing get their part. An empty one takes all, for suspects of a crash are tried in groups; so does who is
        alone.
        """
        room = max(0, self.slots - held)
        return room if alone or not held else min(room, max(1, self.slots // _PORTIONS))


@dataclass(frozen=True, slots=True)
class _HandBack:
    delay_ms: int = 0
    instead: Failed | None = None
    """What ends a request that this worker is unable to run, once others have been as unable."""


@dataclass(slots=True)
class _Slot:
    """One claimed request, until its end is written."""

    id: str
    epoch: int
    preview_s: float = 0.0
    pending: deque[Delta | Finished | Failed | _HandBack] = field(
        default_factory=deque[Delta | Finished | Failed | _HandBack]
    )
    written: list[Delta] = field(default_factory=list[Delta])
    """Kept to repair a log that fell back behind us: a server that crashed may lose its last second."""
    heals: int = 0
    previewed_at: float = float("-inf")
    abort_reason: str | None = None
    """Set once its end was asked for."""
    lora: tuple[LoraUse, ...] = ()
    """Adapters that are held for it."""
    span: Span = NO_SPAN

    def deltas_ahead(self) -> list[Delta]:
        """Return the pending deltas that do not belong into the call that ends the request."""
        deltas = [item for item in self.pending if isinstance(item, Delta)]
        ending = self.pending and isinstance(self.pending[-1], Finished | Failed)
        return deltas[:-1] if ending else deltas

    def ends(self) -> bool:
        return bool(self.pending) and not isinstance(self.pending[-1], Delta)

    def leaves(self) -> bool:
        """True if it ends here only: another worker goes on with it."""
        return bool(self.pending) and isinstance(self.pending[-1], _HandBack)


class BridgeError(Exception):
    """The bridge's thread has died; the cause is chained."""


class Bridge:
    def __init__(
        self,
        connect: Callable[[], WorkerQueue],
        card: ModelCard,
        mailbox: Mailbox,
        pace: Pace,
        worker_id: str,
        metrics: Metrics,
        adapters: Adapters | None = None,
        on_drain: Callable[[], None] | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """`adapters` are what requests may run under; `on_drain` is called when an operator wants the worker to end."""
        self._tracing = tracing or Untraced()
        self._connect = connect
        self._card = card
        self._mailbox = mailbox
        self._pace = pace
        self._worker_id = worker_id
        self._metrics = metrics
        self._adapters = adapters
        self._on_drain = on_drain
        self._loads: set[asyncio.Task[None]] = set()
        self._orders: Orders | None = None
        self._held: dict[str, _Slot] = {}
        self._epochs: dict[str, int] = {}
        self._starts: list[Started] = []
        self._snapshots: dict[str, Snapshot] = {}
        self._waiting = self._waiting_told = 0
        self._taking = True
        self._closing = False
        self._started = threading.Event()
        self._ended_claims = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="bridge", daemon=True)

    # --- for other threads

    def start(self, timeout_s: float) -> None:
        """Announce the model and begin to claim; returns once that has happened. Raises `BridgeError`."""
        self._thread.start()
        if not self._started.wait(timeout_s) or self._error is not None:
            raise BridgeError("could not announce the model") from self._error

    def check(self) -> None:
        """Raise `BridgeError` if the thread has died."""
        if not self._thread.is_alive():
            raise BridgeError("the bridge has ended") from self._error

    def deliver(self, outbox: Outbox, waiting: int) -> None:
        """Take what a step produced; `waiting` requests found no room in the engine. Never blocks.

        Raises `BridgeError` if nobody is there to take it.
        """
        self.check()
        # Most steps have nothing to say, and waking the thread would take the interpreter's lock from the next one.
        if not (outbox.events or outbox.handed_back) and waiting == self._waiting_told:
            return
        self._waiting_told = waiting
        self._loop.call_soon_threadsafe(self._take_in, outbox, waiting)

    def held(self) -> dict[str, int]:
        """Return the epoch of each request held."""
        return dict(self._epochs)  # one bytecode under the interpreter's lock: a copy of one moment

    def judge(self, beaten: Mapping[str, int], verdicts: Mapping[str, Held]) -> None:
        """Act on a heartbeat's answer for the epochs that it carried."""
        self._tell(self._judge, beaten, verdicts)

    def stop_taking(self) -> None:
        """Claim nothing more; `claims_ended` tells when the last claim has reached the mailbox."""
        self._tell(self._stop_taking)

    @property
    def claims_ended(self) -> bool:
        return self._ended_claims.is_set()

    def close(self, timeout_s: float) -> bool:
        """Write what is pending and end the thread; False if it took longer (leases then do the rest)."""
        self._tell(self._close)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _tell(self, callback: Callable[..., None], *args: object) -> None:
        with suppress(RuntimeError):  # the loop has ended, and with it what there was to tell
            self._loop.call_soon_threadsafe(callback, *args)

    # --- the thread

    def _main(self) -> None:
        try:
            asyncio.run(self._run())
        except BaseException as error:
            self._error = error
            log.exception("bridge failed")
        finally:
            self._started.set()
            self._ended_claims.set()
            self._mailbox.wake()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._room = asyncio.Event()
        self._news = asyncio.Event()
        self._quit = asyncio.Event()
        self._hurry_claim = asyncio.Event()
        queue = self._connect()
        try:
            news = card_news(self._card.name, await queue.publish_card(self._card))
            if news is not None:
                log.log(*news)
            # Before the first claim: an order that comes later is news, whenever it is looked at.
            self._follow(await queue.orders())
            self._started.set()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._claim(queue))
                tasks.create_task(self._poll_aborts(queue))
                tasks.create_task(self._publish(queue))
                tasks.create_task(self._look_around(queue))
        finally:
            await queue.close()

    def _stop_taking(self) -> None:
        self._taking = False
        self._hurry_claim.set()
        self._room.set()

    def _close(self) -> None:
        self._stop_taking()
        self._closing = True
        self._news.set()
        self._quit.set()

    async def _look_around(self, queue: WorkerQueue) -> None:
        """See that fronts find the model again if Redis comes back without its data, and what operators ask for."""
        while not self._closing:
            await _wait(self._quit, _CARD_CHECK_S)
            try:
                await queue.restore_card(self._card)
                # One that ends soon leaves it to those that stay.
                former = await queue.reclaim_card(self._card) if self._taking else None
                if former is not None:
                    log.log(*reclaimed_news(self._card.name, former))
                self._follow(await queue.orders())
            except FleetUnavailable:
                continue  # the others tell of the outage

    def _follow(self, orders: Orders) -> None:
        former, self._orders = self._orders, orders
        if orders.drain and not (former and former.drain) and self._on_drain is not None:
            log.info("an operator asks this worker to end")
            self._on_drain()
        if orders.flush and former is not None and orders.flush != former.flush:
            self._mailbox.flush()

    # --- claims

    async def _claim(self, queue: WorkerQueue) -> None:
        backoff = Backoff()
        while self._taking:
            self._hurry_claim.clear()
            room = 0 if self._waiting else self._pace.portion(len(self._held), queue.alone)
            if room <= 0:
                self._room.clear()
                await _wait(self._room, 1.0)
                continue
            try:
                claims = await queue.take(room, len(self._held))
                # Nobody else waits where this one is alone, so it may wait for news beside what it runs.
                if not claims and (queue.alone or not self._held) and self._taking and not queue.on_probation:
                    claims = await queue.wait(_BUSY_WAIT_MS if self._held else _IDLE_WAIT_MS)
            except FleetUnavailable as error:
                await self._ride_out("claim", error, backoff)
                continue
            backoff.reset()
            self._metrics.show_malformed(queue.dropped)
            for claim in claims:
                self._admit(claim)
            if queue.wants_room:
                for request_id in self._held:
                    self._mailbox.give_back(request_id)
            if self._held:
                await _wait(self._hurry_claim, queue.pause_s(self._pace.claim_poll_s, bool(claims)))
        if self._loads:
            await asyncio.wait(self._loads)
        self._ended_claims.set()
        self._mailbox.wake()

    def _admit(self, claim: Claim) -> None:
        former = self._held.pop(claim.id, None)
        if former is not None:
            # Our own lease ran out (a frozen process), and we are the ones who claim it again.
            self._mailbox.drop(claim.id)
            self._let_go(former)
        slot = _Slot(claim.id, claim.epoch, written=[event for event in claim.log if isinstance(event, Delta)])
        self._held[claim.id] = slot
        self._epochs[claim.id] = claim.epoch
        self._metrics.count_claim(again=claim.attempt > 1)
        if not self._taking:
            self._append(slot, _HandBack())
            return
        if len(slot.written) != claim.seq - 1:
            self._refuse(slot, claim.seq, "lost", "the beginning of the request's log is gone")
            return
        try:
            request = decode_command(claim.payload)
        except UnsupportedCommand:
            log.warning("request handed back: it needs a newer worker", extra={"request_id": claim.id})
            self._append(slot, _HandBack(_UNSUPPORTED_DELAY_MS))
            return
        except InvalidCommand as error:
            self._refuse(slot, claim.seq, "invalid_request", str(error))
            return
        if request.id != claim.id:
            self._refuse(slot, claim.seq, "invalid_request", "id: the payload belongs to another request")
            return
        if self._tracing.records:
            facts = {"diffleet.queued_ms": claim.queued_ms, "diffleet.attempt": claim.attempt}
            facts |= {"diffleet.epoch": claim.epoch, "diffleet.worker": self._worker_id}
            slot.span = self._tracing.start(span_name(request), "server", request.trace, asked(request) | facts)
        if request.lora:
            load = asyncio.create_task(self._load(slot, claim, request))
            self._loads.add(load)
            load.add_done_callback(self._loads.discard)
        else:
            self._arrive(slot, claim, request)

    async def _load(self, slot: _Slot, claim: Claim, request: Generate) -> None:
        """Let a request arrive once its adapters are there; its lease is renewed meanwhile."""
        try:
            if self._adapters is None:
                raise AdapterUnavailable.of(request.lora[0], "this worker has no model store")
            await asyncio.to_thread(self._adapters.hold, request.lora)
        except Exception as error:
            if not isinstance(error, AdapterUnavailable):
                log.exception("an adapter's loading has failed")
            param = error.param if isinstance(error, AdapterUnavailable) else request.lora[0].param
            failed = Failed(slot.id, claim.seq + 1, slot.epoch, "unsupported", str(error), param)
            if isinstance(error, AdaptersFull):
                # As one that waits for a slot does, however often.
                log.debug("request waits: %s", error, extra={"request_id": slot.id})
                self._append(slot, _HandBack(_FULL_DELAY_MS))
            elif isinstance(error, AdapterFaulty):
                log.warning("request refused: %s", error, extra={"request_id": slot.id})
                self._metrics.count_refused(failed.code)
                self._append(slot, failed)
            else:
                log.warning("request passed on: %s", error, extra={"request_id": slot.id})
                self._append(slot, _HandBack(_UNABLE_DELAY_MS, failed))
            return
        slot.lora = request.lora
        if self._held.get(slot.id) is not slot:
            self._let_go(slot)  # lost meanwhile
        elif not self._taking:
            self._append(slot, _HandBack())
        else:
            self._arrive(slot, claim, request)
            if slot.abort_reason is not None:
                self._mailbox.abort(slot.id, slot.abort_reason)

    def _let_go(self, slot: _Slot) -> None:
        slot.span.end()
        slot.span = NO_SPAN
        if slot.lora and self._adapters is not None:
            self._adapters.release(slot.lora)
            slot.lora = ()

    def _arrive(self, slot: _Slot, claim: Claim, request: Generate) -> None:
        if request.preview is not None:
            slot.preview_s = max(self._pace.preview_s, request.preview.interval_ms / 1000)
        self._starts.append(Started(slot.id, slot.epoch, self._worker_id, claim.queued_ms))
        self._news.set()
        self._mailbox.arrive(Arrival(request, claim.epoch, resume_of(slot.written)))
        if request.limits.deadline_ms is not None:
            left_s = max(0.0, (request.limits.deadline_ms - claim.queued_ms) / 1000)
            asyncio.get_running_loop().call_later(left_s, self._hurry, slot)

    def _hurry(self, slot: _Slot) -> None:
        """Its deadline is here, if it is still this life of the request that is held."""
        if self._held.get(slot.id) is slot:
            self._mailbox.hurry(slot.id)

    def _refuse(self, slot: _Slot, seq: int, code: FailCode, message: str) -> None:
        field, colon, _ = message.partition(": ")
        self._metrics.count_refused(code)
        self._append(slot, Failed(slot.id, seq + 1, slot.epoch, code, message, field if colon else None))

    def _append(self, slot: _Slot, item: Failed | _HandBack) -> None:
        slot.pending.append(item)
        self._news.set()

    def _forget(self, slot: _Slot) -> None:
        """Let go of a request: it has ended, or another worker owns it."""
        if self._held.get(slot.id) is slot:
            del self._held[slot.id], self._epochs[slot.id]
            self._snapshots.pop(slot.id, None)
            self._let_go(slot)
            self._room.set()
            if not self._held:
                self._hurry_claim.set()  # nothing is left to run while it pauses

    def _lose(self, slot: _Slot) -> None:
        if self._held.get(slot.id) is not slot:
            return  # a late answer: it has left already, and may be here again under a new epoch
        log.warning("request lost to another worker", extra={"request_id": slot.id})
        self._metrics.count_fenced()
        slot.span.fail("fenced")
        self._mailbox.drop(slot.id)
        self._forget(slot)

    # --- aborts

    async def _poll_aborts(self, queue: WorkerQueue) -> None:
        backoff = Backoff()
        while not self._closing:
            await _wait(self._quit, self._pace.abort_poll_s)
            running = [slot.id for slot in self._held.values() if slot.abort_reason is None and not slot.ends()]
            if not running:
                continue
            try:
                found = await queue.find_aborted(running)
            except FleetUnavailable as error:
                await self._ride_out("abort poll", error, backoff)
                continue
            backoff.reset()
            for request_id, reason in found.items():
                self._abort(request_id, reason)

    def _abort(self, request_id: str, reason: str) -> None:
        slot = self._held.get(request_id)
        if slot is not None and slot.abort_reason is None:
            slot.abort_reason = reason
            self._mailbox.abort(request_id, reason)

    def _judge(self, beaten: Mapping[str, int], verdicts: Mapping[str, Held]) -> None:
        for request_id, verdict in verdicts.items():
            slot = self._held.get(request_id)
            if slot is None or slot.epoch != beaten[request_id]:
                continue
            match verdict.state:
                case HeldState.OK:
                    pass
                case HeldState.FENCED:
                    self._lose(slot)
                case HeldState.ABORTED:
                    self._abort(request_id, verdict.reason)
                case HeldState.EXPIRED:
                    self._abort(request_id, _EXPIRED)

    # --- events

    def _take_in(self, outbox: Outbox, waiting: int) -> None:
        if self._waiting and not waiting:
            self._room.set()
        self._waiting = waiting
        for event in outbox.events:
            slot = self._held.get(event.id)
            if slot is None or slot.epoch != event.epoch:
                continue  # its last words came after it was lost
            match event:
                case Snapshot():
                    self._keep_preview(slot, event)
                case Delta() | Finished() | Failed():
                    self._snapshots.pop(slot.id, None)  # what it shows is decided
                    if self._tracing.records:
                        _tell(slot.span, event)
                    slot.pending.append(event)
                case Queued() | Started():
                    raise AssertionError(f"the engine does not make {event.t} events")
        for request_id in outbox.handed_back:
            slot = self._held.get(request_id)
            if slot is not None:
                slot.pending.append(_HandBack())
        if outbox.events or outbox.handed_back:
            self._news.set()

    def _keep_preview(self, slot: _Slot, snapshot: Snapshot) -> None:
        now = self._loop.time()
        if now - slot.previewed_at < slot.preview_s:
            self._metrics.count_dropped_preview()
            return
        slot.previewed_at = now
        self._snapshots[slot.id] = snapshot

    async def _publish(self, queue: WorkerQueue) -> None:
        backoff = Backoff()
        while not (self._closing and not self._pending()):
            self._news.clear()
            try:
                await self._write_deltas(queue)
                await self._write_ends(queue)
                await self._write_previews(queue)
            except FleetUnavailable as error:
                await self._ride_out("publish", error, backoff)
                continue
            backoff.reset()
            if not self._pending():
                await _wait(self._news, 1.0)

    def _pending(self) -> list[_Slot]:
        return [slot for slot in self._held.values() if slot.pending]

    async def _write_deltas(self, queue: WorkerQueue) -> None:
        batch = [(slot, delta) for slot in self._pending() for delta in slot.deltas_ahead()]
        if not batch:
            return
        outcomes = await queue.emit([delta for _, delta in batch])
        for (slot, delta), outcome in zip(batch, outcomes, strict=True):
            if slot.pending and slot.pending[0] is delta and self._settled(slot, outcome):
                slot.pending.popleft()
                slot.written.append(delta)

    async def _write_ends(self, queue: WorkerQueue) -> None:
        ending = [slot for slot in self._pending() if slot.ends() and not slot.deltas_ahead()]
        calls = [self._give_back(queue, slot) for slot in ending if slot.leaves()]
        if finished := [slot for slot in ending if not slot.leaves()]:
            calls.append(self._finish(queue, finished))
        # Let every call come to its end: a cancelled one would leave its reply on the connection.
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    async def _finish(self, queue: WorkerQueue, slots: Sequence[_Slot]) -> None:
        outcomes = await queue.finish_all([_end_of(slot) for slot in slots])
        for slot, outcome in zip(slots, outcomes, strict=True):
            if self._settled(slot, outcome):
                self._forget(slot)

    async def _give_back(self, queue: WorkerQueue, slot: _Slot) -> None:
        match list(slot.pending):
            case [_HandBack(delay_ms, Failed() as instead)]:
                if await queue.pass_on(slot.id, slot.epoch, delay_ms, _MOST_UNABLE):
                    self._metrics.count_hand_back()
                    self._forget(slot)
                else:
                    self._metrics.count_refused(instead.code)
                    slot.pending[0] = instead
            case [_HandBack(delay_ms)]:
                await queue.hand_back(slot.id, slot.epoch, delay_ms)
                slot.span.event("handed_back", {})
                self._metrics.count_hand_back()
                self._forget(slot)
            case _:
                raise AssertionError("events beside a request's hand-back")

    def _settled(self, slot: _Slot, outcome: Outcome) -> bool:
        """Return True if the event is in the log; else the request is lost or its log is being repaired."""
        match outcome:
            case Outcome.OK:
                return True
            case Outcome.DUPLICATE:
                self._metrics.count_duplicate()
                return True
            case Outcome.FENCED:
                self._metrics.count_fenced_write()
                self._lose(slot)
                return False
            case Outcome.GAP:
                self._heal(slot)
                return False

    def _heal(self, slot: _Slot) -> None:
        """Write the request's log again from its first delta: the server has lost the end of it."""
        slot.heals += 1
        if slot.heals > _MAX_HEALS:
            self._lose(slot)
            return
        log.warning("the event log fell back; writing it again", extra={"request_id": slot.id})
        self._metrics.count_rewritten()
        slot.pending.extendleft(replace(delta, epoch=slot.epoch) for delta in reversed(slot.written))
        slot.written.clear()

    async def _write_previews(self, queue: WorkerQueue) -> None:
        previews: list[Started | Snapshot] = [*self._starts, *self._snapshots.values()]
        self._starts.clear()
        self._snapshots.clear()
        if previews:
            await queue.preview(previews)

    async def _ride_out(self, what: str, error: BaseException, backoff: "Backoff") -> None:
        self._metrics.count_outage()
        pause_s = backoff.next_s()
        log.warning("%s failed, again in %.1f s: %s", what, pause_s, error)
        if self._closing:
            await asyncio.sleep(min(pause_s, 0.5))
        else:
            await _wait(self._quit, pause_s)


def _end_of(slot: _Slot) -> tuple[Delta | None, Finished | Failed]:
    match list(slot.pending):
        case [Finished() | Failed() as terminal]:
            return None, terminal
        case [Delta() as last, Finished() | Failed() as terminal]:
            return last, terminal
        case _:
            raise AssertionError("events after the end of a request")


def _tell(span: Span, event: Delta | Finished | Failed) -> None:
    if isinstance(event, Delta):
        span.event("block", {"diffleet.block": event.block, "diffleet.forwards": event.nfe})
    else:
        close_with(span, event)


def resume_of(log: Sequence[Delta]) -> Resume:
    """Return what the committed blocks of a request, all of them and in order, say of it."""
    if not log:
        return Resume()
    return Resume(
        token_ids=tuple(token for delta in log for token in delta.token_ids),
        text_length=sum(len(delta.text) for delta in log),
        seq=log[-1].seq,
        block=log[-1].block + 1,
        nfe=log[-1].nfe,
        block_length=log[-1].block_length,
    )


class Backoff:
    """Full jitter, 0.05 s to 5 s: a fleet does not come back to a restarted server all at once."""

    def __init__(self) -> None:
        self.ceiling_s = 0.1

    def next_s(self) -> float:
        pause_s = random.uniform(0.05, self.ceiling_s)
        self.ceiling_s = min(5.0, self.ceiling_s * 2)
        return pause_s

    def reset(self) -> None:
        self.ceiling_s = 0.1


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        pass
