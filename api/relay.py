"""Follow a request from submit to its terminal event, and abort it when its caller leaves or its time is up."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, assert_never

from starlette.types import Receive

from api.errors import ApiError, ClientGone, of_exception, of_failure, shutting_down
from api.metrics import Metrics
from api.ports import Fleet
from api.settings import ApiSettings
from api.spans import spanned
from shared.client import RETENTION_MS, FleetUnavailable, IdempotencyConflict, QueueFull
from shared.commands import Generate
from shared.events import Delta, Event, Failed, Finished, Queued, Snapshot, Started
from shared.holes import HOLE
from shared.keys import model_of
from shared.telemetry import note
from shared.tracing import Tracing, Untraced, asked, span_name

logger = logging.getLogger("diffleet.api")

_MOST_WAITING = 16
"""Events taken ahead of a slow caller; behind it the subscription drops previews and keeps to the log."""

Progress = Queued | Started | Delta | Snapshot | Finished
"""Every event but `Failed`, which is raised."""


class Reservation(Protocol):
    """Tokens that were set aside for a request before it was submitted."""

    async def settle(self, spent: int | None) -> None:
        """Give back what was not spent; None: the request was refused, everything goes back."""
        ...


@dataclass(frozen=True, slots=True)
class Terms:
    """How a request is submitted and followed, beyond what its command says."""

    tenant: str = ""
    idempotency_key: str | None = None
    keep: bool = False
    """The request goes on when its caller leaves."""
    retention_ms: int | None = None
    queue_limit: int | None = None
    """Unset: that of the settings."""
    reservation: Reservation | None = None
    block_length: int = 0
    """Positions of one block of the canvas; 0: not known."""
    counted: bool = True
    """False where somebody else follows, or has followed, the same request."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The request that is followed."""

    id: str
    model: str
    prompt_tokens: int
    block_length: int = 0
    """0: not known."""


class Relay:
    """The open requests of this process."""

    def __init__(self, fleet: Fleet, settings: ApiSettings, metrics: Metrics, tracing: Tracing | None = None) -> None:
        self._tracing = tracing or Untraced()
        self.metrics = metrics
        self.settings = settings
        self._fleet = fleet
        self._open: set[Follow] = set()
        self._last_words: set[asyncio.Task[None]] = set()

    @property
    def open_count(self) -> int:
        return len(self._open)

    def submit(self, command: Generate, receive: Receive | None, terms: Terms = Terms()) -> "Follow":
        """Submit, and follow; nothing has been waited for yet. The caller closes what it gets.

        `receive` is that of the HTTP request, whose body must have been read; None if nobody can leave.
        """
        note(id=command.id, model=command.model, prompt_tokens=len(command.prompt))
        span = None
        if self._tracing.records:
            span = self._tracing.start(span_name(command), "client", command.trace, asked(command))
            command = command.model_copy(update={"trace": span.context})
        events = self._fleet.run(
            command,
            queue_limit=self._queue_limit(command) if terms.queue_limit is None else terms.queue_limit,
            idempotency_key=terms.idempotency_key,
            tenant=terms.tenant,
            retention_ms=RETENTION_MS if terms.retention_ms is None else terms.retention_ms,
        )
        if span is not None:
            events = spanned(events, span)
        given = sum(token != HOLE for token in command.template or ())
        subject = Subject(command.id, command.model, len(command.prompt) + given, terms.block_length)
        return self._follow(subject, events, receive, terms)

    def _queue_limit(self, command: Generate) -> int:
        bulk = self.settings.bulk_queue_limit if command.lane == "bulk" else None
        return self.settings.queue_limit if bulk is None else bulk

    def resume(self, subject: Subject, receive: Receive | None) -> "Follow":
        """Follow a request that runs, or has ended, from its first event; it goes on if its caller leaves."""
        note(id=subject.id, model=subject.model)
        return self._follow(subject, self._fleet.stream(subject.id), receive, Terms(keep=True, counted=False))

    async def open(self, command: Generate, receive: Receive | None, terms: Terms = Terms()) -> "Follow":
        """Submit, and wait for news, so that an early failure still gets its own status.

        News is a block, a snapshot or the end; after `keepalive_s` without any the caller should get its status line.

        Raises `ApiError`, `QueueFull`, `UnknownModel`, `FleetUnavailable`, `ClientGone`.
        """
        follow = self.submit(command, receive, terms)
        try:
            await follow.wait_for_news()
        except BaseException:
            await follow.aclose()
            raise
        return follow

    def _follow(
        self, subject: Subject, events: AsyncGenerator[Event], receive: Receive | None, terms: Terms
    ) -> "Follow":
        follow = Follow(self, subject, events, receive, terms)
        self._open.add(follow)
        return follow

    def interrupt(self) -> None:
        """End every open request with an error: the process shuts down."""
        for follow in self._open:
            follow.cut(shutting_down())

    async def forget(self, follow: "Follow", abort: str | None) -> None:
        """Drop a request; `abort` is the reason to end it in the fleet, None if it ended by itself."""
        self._open.discard(follow)
        if abort is None:
            return
        # In its own task: this one may be on its way out by cancellation, and the abort must reach Redis all the same.
        await self._finish(self._abort(follow.subject.id, abort))

    async def settle(self, reservation: Reservation, spent: int | None) -> None:
        await self._finish(self._settle(reservation, spent))

    async def _finish(self, last_word: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(last_word)
        self._last_words.add(task)
        task.add_done_callback(self._last_words.discard)
        await asyncio.wait({task})

    async def aclose(self) -> None:
        """Wait for the last aborts and settlements."""
        if self._last_words:
            await asyncio.wait(self._last_words, timeout=self.settings.abort_wait_s)

    async def _abort(self, request_id: str, reason: str) -> None:
        try:
            async with asyncio.timeout(self.settings.abort_wait_s):
                state = await self._fleet.abort(request_id, reason)
            if state == "aborted":  # at once: nobody had claimed it
                self.metrics.queued_aborts.labels(model_of(request_id)).inc()
        except (FleetUnavailable, TimeoutError):
            logger.warning("a request could not be aborted", extra={"id": request_id, "reason": reason})

    async def _settle(self, reservation: Reservation, spent: int | None) -> None:
        try:
            async with asyncio.timeout(self.settings.abort_wait_s):
                await reservation.settle(spent)
        except (FleetUnavailable, TimeoutError):
            logger.warning("reserved tokens could not be given back")


class Follow:
    """The events of one request; None where nothing came for `keepalive_s`. Ends after `Finished`.

    Iteration raises `ApiError` for a request that failed or ran out of time, `FleetUnavailable` if Redis is lost, and
    `ClientGone` once the caller has left. `aclose` aborts what has not ended.
    """

    def __init__(
        self, relay: Relay, subject: Subject, events: AsyncGenerator[Event], receive: Receive | None, terms: Terms
    ) -> None:
        self.subject = subject
        self.request_id = subject.id
        """Id of the request that is followed: an older one's, once its events tell, where a key names that."""
        self.clock = asyncio.get_running_loop().time
        self.began = self.clock()
        self.came = self.began
        """Reading of the clock when the event came that iteration gave last; it may have been taken ahead."""
        self._relay = relay
        self._events = events
        self._keepalive_s = relay.settings.keepalive_s
        self._deadline = self.began + relay.settings.request_timeout_s + relay.settings.timeout_grace_s
        self._early: deque[tuple[float, Progress]] = deque()
        self._inbox: deque[Event | Exception] = deque()
        self._room = asyncio.Event()
        self._waiter: asyncio.Future[None] | None = None
        self._cut: Exception | None = None
        self._pump = asyncio.create_task(self._pump_events())
        self._watch = None if receive is None else asyncio.create_task(self._watch_caller(receive))
        self._terms = terms
        self.failure: Failed | None = None
        """The event behind the `ApiError` that iteration has raised."""
        self._ended = False
        self._refused = False
        self._spent = 0
        self._abort_reason = "disconnected"
        self._closed = False
        self._saw_delta = False
        self._begun = False
        relay.metrics.count_open(subject.model, 1)
        relay.metrics.count_waiting(subject.model, 1)

    def __aiter__(self) -> "Follow":
        return self

    async def __anext__(self) -> Progress | None:
        if self._early:
            self.came, event = self._early.popleft()
            return event
        if self._ended:
            raise StopAsyncIteration
        awaited = await self._wait(self._keepalive_s)
        self.came = self.clock()
        return awaited

    async def raw(self) -> AsyncGenerator[Progress | Failed | None]:
        """Iterate with a failure as an event, not as an exception."""
        try:
            async for event in self:
                yield event
        except ApiError:
            if self.failure is None:
                raise
            yield self.failure

    async def wait_for_admission(self) -> None:
        """Return once the request is in its queue, or after `keepalive_s`; raises as iteration."""
        event = await self._wait(self._keepalive_s)
        if event is not None:
            self._early.append((self.clock(), event))

    async def wait_for_news(self) -> None:
        if any(not isinstance(event, Queued | Started) for _, event in self._early):
            return
        limit = self.clock() + self._keepalive_s
        while (left := limit - self.clock()) > 0:
            event = await self._wait(left)
            if event is None:
                return
            self._early.append((self.clock(), event))
            if not isinstance(event, Queued | Started):
                return

    def cut(self, error: Exception) -> None:
        """Make the iteration raise `error` as soon as it has nothing else to give."""
        self._cut = self._cut or error
        self._wake()

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._watch is not None:
            self._watch.cancel()
        metrics, model = self._relay.metrics, self.subject.model
        metrics.count_open(model, -1)
        (metrics.count_running if self._begun else metrics.count_waiting)(model, -1)
        await self._relay.forget(self, None if self._ended or self._terms.keep else self._abort_reason)
        if self._terms.reservation is not None and (self._ended or not self._terms.keep):
            await self._relay.settle(self._terms.reservation, None if self._refused else self._spent)
        self._pump.cancel()
        await asyncio.wait({self._pump})
        await self._events.aclose()

    async def _wait(self, timeout_s: float) -> Progress | None:
        if not self._inbox and self._cut is None:
            await self._sleep(max(0.0, min(timeout_s, self._deadline - self.clock())))
        if self._inbox:
            item = self._inbox.popleft()
            self._room.set()
            if isinstance(item, Exception):
                raise self._break_off(item)
            return self._observe(item)
        if self._cut is not None:
            raise self._give_up(self._cut)
        if self.clock() >= self._deadline:
            self._abort_reason = "timeout"
            raise ApiError(504, "timeout", "the request took longer than this server allows")
        return None

    async def _sleep(self, seconds: float) -> None:
        """Return when something has come, or after `seconds`."""
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        alarm = loop.call_later(seconds, self._wake)
        try:
            await self._waiter
        finally:
            alarm.cancel()
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _pump_events(self) -> None:
        """Move events into the inbox, as long as it has room.

        In its own task, because a wait with a timeout must not cancel the generator, and one task for a request is
        cheaper than one for each event.
        """
        try:
            async for event in self._events:
                self._inbox.append(event)
                self._wake()
                if len(self._inbox) >= _MOST_WAITING:
                    self._room.clear()
                    await self._room.wait()
            self._inbox.append(
                ApiError(500, "stream_broken", "the events of this request ended before the request did")
            )
        except Exception as error:
            self._inbox.append(error)
        self._wake()

    def _break_off(self, error: Exception) -> Exception:
        if isinstance(error, QueueFull | IdempotencyConflict):
            self._ended = self._refused = True
        known = of_exception(error)
        self._count_failure("internal_error" if known is None else known.code)
        return error

    def _observe(self, event: Event) -> Progress:
        metrics, model = self._relay.metrics, self.subject.model
        self.request_id = event.id
        if not self._begun and not isinstance(event, Queued):
            self._begun = True
            metrics.count_waiting(model, -1)
            metrics.count_running(model, 1)
        match event:
            case Failed():
                self._ended = True
                self.failure = event
                self._count_failure(event.code)
                raise of_failure(event)
            case Finished():
                self._ended = True
                self._spent = event.usage.completion_tokens
                if self._terms.counted:
                    length = event.usage.block_length or self.subject.block_length
                    metrics.count_finished(model, event, self.clock() - self.began, event.usage.blocks * length)
                note(reason=event.reason, detail=event.detail, nfe=event.usage.nfe)
                note(completion_tokens=event.usage.completion_tokens)
            case Delta():
                self._spent = event.offset + len(event.token_ids)
                if not self._saw_delta:
                    self._saw_delta = True
                    if self._terms.counted:
                        metrics.count_first_block(model, self.clock() - self.began)
            case Queued() | Started() | Snapshot():
                pass
            case _:
                assert_never(event)
        return event

    def _give_up(self, error: Exception) -> Exception:
        if isinstance(error, ClientGone):
            self._relay.metrics.disconnects.labels(self.subject.model).inc()
            note(disconnected=True)
        else:
            self._abort_reason = "shutdown"
            self._count_failure("shutdown")
        return error

    def _count_failure(self, code: str) -> None:
        if self._terms.counted:
            self._relay.metrics.failed.labels(self.subject.model, code).inc()

    async def _watch_caller(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.cut(ClientGone())
