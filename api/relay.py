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
        self._next: asyncio.Task[Event | None] | None = None
        self._cut: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
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
        if not self._cut.done():
            self._cut.set_result(error)

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._watch.cancel()
        self._relay.metrics.open_requests.labels(self.command.model).dec()
        await self._relay.forget(self, self._abort_reason)
        if self._next is not None:
            self._next.cancel()
            # What it still had to say interests nobody; gathering takes note of it.
            await asyncio.gather(self._next, return_exceptions=True)
        await self._events.aclose()

    async def _wait(self, timeout_s: float) -> Progress | None:
        if self._next is None:
            # A task, because a wait that times out must not cancel the generator.
            self._next = asyncio.create_task(self._pull())
        left = self._deadline - self.clock()
        timeout = max(0.0, min(timeout_s, left))
        await asyncio.wait((self._next, self._cut), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if self._next.done():
            task, self._next = self._next, None
            return self._observe(self._outcome(task))
        if self._cut.done():
            raise self._give_up(self._cut.result())
        if self.clock() >= self._deadline:
            self._abort_reason = "timeout"
            raise ApiError(504, "timeout", "the request took longer than this server allows")
        return None

    async def _pull(self) -> Event | None:
        return await anext(self._events, None)

    def _outcome(self, task: "asyncio.Task[Event | None]") -> Event | None:
        try:
            return task.result()
        except Exception as error:
            if isinstance(error, QueueFull):
                self._abort_reason = None
            known = of_exception(error)
            self._count_failure("internal_error" if known is None else known.code)
            raise

    def _observe(self, event: Event | None) -> Progress:
        metrics, model = self._relay.metrics, self.command.model
        match event:
            case None:
                self._count_failure("stream_broken")
                raise ApiError(500, "stream_broken", "the events of this request ended before the request did")
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
