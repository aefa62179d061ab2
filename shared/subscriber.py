"""Follow requests live: one subscribed connection for all requests of a process, the event log for every gap.

The reader looks a channel up and drops the bytes into the mailboxes of its followers; each follower decodes and orders
its own. A mailbox holds at most `RING` durable events and one preview: who falls behind reads the log instead. A
follower never sees a gap or a repeat:

* seq = last + 1 is delivered, a higher one sends the follower to the log, a lower one is dropped;
* after each loss of the connection, and each new subscription, everybody reads the log;
* a process hears itself on a channel of its own every second, or drops the connection;
* every few seconds the state of all followed requests is compared with what arrived.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, Self, assert_never

from shared.commands import LANES
from shared.connection import FleetUnavailable, Link, TurnedAway, jitter_s
from shared.events import (
    Delta,
    Event,
    Failed,
    Finished,
    InvalidEvent,
    Queued,
    Snapshot,
    Started,
    decode_event,
    is_terminal,
)
from shared.keys import GROUP, Keys, watch_channel
from shared.lua import script
from shared.pubsub import Endpoint, PubSubConnection

RING = 64
"""Durable events that one mailbox holds, and how many are read from the log at a time."""
WATCH_S = 1.0
WATCH_MISSES = 3
AUDIT_S = 5.0
SUBSCRIBE_TIMEOUT_S = 5.0
PATIENCE_S = 30.0
"""How long a follower waits for a Redis that is away before it gives up."""
EXPIRY_GRACE_MS = 5_000
"""How long after its deadline a running request is left to its worker to end."""
_AUDIT_BATCH = 256
_RECONNECT_LONGEST_S = 5.0

_log = logging.getLogger(__name__)


class Unknown(Exception):
    """No request of this id, or its retention is over."""


class Mailbox:
    """One follower's place in memory. Filled by the reader, emptied by its one owner."""

    def __init__(self, request_id: str, after: int, previews: bool, behind: bool) -> None:
        self.request_id = request_id
        self.last = after
        """Seq of the last durable event delivered."""
        self.behind = behind
        """The log has events that this mailbox may never get."""
        self.wake = asyncio.Event()
        self._previews = previews
        self._ring: deque[bytes] = deque()
        self._preview: bytes | None = None

    @property
    def empty(self) -> bool:
        return not self._ring

    def put(self, payload: bytes) -> None:
        if is_preview(payload):
            if not self._previews:
                return
            self._preview = payload
        elif not self.behind:
            if len(self._ring) == RING:
                self.mark_behind()
            else:
                self._ring.append(payload)
        self.wake.set()

    def mark_behind(self) -> None:
        self.behind = True
        self._ring.clear()
        self.wake.set()

    def catch_up(self) -> None:
        """Called before the log is read: what arrives from now on is kept."""
        self.behind = False
        self._ring.clear()

    def pop(self) -> bytes | None:
        """Return the next durable event, else the preview, else None."""
        if self._ring:
            return self._ring.popleft()
        preview, self._preview = self._preview, None
        return preview


def is_preview(payload: bytes) -> bool:
    """Tell a preview without parsing. A quote inside JSON text is escaped, so this cannot be part of a value."""
    return b'"t":"snapshot"' in payload or b'"t":"started"' in payload


class Subscriber:
    """The process's one subscription. For one event loop; enter it before use."""

    def __init__(self, url: str, link: Link) -> None:
        self._endpoint = Endpoint.from_url(url)
        self._link = link
        self._feeds: dict[bytes, _Feed] = {}
        self._connection: PubSubConnection | None = None
        self._watch = watch_channel(secrets.token_hex(8)).encode()
        self._misses = 0
        self._tasks: list[asyncio.Task[None]] = []
        self.reconnects = 0
        """How often the connection was made anew."""
        self.replays = 0
        """How often a follower has read the log."""

    async def __aenter__(self) -> Self:
        loops = (self._keep_connected, self._keep_watch, self._keep_auditing)
        self._tasks = [asyncio.create_task(loop(), name=f"subscriber{loop.__name__}") for loop in loops]
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = set(self._tasks)
        while tasks:
            # Again and again: a cancellation that meets the end of the client library's own timeout is lost in it.
            for task in tasks:
                task.cancel()
            tasks = (await asyncio.wait(tasks, timeout=0.5))[1]
        if self._connection is not None:
            self._connection.abort()
            await self._connection.lost.wait()

    @contextlib.asynccontextmanager
    async def attach(
        self, request_id: str, after: int = 0, previews: bool = True, fresh: bool = False
    ) -> AsyncGenerator[Mailbox]:
        """Subscribe to a request; on entry the subscription is confirmed.

        `fresh`: nothing can have been published yet, so the log need not be read first. Raises `FleetUnavailable`.
        """
        channel = Keys.of(request_id).channel(request_id).encode()
        mailbox = Mailbox(request_id, after, previews, behind=not fresh)
        feed = self._feeds.get(channel)
        if feed is None:
            feed = self._feeds[channel] = _Feed()
            if self._connection is not None:
                self._connection.subscribe([channel])
        feed.mailboxes.append(mailbox)
        try:
            try:
                async with asyncio.timeout(SUBSCRIBE_TIMEOUT_S):
                    await feed.confirmed.wait()
            except TimeoutError:
                raise FleetUnavailable("Redis does not confirm the subscription") from None
            yield mailbox
        finally:
            feed.mailboxes.remove(mailbox)
            if not feed.mailboxes:
                del self._feeds[channel]
                if self._connection is not None:
                    self._connection.unsubscribe(channel)

    async def events(self, mailbox: Mailbox) -> AsyncIterator[Event]:
        """Yield the events of an attached request up to its terminal one.

        Raises `Unknown` if there is no such request, `FleetUnavailable` if Redis stays away for `PATIENCE_S`.
        """
        follower = _Follower(mailbox, self._read_log)
        while not follower.ended:
            for event in await follower.next():
                yield event

    async def _read_log(self, request_id: str, first: int, count: int) -> "_Page | None":
        patience = time.monotonic() + PATIENCE_S
        while True:
            try:
                page = await self._read_log_once(request_id, first, count)
                self.replays += 1
                return page
            except FleetUnavailable:
                if time.monotonic() > patience:
                    raise

    async def _read_log_once(self, request_id: str, first: int, count: int) -> "_Page | None":
        keys = Keys.of(request_id)
        names = [keys.request(request_id), keys.log(request_id)]
        reply = await self._link.run_again(script("replay"), names, [first, count])
        if reply and reply[2]:
            await self._expire(request_id)
            reply = await self._link.run_again(script("replay"), names, [first, count])
        return _Page(reply) if reply else None

    async def _expire(self, request_id: str) -> None:
        keys = Keys.of(request_id)
        names = [keys.request(request_id), keys.log(request_id), keys.channel(request_id), keys.rate()]
        names += [keys.lane(lane) for lane in LANES]
        await self._link.run_again(script("expire"), names, [request_id, GROUP, EXPIRY_GRACE_MS])

    def _on_message(self, channel: bytes, payload: bytes) -> None:
        if feed := self._feeds.get(channel):
            for mailbox in feed.mailboxes:
                mailbox.put(payload)
        elif channel == self._watch:
            self._misses = 0

    def _on_subscribed(self, channel: bytes) -> None:
        if feed := self._feeds.get(channel):
            if feed.subscribed_before:
                feed.mark_behind()
            feed.subscribed_before = True
            feed.confirmed.set()

    async def _keep_connected(self) -> None:
        attempt = 0
        while True:
            try:
                connection = await PubSubConnection.open(self._endpoint, self._on_message, self._on_subscribed)
            except FleetUnavailable as error:
                _log.warning("the subscription waits for Redis: %s", error)
            else:
                self._misses = 0
                self._connection = connection
                connection.subscribe([self._watch, *self._feeds])
                await connection.lost.wait()
                self._connection = None
                self.reconnects += 1
                _log.warning("the subscription was lost: %s", connection.refusal or "connection closed")
                attempt = 0 if connection.refusal is None else attempt
                for feed in self._feeds.values():
                    feed.confirmed.clear()
                    feed.mark_behind()
            await asyncio.sleep(jitter_s(attempt, _RECONNECT_LONGEST_S))
            attempt += 1

    async def _keep_watch(self) -> None:
        told = False
        while True:
            await asyncio.sleep(WATCH_S)
            connection = self._connection
            if connection is None:
                continue
            if self._misses >= WATCH_MISSES:
                _log.warning("the subscription is silent: connecting anew")
                connection.abort()
                continue
            try:
                await self._link.command("PUBLISH", self._watch, b"1")
            except TurnedAway as error:
                # A subscription needs no database, so this may be all that is ever seen of a wrong number.
                if not told:
                    _log.warning("commands are turned away: %s", error)
                told = True
            except FleetUnavailable:
                pass  # where the connection is lost too, that is told of
            else:
                told = False
                self._misses += 1

    async def _keep_auditing(self) -> None:
        while True:
            await asyncio.sleep(AUDIT_S)
            with contextlib.suppress(FleetUnavailable):
                await self.audit()

    async def audit(self) -> None:
        """Compare every followed request with the truth; who misses something, or is past the deadline, reads on."""
        mailboxes = [mailbox for feed in self._feeds.values() for mailbox in feed.mailboxes]
        for start in range(0, len(mailboxes), _AUDIT_BATCH):
            batch = mailboxes[start : start + _AUDIT_BATCH]
            calls = [
                ([keys.request(box.request_id), keys.log(box.request_id)], [1, 0])
                for box in batch
                for keys in [Keys.of(box.request_id)]
            ]
            for mailbox, reply in zip(batch, await self._link.run_many(script("replay"), calls), strict=True):
                if not reply or reply[2] or (reply[1] > mailbox.last and mailbox.empty):
                    mailbox.mark_behind()


class _Feed:
    """One channel and its followers."""

    def __init__(self) -> None:
        self.mailboxes: list[Mailbox] = []
        self.confirmed = asyncio.Event()
        self.subscribed_before = False

    def mark_behind(self) -> None:
        for mailbox in self.mailboxes:
            mailbox.mark_behind()


class _Page:
    """A part of a request's log, and its state at that moment."""

    def __init__(self, reply: list[Any]) -> None:
        state, seq, _, events, _ = reply
        self.state: str = state.decode()
        self.seq: int = seq
        self.events: list[tuple[int, bytes]] = list(zip(events[::2], events[1::2], strict=True))


class _Follower:
    """Puts the events of one mailbox in order."""

    def __init__(self, mailbox: Mailbox, read_log: Callable[[str, int, int], Awaitable[_Page | None]]) -> None:
        self._mailbox = mailbox
        self._read_log = read_log
        self._epoch = 0
        self._known = False
        self.ended = False

    async def next(self) -> list[Event]:
        """Return what can be delivered now, in order; waits for something to happen."""
        if self._mailbox.behind:
            return await self._catch_up()
        payload = self._mailbox.pop()
        if payload is None:
            await self._wait()
            return []
        try:
            event = decode_event(payload)
        except InvalidEvent as error:
            # From a newer worker. If it was durable, the hole in seq leads to the log, which knows its number.
            _log.warning("an event of request_id=%s was not understood: %s", self._mailbox.request_id, error)
            return []
        return [event] if self._accept(event) else []

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(3 * AUDIT_S):
                await self._mailbox.wake.wait()
        except TimeoutError:
            self._mailbox.mark_behind()
        self._mailbox.wake.clear()

    async def _catch_up(self) -> list[Event]:
        mailbox = self._mailbox
        mailbox.catch_up()
        page = await self._read_log(mailbox.request_id, mailbox.last + 1, RING)
        if page is None:
            if not self._known:
                raise Unknown(mailbox.request_id)
            return [self._lose()]
        self._known = True
        delivered: list[Event] = []
        for seq, payload in page.events:
            if seq > mailbox.last + 1:
                return [*delivered, self._lose()]
            try:
                event = decode_event(payload)
            except InvalidEvent as error:
                _log.warning("an event of request_id=%s was not understood: %s", mailbox.request_id, error)
                mailbox.last = seq
                continue
            if self._accept(event):
                delivered.append(event)
        if len(page.events) == RING:
            mailbox.mark_behind()
        elif mailbox.last >= page.seq and page.state not in ("queued", "running"):
            self.ended = True
        elif mailbox.last < page.seq:
            return [*delivered, self._lose()]
        return delivered

    def _accept(self, event: Event) -> bool:
        """Tell whether to deliver; a gap sends the mailbox to the log."""
        mailbox = self._mailbox
        match event:
            case Queued() | Delta() | Finished() | Failed():
                if event.seq > mailbox.last + 1:
                    mailbox.mark_behind()
                if event.seq != mailbox.last + 1:
                    return False
                mailbox.last, self._epoch, self._known = event.seq, event.epoch, True
                self.ended = is_terminal(event)
                return True
            case Snapshot():
                if event.after > mailbox.last:
                    mailbox.mark_behind()
                return event.after == mailbox.last and event.epoch >= self._epoch
            case Started():
                return event.epoch > self._epoch
            case _:
                assert_never(event)

    def _lose(self) -> Event:
        """The rest of the request is gone: Redis has lost it, or its retention is over."""
        self.ended = True
        mailbox = self._mailbox
        return Failed(mailbox.request_id, mailbox.last + 1, self._epoch, "lost", "the queue has lost this request")
