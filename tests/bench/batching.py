"""Batching: 32 requests at once over the same 32 one after another, on one engine of each precision."""

import argparse
import asyncio
import os
from typing import Literal

from tests.bench.load import engine_job, median, prompts, show, timed
from worker.device import usable_cores
from worker.loop import EngineLoop
from worker.settings import WorkerSettings

REQUESTS = 32
ROUNDS = 3
MAX_TOKENS = 128
PRECISIONS: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")


async def rates(model: str, dtype: Literal["float32", "bfloat16"], threads: int) -> tuple[float, float]:
    """Return tokens/s one after another and together. Nothing serves a queue here, so all cores do arithmetic."""
    async with EngineLoop.load(WorkerSettings(model=model, dtype=dtype, threads=threads)) as loop:
        jobs = [engine_job(loop, text, MAX_TOKENS) for text in prompts(loop, REQUESTS)]
        await timed(jobs[:2])
        apart = [await timed(jobs, together=False) for _ in range(ROUNDS)]
        together = [await timed(jobs) for _ in range(ROUNDS)]
    return median(apart), median(together)


async def main() -> None:
    model = os.environ.get("DIFFLEET_MODEL", "demo")
    threads = usable_cores()
    rows: list[tuple[str, int, float, float, float]] = []
    for dtype in PRECISIONS:
        apart, together = await rates(model, dtype, threads)
        rows.append((dtype, threads, apart, together, together / apart))
    show(f"{REQUESTS} requests, tokens/s", ["precision", "threads", "one by one", "together", "ratio"], rows)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    asyncio.run(main())
