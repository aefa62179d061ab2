"""The whole path over the engine alone: tokens/s through HTTP, Redis and a worker, and in process."""

import argparse
import asyncio
import os

from tests.bench.load import QUESTIONS, Run, engine, engine_job, fleet, http_job, median, prompts, show, timed
from worker.loop import EngineLoop

CONCURRENCY = (1, 8, 32)
ROUNDS = 5
MAX_TOKENS = {1: 512, 8: 256, 32: 256}


async def measure(loop: EngineLoop, url: str, concurrent: int) -> tuple[list[Run], list[Run]]:
    """Alternate rounds of the two, so that a slow moment of the machine meets both.

    A round is a few seconds long. At 1 it is one request of each kind after the other, for the kinds differ in tokens a
    forward, and with it in what a block's way to the client costs beside its forwards.
    """
    alone: list[Run] = []
    path: list[Run] = []
    texts, most, together = prompts(loop, max(concurrent, len(QUESTIONS))), MAX_TOKENS[concurrent], concurrent > 1
    for _ in range(ROUNDS):
        alone.append(await timed([engine_job(loop, text, most) for text in texts], together))
        path.append(await timed([http_job(url, text, most) for text in texts], together))
    return alone, path


async def main() -> None:
    model = os.environ.get("DIFFLEET_MODEL", "demo")
    rows: list[list[object]] = []
    async with fleet(model) as served, engine(model) as loop:
        url = served.url
        await timed([engine_job(loop, text, 32) for text in prompts(loop, 2)])
        await timed([http_job(url, text, 32) for text in prompts(loop, 2)])
        for concurrent in CONCURRENCY:
            alone, path = await measure(loop, url, concurrent)
            rows.append([concurrent, median(alone), median(path), median(path) / median(alone)])
    show("whole path over engine alone, tokens/s", ["concurrent", "engine", "path", "ratio"], rows)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    asyncio.run(main())
