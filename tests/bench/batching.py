"""Batching: 32 requests at once over the same 32 one after another, on one engine."""

import asyncio
import os

from tests.bench.load import engine, engine_job, median, prompts, show, timed

REQUESTS = 32
ROUNDS = 3
MAX_TOKENS = 128


async def main() -> None:
    model = os.environ.get("DIFFLEET_MODEL", "demo")
    async with engine(model) as loop:
        jobs = [engine_job(loop, text, MAX_TOKENS) for text in prompts(loop, REQUESTS)]
        await timed(jobs[:2])
        apart = [await timed(jobs, together=False) for _ in range(ROUNDS)]
        together = [await timed(jobs) for _ in range(ROUNDS)]
    row = [median(apart), median(together), median(together) / median(apart)]
    show(f"{REQUESTS} requests, tokens/s", ["one by one", "together", "ratio"], [row])


if __name__ == "__main__":
    asyncio.run(main())
