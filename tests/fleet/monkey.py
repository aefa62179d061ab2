"""Faults drawn from a seed: processes killed, drained, frozen; connections cut, the network paused, Redis killed."""

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable

from shared.connection import open_sync_client
from shared.embedded import EmbeddedServer
from tests.fleet.network import Network
from tests.fleet.nursery import Child


class Monkey:
    """Does something bad every second or so; `faults` counts what it did."""

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

    async def _kill(self) -> None:
        if victim := self._victim():
            victim.send(signal.SIGKILL)

    async def _drain(self) -> None:
        if victim := self._victim():
            victim.send(signal.SIGTERM)

    async def _freeze(self) -> None:
        if victim := self._victim():
            victim.send(signal.SIGSTOP)
            self._later(self._random.uniform(0.3, 3.0) * self._lease_s, lambda: victim.send(signal.SIGCONT))

    async def _kill_pubsub(self) -> None:
        await asyncio.to_thread(self._ask, "CLIENT", "KILL", "TYPE", "pubsub")

    async def _forget_scripts(self) -> None:
        await asyncio.to_thread(self._ask, "SCRIPT", "FLUSH")

    async def _pause(self) -> None:
        self._start(self._network.pause(self._random.uniform(0.2, 2.5) * self._lease_s))

    async def _cut(self) -> None:
        await self._network.cut()

    async def _kill_redis(self) -> None:
        pid = self._server.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(self._random.uniform(0.0, 2.0))
        while self._server.running:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(self._server.start)

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
