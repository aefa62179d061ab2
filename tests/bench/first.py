"""Latency of the path: from submit to the first event, over one denoise step of the engine alone.

The first event is the snapshot of the first denoise step, or the first block where that step decided all of it: either
needs exactly one step.
"""

import argparse
import asyncio
import os
import statistics
import time

import orjson

from shared.commands import Limits, Preview
from shared.events import Delta, Snapshot
from tests.bench.load import engine, fleet, post, prompts, show
from worker.loop import EngineLoop

ROUNDS = 30
_SHOWS = ("buffer_snapshot", "append")


async def step_alone(loop: EngineLoop, prompt: str) -> float:
    """Return the seconds to the first snapshot or text in process."""
    began = time.perf_counter()
    limits = Limits(max_tokens=64, ignore_eos=True)
    stream = loop.generate_stream(prompt, limits=limits, preview=Preview(interval_ms=0))
    try:
        async for event in stream:
            if isinstance(event, Snapshot | Delta):
                return time.perf_counter() - began
    finally:
        await stream.aclose()
    raise RuntimeError("the stream ended without an event")


async def first_event(url: str, prompt: str) -> float:
    """Return the seconds to the first canvas or text over HTTP."""
    body = {"prompt": prompt, "max_tokens": 64, "ignore_eos": True, "temperature": 0}
    began = time.perf_counter()
    async with post(url, "/generate", {**body, "stream": True, "stream_mode": "denoise"}) as lines:
        async for line in lines:
            if line.startswith(b"data: {") and orjson.loads(line[6:])["event"] in _SHOWS:
                return time.perf_counter() - began
    raise RuntimeError("the stream ended without an event")


async def main() -> None:
    model = os.environ.get("DIFFLEET_MODEL", "demo")
    async with fleet(model) as served, engine(model) as loop:
        url = served.url
        prompt = prompts(loop, 1)[0]
        alone: list[float] = []
        path: list[float] = []
        for _ in range(ROUNDS):
            alone.append(1000 * await step_alone(loop, prompt))
            await asyncio.sleep(0.05)
            path.append(1000 * await first_event(url, prompt))
            await asyncio.sleep(0.05)
    step, first = statistics.median(alone), statistics.median(path)
    show("submit to first event, ms (median)", ["engine step", "path", "ratio"], [[step, first, first / step]])


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    asyncio.run(main())
