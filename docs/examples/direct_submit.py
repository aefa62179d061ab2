"""Submit through Redis, leave, and come back for the answer: no api, no open connection."""

import asyncio
import sys

from shared.client import FleetClient
from shared.commands import Limits, Sampling
from shared.events import Delta, Failed, Finished


async def main(redis_url: str) -> None:
    async with FleetClient.connect(redis_url) as fleet:
        command = await fleet.command(
            "demo",
            [{"role": "user", "content": "Spell the word frog."}],
            sampling=Sampling(),
            temperature=0.0,
            seed=7,
            limits=Limits(total_ms=60_000),
            max_tokens=32,
            decoding=None,
            preview=None,
            lane="bulk",
        )
        submitted = await fleet.submit(command)
    # Another process, another day (as long as the retention lasts): the id is all that is needed.
    async with FleetClient.connect(redis_url) as fleet:
        async for event in fleet.stream(submitted.id):
            match event:
                case Delta():
                    print(event.text, end="", flush=True)
                case Finished():
                    print(f"\n{event.detail}, {event.usage.nfe} forwards")
                case Failed():
                    sys.exit(event.message)
                case _:
                    pass


asyncio.run(main(sys.argv[1]))
