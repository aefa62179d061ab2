"""What the control plane costs: requests and durable events for each core's second of Redis and of an api process.

Workers only sleep for a step. All figures are CPU time, counts and bytes, so that they hold on a machine that is busy.

    python -m tests.bench.control
"""

import argparse
import asyncio
import contextlib
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.client import FleetClient
from shared.commands import Generate, Limits
from shared.connection import open_sync_client
from shared.embedded import EmbeddedServer
from shared.events import Delta, Finished
from shared.keys import new_request_id
from tests.bench.load import post, show
from tests.bench.stub_workers import BLOCK

MODEL = "stub"
SLOTS = 16
STEP_MS = 50
BLOCKS = 8
PROMPT = 256
QUEUED = 5000
EVENTS = BLOCKS + 2
"""Durable events of a request: queued, the blocks, the end."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a process and the server have used so far."""

    cpu_s: tuple[float, ...]
    commands: int
    scripts: int
    bytes: int
    at: float


class Meter:
    """Reads the server's counters, and the CPU time of some processes."""

    def __init__(self, url: str, pids: list[int]) -> None:
        self._redis: Any = open_sync_client(url)
        self._pids = pids

    def read(self) -> Reading:
        stats, calls = self._redis.info("stats"), self._redis.info("commandstats")
        traffic = stats["total_net_input_bytes"] + stats["total_net_output_bytes"]
        scripts = calls.get("cmdstat_evalsha", {"calls": 0})["calls"]
        cpu = tuple(cpu_seconds(pid) for pid in self._pids)
        return Reading(cpu, stats["total_commands_processed"], scripts, traffic, time.monotonic())

    def memory(self) -> int:
        return self._redis.info("memory")["used_memory"]

    def close(self) -> None:
        self._redis.close()


def cpu_seconds(pid: int) -> float:
    """Return user and system time of a process (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def command() -> Generate:
    limits = Limits(max_tokens=BLOCKS * BLOCK)
    return Generate(id=new_request_id(MODEL), model=MODEL, prompt=(7,) * PROMPT, limits=limits)


@contextlib.asynccontextmanager
async def process(*arguments: str, ready: bytes | None = None, **env: str) -> AsyncIterator[int]:
    """Run one of our programs; yields its pid once it has said that it is ready."""
    out = asyncio.subprocess.PIPE if ready else None
    child = await asyncio.create_subprocess_exec(sys.executable, "-m", *arguments, stdout=out, env=os.environ | env)
    try:
        if ready and child.stdout is not None:
            async with asyncio.timeout(60):
                await child.stdout.readuntil(ready)
        yield child.pid
    finally:
        child.kill()
        await child.wait()


async def many(count: int, together: int, one: Callable[[], Awaitable[None]]) -> None:
    """Run `one` so many times, so many at a time."""
    left = iter(range(count))

    async def run() -> None:
        for _ in left:
            await one()

    await asyncio.gather(*(run() for _ in range(together)))


async def memory_row(url: str, meter: Meter) -> list[object]:
    """Queue requests that nobody takes."""
    async with FleetClient.connect(url) as fleet:
        await many(100, 16, lambda: queue_one(fleet))
        before, first = meter.memory(), meter.read()
        await many(QUEUED, 16, lambda: queue_one(fleet))
        after, last = meter.memory(), meter.read()
    bytes_each = (after - before) / QUEUED
    return [QUEUED, PROMPT, round(bytes_each), round(QUEUED / (last.cpu_s[0] - first.cpu_s[0]))]


async def queue_one(fleet: FleetClient) -> None:
    await fleet.submit(command(), queue_limit=10 * QUEUED)


async def idle_row(url: str, meter: Meter, workers: int) -> list[object]:
    async with process("tests.bench.stub_workers", url, MODEL, str(workers), str(SLOTS), str(STEP_MS), ready=b"ready"):
        await asyncio.sleep(2)
        first = meter.read()
        await asyncio.sleep(6)
        last = meter.read()
    seconds = last.at - first.at
    share = (last.cpu_s[0] - first.cpu_s[0]) / seconds
    return [workers, f"{share:.1%}", round((last.commands - first.commands) / seconds)]


async def direct_row(url: str, meter: Meter, workers: int, together: int, count: int) -> list[object]:
    """Submit and follow by `FleetClient`; this process's own time is that of a client."""
    async with (
        process("tests.bench.stub_workers", url, MODEL, str(workers), str(SLOTS), str(STEP_MS), ready=b"ready"),
        FleetClient.connect(url) as fleet,
    ):

        async def one() -> None:
            seen = 0
            async for event in fleet.run(command(), previews=False, queue_limit=100_000):
                seen += isinstance(event, Delta)
            assert seen == BLOCKS and isinstance(event, Finished)

        await many(together, together, one)
        first = meter.read()
        await many(count, together, one)
        last = meter.read()
    return ["-", *costs(first, last, workers, together, count)]


async def http_row(url: str, meter_of: Callable[[int], Meter], workers: int, together: int, count: int) -> list[object]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ("--port", str(port), "--redis-url", url, "--queue-limit", "100000", "--log-level", "error")
    async with (
        process("tests.bench.stub_workers", url, MODEL, str(workers), str(SLOTS), str(STEP_MS), ready=b"ready"),
        process("api", *flags) as api,
    ):
        meter = meter_of(api)
        body = {"prompt": [7] * PROMPT, "max_tokens": BLOCKS * BLOCK, "stream": True}

        opening = asyncio.Semaphore(50)

        async def one() -> None:
            # Thousands are open at a time, but do not come in the same millisecond.
            async with contextlib.AsyncExitStack() as stack:
                async with opening:
                    lines = await stack.enter_async_context(post(f"http://127.0.0.1:{port}", "/generate", body))
                final = [line async for line in lines if line.startswith(b"data: {")][-1]
            assert b'"final"' in final, final

        await reachable(port)
        await many(together, together, one)
        first = meter.read()
        await many(count, together, one)
        last = meter.read()
        meter.close()
    api_s = last.cpu_s[1] - first.cpu_s[1]
    return [f"{round(count / api_s)} / {round(count * EVENTS / api_s)}", *costs(first, last, workers, together, count)]


async def reachable(port: int) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.1)
                continue
            writer.close()
            await writer.wait_closed()
            return


def costs(first: Reading, last: Reading, workers: int, together: int, count: int) -> list[object]:
    redis_s, tokens = last.cpu_s[0] - first.cpu_s[0], count * BLOCKS * BLOCK
    return [
        workers,
        together,
        round(count / (last.at - first.at)),
        f"{redis_s / (last.at - first.at):.0%}",
        round(count / redis_s),
        round(count * EVENTS / redis_s),
        round((last.scripts - first.scripts) / count, 1),
        round((last.commands - first.commands) / tokens, 3),
        round((last.bytes - first.bytes) / tokens, 1),
    ]


async def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="df-bench-"))
    server = EmbeddedServer(folder)
    server.start()
    assert server.pid is not None
    pid, url = server.pid, server.url
    meter = Meter(url, [pid])
    try:
        async with process("tests.bench.stub_workers", url, MODEL, "1", "1", "1", ready=b"ready"):
            pass  # It has written the card.
        queued = await memory_row(url, meter)
        show("queued", ["requests", "prompt tokens", "bytes each", "submits/s of a Redis core"], [queued])
        open_sync_client(url).flushall()
        idle = [await idle_row(url, meter, workers) for workers in (1, 64)]
        show("workers without work", ["workers", "Redis core", "commands/s"], idle)
        rows = [
            await direct_row(url, meter, 6, 100, 1500),
            await direct_row(url, meter, 64, 100, 1500),
            await direct_row(url, meter, 64, 1000, 4000),
            await http_row(url, lambda api: Meter(url, [pid, api]), 64, 100, 1500),
            await http_row(url, lambda api: Meter(url, [pid, api]), 64, 1000, 3000),
        ]
        columns = ["api core: req/s / events/s", "workers", "open", "req/s seen", "Redis busy", "req/s a Redis core"]
        columns += ["events/s a Redis core", "scripts a request", "commands a token", "bytes a token"]
        show(f"under load: {PROMPT} tokens in, {BLOCKS} blocks of {BLOCK} out", columns, rows)
    finally:
        meter.close()
        server.stop()
        shutil.rmtree(folder)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    asyncio.run(main())
