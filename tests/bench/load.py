"""What the benchmarks share: work to do, an HTTP client that costs little, a fleet and an engine to give it to."""

import asyncio
import contextlib
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import orjson
from rich.console import Console
from rich.table import Table

from shared.cli.local_fleet import LocalFleet, LocalFleetOptions
from shared.cli.progress import Reporter
from shared.commands import Limits
from worker.loop import EngineLoop
from worker.settings import WorkerSettings

QUESTIONS = (
    "What is 123 + 456?",
    "Tell me a story about a fox named Rusty.",
    "Sort these numbers: 42, 7, 19, 3.",
    "What is the capital of Japan?",
)


@dataclass(frozen=True, slots=True)
class Served:
    """A fleet of this machine."""

    url: str
    api_pid: int


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens produced by one round of requests, and how long it took in seconds."""

    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def machine() -> str:
    """Name the machine that figures belong to."""
    model = platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return f"{os.cpu_count()} cores, {model}, Python {platform.python_version()}"


def prompts(loop: EngineLoop, count: int) -> list[str]:
    """Return `count` rendered chat prompts."""
    return [
        loop.render_chat_prompt([{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}])
        for number in range(count)
    ]


async def timed(jobs: Sequence[Callable[[], Awaitable[int]]], together: bool = True) -> Run:
    """Run jobs that return their tokens, all at once or one after another."""
    began = time.perf_counter()
    tokens = sum(await asyncio.gather(*(job() for job in jobs))) if together else sum([await job() for job in jobs])
    return Run(tokens, time.perf_counter() - began)


def engine_job(loop: EngineLoop, prompt: str, max_tokens: int) -> Callable[[], Awaitable[int]]:
    async def job() -> int:
        answer = await loop.generate(prompt, limits=Limits(max_tokens=max_tokens, ignore_eos=True))
        return answer.usage.completion_tokens

    return job


def http_job(url: str, prompt: str, max_tokens: int) -> Callable[[], Awaitable[int]]:
    """Stream one generation over a connection of its own; counts the tokens of the final event."""

    async def job() -> int:
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
        last = b""
        async with post(url, "/generate", body) as lines:
            async for line in lines:
                if line.startswith(b"data: {"):
                    last = line
        final = orjson.loads(last[6:])
        if final["event"] != "final":
            raise RuntimeError(f"the stream ended with {final!r}")
        return final["usage"]["completion_tokens"]

    return job


@contextlib.asynccontextmanager
async def post(url: str, path: str, body: object) -> AsyncGenerator[AsyncGenerator[bytes]]:
    """POST JSON over a bare socket, so that the client's share of the two cores stays small; yields the body's lines.

    Raises RuntimeError for a status other than 200.
    """
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        payload = orjson.dumps(body)
        head = (
            f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}"
        )
        writer.write(head.encode() + b"\r\nConnection: close\r\n\r\n" + payload)
        status = await reader.readline()
        while (await reader.readline()).strip():
            pass
        if b" 200 " not in status:
            raise RuntimeError(f"{status!r} {await reader.read()!r}")

        async def lines() -> AsyncGenerator[bytes]:
            while line := await reader.readline():
                yield line

        yield lines()
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@contextlib.asynccontextmanager
async def fleet(model: str = "demo", workers: int = 1) -> AsyncGenerator[Served]:
    """Serve `model` on a free port with the embedded server, in a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="df-bench-") as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        options = LocalFleetOptions(
            host="127.0.0.1",
            port=port,
            workers=workers,
            model=model,
            model_name=None,
            redis_url=None,
            data_dir=Path(folder),
            start_timeout_s=120.0,
            drain_s=1.0,
        )
        async with LocalFleet(options, Reporter(sys.stderr)) as running:
            yield Served(options.url, running.pids[0])


def engine(model: str = "demo") -> EngineLoop:
    """Load the engine with a worker's own defaults."""
    return EngineLoop.load(WorkerSettings(model=model))


def median(runs: Sequence[Run]) -> float:
    return statistics.median(run.rate for run in runs)


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print one table, right-aligned, with the machine beneath."""
    table = Table(title=title, caption=machine(), title_justify="left", caption_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row))
    Console(width=100).print(table)
