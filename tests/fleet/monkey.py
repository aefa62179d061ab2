"""Faults drawn from a seed: processes killed, drained, frozen; connections cut, the network paused, Redis killed."""

import asyncio
import math
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable

from shared.connection import open_sync_client
from shared.embedded import EmbeddedServer
from tests.fleet.diary import Fault, Span
from tests.fleet.network import Network
from tests.fleet.nursery import Child


class Monkey:
    """Does something bad every second or so; `faults` counts what it did, `hits` says to which workers and when."""

    def __init__(
        self, seed: int, workers: Callable[[], list[Child]], server: EmbeddedServer, network: Network, lease_s: float
    ) -> None:
        self._random = random.Random(seed)
        self._workers = workers
        self._server = server
        self._network = network
        self._lease_s = lease_s
        self._tasks: set[asyncio.Task[None]] = set()
        self.faults: Counter[str] = Counter()
        self.hits: list[Fault] = []
        self.stopped = False

    async def rage(self) -> None:
        kinds: list[tuple[str, int, Callable[[], Awaitable[None]]]] = [
            ("worker kill -9", 5, self._kill),
            ("worker SIGTERM", 4, self._drain),
            ("worker frozen", 4, self._freeze),
            ("subscriptions killed", 3, self._kill_pubsub),
            ("network paused", 3, self._pause),
            ("connections cut", 2, self._cut),
            ("Redis kill -9", 1, self._kill_redis),
            ("scripts forgotten", 1, self._forget_scripts),
        ]
        while not self.stopped:
            await asyncio.sleep(self._random.uniform(0.5, 1.6))
            if self.stopped:
                break
            [(name, _, act)] = self._random.choices(kinds, [weight for _, weight, _ in kinds])
            await act()
            self.faults[name] += 1
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _victim(self) -> Child | None:
        ready = [worker for worker in self._workers() if worker.ready]
        return self._random.choice(ready) if ready else None

    def _hit(self, kind: str, seconds: float, victims: Iterable[Child]) -> None:
        now = time.monotonic()
        self.hits.append(Fault(kind, Span(now, now + seconds), frozenset(victim.pid for victim in victims)))

    async def _kill(self) -> None:
        if victim := self._victim():
            self._hit("worker kill -9", math.inf, [victim])
            victim.send(signal.SIGKILL)

    async def _drain(self) -> None:
        if victim := self._victim():
            self._hit("worker SIGTERM", math.inf, [victim])
            victim.send(signal.SIGTERM)

    async def _freeze(self) -> None:
        if victim := self._victim():
            seconds = self._random.uniform(0.3, 3.0) * self._lease_s
            self._hit("worker frozen", seconds, [victim])
            victim.send(signal.SIGSTOP)
            self._later(seconds, lambda: victim.send(signal.SIGCONT))

    async def _kill_pubsub(self) -> None:
        await asyncio.to_thread(self._ask, "CLIENT", "KILL", "TYPE", "pubsub")

    async def _forget_scripts(self) -> None:
        await asyncio.to_thread(self._ask, "SCRIPT", "FLUSH")

    async def _pause(self) -> None:
        seconds = self._random.uniform(0.2, 2.5) * self._lease_s
        self._hit("network paused", seconds, self._remote())
        self._start(self._network.pause(seconds))

    def _remote(self) -> list[Child]:
        return [worker for worker in self._workers() if worker.remote]

    async def _cut(self) -> None:
        self._hit("connections cut", 0.0, self._remote())
        await self._network.cut()

    async def _kill_redis(self) -> None:
        pid = self._server.pid
        assert pid is not None
        began, workers = time.monotonic(), frozenset(worker.pid for worker in self._workers())
        os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(self._random.uniform(0.0, 2.0))
        while self._server.running:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(self._server.start)
        self.hits.append(Fault("Redis kill -9", Span(began, time.monotonic()), workers))

    def _ask(self, *command: str) -> None:
        client = open_sync_client(self._server.url)
        client.execute_command(*command)
        client.close()

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        async def wait() -> None:
            await asyncio.sleep(seconds)
            act()

        self._start(wait())

    def _start(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
