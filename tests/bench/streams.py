"""Memory of an api process that holds 1,000 open streams, beside the same process with none."""

import argparse
import asyncio
import contextlib
import os
import resource
from pathlib import Path

from tests.bench.load import engine, fleet, post, prompts, show

STREAMS = 1000


def resident_mb(pid: int) -> float:
    """Return the resident set of a process in MB (Linux)."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


async def main() -> None:
    model = os.environ.get("DIFFLEET_MODEL", "demo")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4 * STREAMS)), hard))
    # The api's queue limit is for honest overload; this benchmark wants the streams open.
    os.environ["DIFFLEET_QUEUE_LIMIT"] = str(2 * STREAMS)
    loop = engine(model)
    prompt = prompts(loop, 1)[0]
    async with fleet(model) as served:
        url, pid = served.url, served.api_pid
        before = resident_mb(pid)
        body = {"prompt": prompt, "max_tokens": 512, "ignore_eos": True, "temperature": 0, "stream": True}
        async with contextlib.AsyncExitStack() as stack:

            async def open_one() -> None:
                await stack.enter_async_context(post(url, "/generate", body))

            for start in range(0, STREAMS, 100):
                await asyncio.gather(*(open_one() for _ in range(start, min(start + 100, STREAMS))))
            during = resident_mb(pid)
    columns = ["streams", "before", "during", "KB a stream"]
    show(
        "resident memory of the api process, MB",
        columns,
        [[STREAMS, before, during, 1000 * (during - before) / STREAMS]],
    )


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    asyncio.run(main())
