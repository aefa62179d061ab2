"""The loop of a fake worker: claim, pretend to denoise, commit, look for aborts, hand back what is left at the end."""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from shared.card import ModelCard
from shared.commands import Generate, InvalidCommand, UnsupportedCommand, decode_command
from shared.connection import FleetUnavailable
from shared.events import Delta, Failed, FinishDetail, Finished, FinishReason, Snapshot, Started, Usage
from shared.fake.answer import Answer, Block, answer, embedding
from shared.heart import Heart, HeldState
from shared.queue import Claim, Outcome, WorkerQueue
from shared.roster import WorkerInfo
from shared.text import TextStream, Tokenizer

log = logging.getLogger(__name__)

_IDLE_WAIT_MS = 500
_POLL_S = 0.02
_ABORT_POLL_S = 0.1
_CARD_CHECK_S = 3.0
_UNSUPPORTED_DELAY_MS = 5000


class _Fenced(Exception):
    """The request is somebody else's now."""


@dataclass(slots=True)
class _Slot:
    claim: Claim
    claimed_at: float = field(default_factory=time.monotonic)
    abort: str | None = None
    lost: bool = False

    @property
    def age_ms(self) -> float:
        return self.claim.queued_ms + 1000 * (time.monotonic() - self.claimed_at)


class FakeWorker:
    """For one event loop. `step_s` is what a denoising step takes."""

    def __init__(
        self, queue: WorkerQueue, heart: Heart, card: ModelCard, worker_id: str, slots: int, step_s: float
    ) -> None:
        self._queue = queue
        self._heart = heart
        self._card = card
        self._tokenizer = Tokenizer.from_files(card.files)
        self._id = worker_id
        self._slots = slots
        self._step_s = step_s
        self._held: dict[str, _Slot] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._steps = self._tokens = 0
        self._leaving = asyncio.Event()
        self._impatient = False

    def leave(self) -> None:
        """Claim nothing more; `run` returns once what is held has ended or was handed back."""
        self._leaving.set()

    async def run(self, drain_s: float, ready: Callable[[], None]) -> None:
        """Serve until told to leave, then finish within `drain_s` or hand back. `ready` is called before the first
        claim."""
        await self._queue.publish_card(self._card)
        helpers = [asyncio.create_task(work) for work in (self._beat(), self._poll_aborts(), self._look_around())]
        ready()
        try:
            await self._claim()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=drain_s)
            self._impatient = True
            if self._tasks:
                await asyncio.wait(self._tasks)
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
            await self._queue.close()

    async def _claim(self) -> None:
        while not self._leaving.is_set():
            room = self._slots - len(self._held)
            try:
                claims = await self._queue.take(room, len(self._held)) if room > 0 else []
                if not claims and not self._held and not self._leaving.is_set():
                    claims = await self._queue.wait(_IDLE_WAIT_MS)
            except FleetUnavailable:
                await _pause(self._leaving, 1.0)
                continue
            for claim in claims:
                slot = self._held[claim.id] = _Slot(claim)
                task = asyncio.create_task(self._serve(slot))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            if self._held:
                await _pause(self._leaving, _POLL_S)

    async def _serve(self, slot: _Slot) -> None:
        """Bring one request to its end; whatever happens, it is not held behind that."""
        try:
            await self._answer(slot, decode_command(slot.claim.payload))
        except UnsupportedCommand:
            await self._queue.hand_back(slot.claim.id, slot.claim.epoch, _UNSUPPORTED_DELAY_MS)
        except InvalidCommand as error:
            claim = slot.claim
            failed = Failed(claim.id, claim.seq + 1, claim.epoch, "invalid_request", str(error))
            await self._queue.finish(None, failed)
        except (_Fenced, FleetUnavailable):
            log.warning("request lost", extra={"request_id": slot.claim.id})
        finally:
            if self._held.get(slot.claim.id) is slot:
                del self._held[slot.claim.id]

    async def _answer(self, slot: _Slot, command: Generate) -> None:
        await self._queue.preview([Started(command.id, slot.claim.epoch, self._id, slot.claim.queued_ms)])
        written = [event for event in slot.claim.log if isinstance(event, Delta)]
        run = _Run(slot, command, TextStream(self._tokenizer, command.limits.stop, sum(len(e.text) for e in written)))
        if command.embed:
            await asyncio.sleep(self._step_s)
            await self._end(run, None, "stop", "embedded", embedding(command))
            return
        whole = answer(command, self._card, self._tokenizer)
        for number, block in enumerate(whole.blocks):
            last = number + 1 == len(whole.blocks)
            if number < slot.claim.blocks:
                # Another worker has committed it.
                run.pass_over(block)
                continue
            if self._impatient:
                await self._queue.hand_back(command.id, slot.claim.epoch)
                return
            if not await self._denoise(run, block):
                return
            self._tokens += len(block.token_ids)
            late = command.limits.deadline_ms is not None and slot.age_ms >= command.limits.deadline_ms
            if last or late:
                await self._finish(run, block, whole if last else Answer((), "length", "deadline"))
                return
            (outcome,) = await self._queue.emit([run.commit(block)])
            if outcome in (Outcome.FENCED, Outcome.GAP):
                raise _Fenced
        await self._finish(run, None, whole)

    async def _denoise(self, run: "_Run", block: Block) -> bool:
        """Pretend to decide a block step by step; False if the request has ended within."""
        command, shown_at = run.command, float("-inf")
        for step in range(1, len(block.steps) + 1):
            await asyncio.sleep(self._step_s)
            self._steps += 1
            run.nfe += 1
            if run.slot.lost:
                raise _Fenced
            total_ms = command.limits.total_ms
            if run.slot.abort == "expired" or (total_ms is not None and run.slot.age_ms > total_ms):
                failed = Failed(command.id, run.seq + 1, run.epoch, "expired", "the request's time is over")
                await self._queue.finish(None, failed)
                return False
            if run.slot.abort is not None:
                await self._end(run, None, "aborted", "aborted")
                return False
            preview, now = command.preview, time.monotonic()
            if preview is not None and step < len(block.steps) and now - shown_at >= preview.interval_ms / 1000:
                shown_at = now
                await self._queue.preview([run.snapshot(block, step)])
        return True

    async def _finish(self, run: "_Run", block: Block | None, whole: Answer) -> None:
        await self._end(run, None if block is None else run.commit(block, last=True), whole.reason, whole.detail)

    async def _end(
        self, run: "_Run", last: Delta | None, reason: FinishReason, detail: FinishDetail, vector: str | None = None
    ) -> None:
        usage = Usage(len(run.command.prompt), run.produced, run.nfe, run.block)
        end = Finished(run.command.id, run.seq + 1, run.epoch, reason, detail, usage, vector)
        await self._queue.finish(last, end)

    async def _beat(self) -> None:
        while True:
            held = {request_id: slot.claim.epoch for request_id, slot in self._held.items()}
            with suppress(FleetUnavailable):
                verdicts = await asyncio.to_thread(self._heart.beat, held, self._info())
                for request_id, verdict in verdicts.items():
                    slot = self._held.get(request_id)
                    if slot is None or slot.claim.epoch != held[request_id]:
                        continue
                    match verdict.state:
                        case HeldState.OK:
                            pass
                        case HeldState.FENCED:
                            slot.lost = True
                        case HeldState.ABORTED:
                            slot.abort = verdict.reason
                        case HeldState.EXPIRED:
                            slot.abort = "expired"
            await asyncio.sleep(self._heart.interval_s)

    async def _poll_aborts(self) -> None:
        while True:
            await asyncio.sleep(_ABORT_POLL_S)
            with suppress(FleetUnavailable):
                for request_id, reason in (await self._queue.find_aborted(list(self._held))).items():
                    if slot := self._held.get(request_id):
                        slot.abort = reason

    async def _look_around(self) -> None:
        while True:
            await asyncio.sleep(_CARD_CHECK_S)
            with suppress(FleetUnavailable):
                await self._queue.restore_card(self._card)
                if not self._leaving.is_set():
                    await self._queue.reclaim_card(self._card)
                if (await self._queue.orders()).drain:
                    self.leave()

    def _info(self) -> WorkerInfo:
        return WorkerInfo(
            self._id,
            self._card.name,
            "draining" if self._leaving.is_set() else "ready",
            slots=self._slots,
            free=max(0, self._slots - len(self._held)),
            steps=self._steps,
            tokens=self._tokens,
            pid=os.getpid(),
            device="fake",
            card=self._card.digest,
        )


class _Run:
    """How far one request has come."""

    def __init__(self, slot: _Slot, command: Generate, text: TextStream) -> None:
        self.slot = slot
        self.command = command
        self.epoch = slot.claim.epoch
        self.seq = slot.claim.seq
        self.block = self.produced = self.nfe = 0
        self._text = text

    def pass_over(self, block: Block) -> None:
        """Count a block that is in the log already."""
        self._text.push(block.token_ids)
        self.block += 1
        self.produced += len(block.token_ids)
        self.nfe += len(block.steps)

    def commit(self, block: Block, *, last: bool = False) -> Delta:
        """Return the event of the next block; with `last`, its text has all that was held back."""
        text = self._text.push(block.token_ids) + (self._text.flush() if last else "")
        self.seq += 1
        asked = self.command.logprobs
        delta = Delta(
            self.command.id,
            self.seq,
            self.epoch,
            self.block,
            self.produced,
            list(block.token_ids),
            text,
            self.nfe,
            None if asked is None else block.logprobs(asked),
        )
        self.block += 1
        self.produced += len(block.token_ids)
        return delta

    def snapshot(self, block: Block, step: int) -> Snapshot:
        tokens, confidence = block.canvas(step)
        where = (self.seq, self.epoch, self.block, self.produced, step, self.nfe)
        return Snapshot(self.command.id, *where, tokens, confidence)


async def _pause(event: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
