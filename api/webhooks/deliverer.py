"""Deliver what is due, for as long as the process lives; any number of processes may.

Nothing of it is kept here: a message is in Redis until its receiver has taken it or it was given up, and one that this
process has in hand is due again once its lease is over.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from api.webhooks.cuts import was_cut
from api.webhooks.payload import Unreadable, message_id, render
from api.webhooks.post import BrokenAnswer, Poster
from api.webhooks.schedule import Again, judge, next_try
from api.webhooks.signing import Secrets, sign
from api.webhooks.target import Forbidden, Resolve, TargetRules, resolve_host
from shared.client import Result
from shared.connection import FleetUnavailable
from shared.keys import Keys
from shared.webhooks import Taken, WebhookStore

logger = logging.getLogger("diffleet.jobs")

_POLL_S = 0.5
_LEASE_SPARE_S = 30.0
_BUSY_HOST_MS = 1000
_USER_AGENT = "diffleet-webhooks/1"


@dataclass(frozen=True, slots=True)
class DeliveryTerms:
    delays_s: Sequence[float]
    timeout_s: float = 15.0
    concurrency: int = 32

    @property
    def per_host(self) -> int:
        """So many at a time to one host: one that hangs must not keep the others waiting."""
        return max(1, self.concurrency // 4)


class Deliverer:
    def __init__(
        self,
        store: WebhookStore,
        partitions: Callable[[], Awaitable[Sequence[Keys]]],
        secrets: Secrets,
        rules: TargetRules,
        terms: DeliveryTerms,
        look: Callable[[str], Awaitable[Result]],
        poster: Poster | None = None,
        resolve: Resolve = resolve_host,
    ) -> None:
        self._store = store
        self._partitions = partitions
        self._secrets = secrets
        self._rules = rules
        self._terms = terms
        self._look = look
        self._poster = poster or Poster(terms.timeout_s)
        self._resolve = resolve
        self._hosts: Counter[str] = Counter()
        self._running: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Work until cancelled. Raises `FleetUnavailable`; what is in hand is then due again later."""
        try:
            while True:
                taken = await self.take_due()
                for task in [task for task in self._running if task.done()]:
                    self._running.discard(task)
                    task.result()
                if not taken or len(self._running) >= self._terms.concurrency:
                    await self._pause()
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    async def take_due(self) -> int:
        """Take what is due and begin to deliver it; return how much that was."""
        taken = 0
        lease_ms = round((self._terms.timeout_s + _LEASE_SPARE_S) * 1000)
        for keys in await self._partitions():
            room = self._terms.concurrency - len(self._running)
            if room < 1:
                break
            for message in await self._store.take(keys, room, lease_ms):
                self._running.add(asyncio.create_task(self._deliver(message)))
                taken += 1
        return taken

    async def _pause(self) -> None:
        if self._running:
            await asyncio.wait(self._running, timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(_POLL_S)

    async def _deliver(self, message: Taken) -> None:
        """Try once, and say what came of it."""
        try:
            target = self._rules.parse(message.to.url)
        except Forbidden:
            await self._end(message, "dead", "forbidden_url")
            return
        if self._hosts[target.host] >= self._terms.per_host:
            await self._store.settle(message, "later", _BUSY_HOST_MS)
            return
        self._hosts[target.host] += 1
        try:
            await self._try(message)
        except FleetUnavailable:
            raise
        except Exception:
            # One message must not end the delivery of the others; the trace holds no payload.
            logger.exception("a webhook could not be sent", extra={"subject": message.id})
            await self._fail(message, "internal")
        finally:
            self._hosts[target.host] -= 1
            if not self._hosts[target.host]:
                del self._hosts[target.host]

    async def _try(self, message: Taken) -> None:
        secrets = self._secrets.of(message.to.tenant)
        if not secrets:
            await self._fail(message, "no_secret")
            return
        if await self._store.closed(message.to):
            await self._end(message, "dead", "receiver_gone")
            return
        try:
            body = render(message, await was_cut(message, self._look))
        except Unreadable:
            await self._end(message, "dead", "malformed")
            return
        now_s = time.time()
        headers = {"content-type": "application/json", "user-agent": _USER_AGENT}
        headers |= sign(secrets, message_id(message.id), int(now_s), body)
        target = self._rules.parse(message.to.url)
        try:
            async with asyncio.timeout(self._terms.timeout_s):
                addresses = await self._rules.addresses(target, self._resolve)
            answer = await self._poster.post(target, addresses, headers, body, now_s)
        except Forbidden:
            await self._fail(message, "forbidden_address")
            return
        except TimeoutError:
            await self._fail(message, "timeout")
            return
        except OSError as error:
            await self._fail(message, f"unreachable: {type(error).__name__}")
            return
        except BrokenAnswer:
            await self._fail(message, "broken_answer")
            return
        match judge(answer.status):
            case "told":
                await self._end(message, "told", f"http_{answer.status}")
            case "gone":
                await self._store.close(message.to)
                await self._end(message, "dead", "http_410")
            case "again":
                await self._fail(message, f"http_{answer.status}", answer.retry_after_s)

    async def _fail(self, message: Taken, why: str, retry_after_s: float | None = None) -> None:
        match next_try(message.attempt, self._terms.delays_s, retry_after_s):
            case Again(delay_s):
                await self._store.settle(message, "again", round(delay_s * 1000), why)
                self._log(logging.INFO, "a webhook is tried again", message, why)
            case _:
                await self._end(message, "dead", why)

    async def _end(self, message: Taken, outcome: Literal["told", "dead"], why: str) -> None:
        await self._store.settle(message, outcome, 0, why)
        if outcome == "told":
            self._log(logging.INFO, "a webhook was delivered", message, why)
        else:
            self._log(logging.WARNING, "a webhook was given up", message, why)

    def _log(self, level: int, text: str, message: Taken, why: str) -> None:
        # Not the URL: its path is often a secret.
        logger.log(level, text, extra={"subject": message.id, "attempt": message.attempt, "why": why})


async def deliver_for_ever(deliverer: Deliverer) -> None:
    """Run, and go on after an outage of Redis."""
    while True:
        try:
            await deliverer.run()
        except FleetUnavailable as error:
            logger.warning("webhooks wait for Redis", extra={"fault": type(error).__name__})
        await asyncio.sleep(2 * _POLL_S)
