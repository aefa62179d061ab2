"""Several requests that answer one call: the choices of `n`, the prompts of a list."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from starlette.types import Receive

from api.errors import ClientGone
from api.infill import FillWriter
from api.relay import Follow, Progress, Relay, Terms
from api.transcript import Transcript
from shared.commands import Generate
from shared.events import Delta, Finished

_MOST_WAITING = 16
"""Events taken ahead of a slow caller, over all requests."""


class Bundle:
    """Events of all requests, each with the index of its request; None in place of an event: nothing came for a while.

    Ends after every request has finished. One that fails ends them all: iteration raises as that of `Follow`, and
    `aclose` aborts what has not ended.
    """

    def __init__(self, relay: Relay, follows: Sequence[Follow], watch: asyncio.Task[None] | None = None) -> None:
        self.follows = tuple(follows)
        self._watch = watch
        self._keepalive_s = relay.settings.keepalive_s
        self.writers: Sequence[FillWriter] = ()
        """For each request, where the text of its events is not what the caller sees."""

    @classmethod
    async def open(
        cls, relay: Relay, commands: Sequence[Generate], receive: Receive | None, terms: Sequence[Terms]
    ) -> "Bundle":
        """Submit all, and wait for the first news of one of them; raises as `Relay.open`, then nothing is left."""
        if len(commands) == 1:
            return cls(relay, [await relay.open(commands[0], receive, terms[0])])
        follows = [relay.submit(command, None, term) for command, term in zip(commands, terms, strict=True)]
        watch = None if receive is None else asyncio.create_task(_watch_caller(receive, follows))
        bundle = cls(relay, follows, watch)
        try:
            await _all(follow.wait_for_admission() for follow in follows)
            await _first(follow.wait_for_news() for follow in follows)
        except BaseException:
            await bundle.aclose()
            raise
        return bundle

    @classmethod
    def of(cls, relay: Relay, follow: Follow) -> "Bundle":
        return cls(relay, [follow])

    async def __aiter__(self) -> AsyncGenerator[tuple[int, Progress | None]]:
        if len(self.follows) == 1:
            async for event in self.follows[0]:
                yield 0, self._told(0, event)
            return
        queue: asyncio.Queue[tuple[int, Progress | Exception | None]] = asyncio.Queue(_MOST_WAITING)
        pumps = [asyncio.create_task(_pump(index, follow, queue)) for index, follow in enumerate(self.follows)]
        try:
            left = len(pumps)
            while left:
                try:
                    async with asyncio.timeout(self._keepalive_s):
                        index, item = await queue.get()
                except TimeoutError:
                    yield 0, None
                    continue
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield index, self._told(index, item)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    def told(self, index: int) -> Mapping[str, object]:
        """Return what a choice tells of its template."""
        return self.writers[index].told if self.writers else {}

    def _told(self, index: int, event: Progress | None) -> Progress | None:
        if self.writers and isinstance(event, Delta):
            return self.writers[index].of_delta(event)
        if self.writers and isinstance(event, Finished):
            return self.writers[index].of_end(event)
        return event

    async def read_to_end(self) -> list[Transcript]:
        """Follow all to their ends, and close; raises as iteration."""
        transcripts = [Transcript.of(follow, keep_deltas=True) for follow in self.follows]
        try:
            async for index, event in self:
                if event is not None:
                    transcripts[index].observe(event)
        finally:
            await self.aclose()
        return transcripts

    async def aclose(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        await asyncio.gather(*(follow.aclose() for follow in self.follows))


async def _pump(index: int, follow: Follow, queue: "asyncio.Queue[tuple[int, Progress | Exception | None]]") -> None:
    """Move the events of one request into the queue; None tells its end."""
    try:
        async for event in follow:
            if event is not None:
                await queue.put((index, event))
        await queue.put((index, None))
    except Exception as error:
        await queue.put((index, error))


async def _all(waits: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Wait for all; the first exception ends the others and is raised."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        await asyncio.gather(*tasks)
    finally:
        await _cancel(tasks)


async def _first(waits: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Wait for one; if it raised, so does this."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await _cancel(tasks)


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _watch_caller(receive: Receive, follows: Sequence[Follow]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    for follow in follows:
        follow.cut(ClientGone())
