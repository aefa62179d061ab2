"""Follow a request from submit to its terminal event, and abort it when its caller leaves or its time is up."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator
from typing import assert_never

from starlette.types import Receive

from api.errors import ApiError, ClientGone, of_exception, of_failure, shutting_down
from api.metrics import Metrics
from api.ports import Fleet
from api.settings import ApiSettings
from shared.client import FleetUnavailable, QueueFull
from shared.commands import Generate
from shared.events import Delta, Event, Failed, Finished, Queued, Snapshot, Started
from shared.telemetry import note

logger = logging.getLogger("diffleet.api")

_MOST_WAITING = 16
"""Events taken ahead of a slow caller; behind it the subscription drops previews and keeps to the log."""

Progress = Queued | Started | Delta | Snapshot | Finished
"""Every event but `Failed`, which is raised."""


class Relay:
    """The open requests of this process."""

    def __init__(self, fleet: Fleet, settings: ApiSettings, metrics: Metrics) -> None:
        self.metrics = metrics
        self.settings = settings
        self._fleet = fleet
        self._open: set[Follow] = set()
        self._aborts: set[asyncio.Task[None]] = set()

    async def open(self, command: Generate, receive: Receive) -> "Follow":
        """Submit, and wait for news, so that an early failure still gets its own status.

        News is a block, a snapshot or the end; after `keepalive_s` without any the caller should get its status line.
        `receive` is that of the HTTP request, whose body must have been read. The caller closes what it gets.

        Raises `ApiError`, `QueueFull`, `UnknownModel`, `FleetUnavailable`, `ClientGone`.
        """
        note(id=command.id, model=command.model, prompt_tokens=len(command.prompt))
        events = self._fleet.run(command, queue_limit=self.settings.queue_limit)
        follow = Follow(self, command, events, receive)
        self._open.add(follow)
        try:
            await follow.wait_for_news()
        except BaseException:
            await follow.aclose()
            raise
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
        task = asyncio.create_task(self._abort(follow.command.id, abort))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)
        await asyncio.wait({task})

    async def aclose(self) -> None:
        """Wait for the last aborts."""
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=self.settings.abort_wait_s)

    async def _abort(self, request_id: str, reason: str) -> None:
        try:
            async with asyncio.timeout(self.settings.abort_wait_s):
                await self._fleet.abort(request_id, reason)
        except (FleetUnavailable, TimeoutError):
            logger.warning("a request could not be aborted", extra={"id": request_id, "reason": reason})


class Follow:
    """The events of one request; None where nothing came for `keepalive_s`. Ends after `Finished`.

    Iteration raises `ApiError` for a request that failed or ran out of time, `FleetUnavailable` if Redis is lost, and
    `ClientGone` once the caller has left. `aclose` aborts what has not ended.
    """

    def __init__(self, relay: Relay, command: Generate, events: AsyncGenerator[Event], receive: Receive) -> None:
        self.command = command
        self.clock = asyncio.get_running_loop().time
        self.began = self.clock()
        self._relay = relay
        self._events = events
        self._keepalive_s = relay.settings.keepalive_s
        self._deadline = self.began + relay.settings.request_timeout_s + relay.settings.timeout_grace_s
        self._early: deque[Progress] = deque()
        self._inbox: deque[Event | Exception] = deque()
        self._room = asyncio.Event()
        self._waiter: asyncio.Future[None] | None = None
        self._cut: Exception | None = None
        self._pump = asyncio.create_task(self._pump_events())
        self._watch = asyncio.create_task(self._watch_caller(receive))
        self._abort_reason: str | None = "disconnected"
        self._closed = False
        self._saw_delta = False
        relay.metrics.open_requests.labels(command.model).inc()

    def __aiter__(self) -> "Follow":
        return self

    async def __anext__(self) -> Progress | None:
        if self._early:
            return self._early.popleft()
        if self._abort_reason is None:
            raise StopAsyncIteration
        return await self._wait(self._keepalive_s)

    async def wait_for_news(self) -> None:
        limit = self.clock() + self._keepalive_s
        while (left := limit - self.clock()) > 0:
            event = await self._wait(left)
            if event is None:
                return
            self._early.append(event)
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
        self._watch.cancel()
        self._relay.metrics.open_requests.labels(self.command.model).dec()
        await self._relay.forget(self, self._abort_reason)
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
        if isinstance(error, QueueFull):
            self._abort_reason = None
        known = of_exception(error)
        self._count_failure("internal_error" if known is None else known.code)
        return error

    def _observe(self, event: Event) -> Progress:
        metrics, model = self._relay.metrics, self.command.model
        match event:
            case Failed():
                self._abort_reason = None
                self._count_failure(event.code)
                raise of_failure(event)
            case Finished():
                self._abort_reason = None
                metrics.count_finished(model, event, self.clock() - self.began)
                note(reason=event.reason, detail=event.detail, nfe=event.usage.nfe)
                note(completion_tokens=event.usage.completion_tokens)
            case Delta():
                if not self._saw_delta:
                    self._saw_delta = True
                    metrics.first_delta_seconds.labels(model).observe(self.clock() - self.began)
            case Queued() | Started() | Snapshot():
                pass
            case _:
                assert_never(event)
        return event

    def _give_up(self, error: Exception) -> Exception:
        if isinstance(error, ClientGone):
            self._relay.metrics.disconnects.labels(self.command.model).inc()
            note(disconnected=True)
        else:
            self._abort_reason = "shutdown"
            self._count_failure("shutdown")
        return error

    def _count_failure(self, code: str) -> None:
        self._relay.metrics.failed.labels(self.command.model, code).inc()

    async def _watch_caller(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.cut(ClientGone())
