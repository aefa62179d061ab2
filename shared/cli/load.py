"""Load for `diffleet bench`: requests of chosen lengths, sent by a chosen arrival process, and what became of each."""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import orjson

from shared.cli.exits import Exit
from shared.cli.http_fleet import connected, refusal
from shared.cli.sse import sse_data

_TEXT = "Once upon a time there was a rabbit who counted 12 carrots, 30 stones and 7 clouds before it went to sleep. "
_TIMEOUT = httpx.Timeout(connect=10.0, read=300.0, write=30.0, pool=300.0)


@dataclass(frozen=True, slots=True)
class Range:
    """Whole numbers from `low` to `high`, both included, drawn uniformly."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> "Range":
        """Read `64` or `16-64`; raises ValueError."""
        low, dash, high = text.partition("-")
        drawn = cls(int(low), int(high) if dash else int(low))
        if not 1 <= drawn.low <= drawn.high:
            raise ValueError(f"{text!r} is not a range of numbers from 1")
        return drawn

    def draw(self, dice: random.Random) -> int:
        return dice.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Load:
    """One point of a sweep. With `rate` None, `concurrency` callers ask one request after the other; else requests
    arrive by themselves, `rate` a second, after exponential pauses, and at most `concurrency` are open."""

    requests: int
    concurrency: int
    rate: float | None
    prompt_tokens: Range
    output_tokens: Range
    seed: int = 0
    threshold: float | None = None


@dataclass(frozen=True, slots=True)
class Shot:
    """One request. Times are seconds from its submit; those of blocks are when their text came."""

    prompt_tokens: int
    tokens: int = 0
    nfe: int = 0
    blocks_s: tuple[float, ...] = ()
    total_s: float = 0.0
    fault: str | None = None

    @property
    def first_s(self) -> float | None:
        return self.blocks_s[0] if self.blocks_s else None

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Time from block to block."""
        return tuple(later - earlier for earlier, later in zip(self.blocks_s, self.blocks_s[1:], strict=False))


@dataclass(frozen=True, slots=True)
class Round:
    """One point of the sweep, measured."""

    load: Load
    shots: tuple[Shot, ...]
    seconds: float


async def fire(url: str, model: str | None, load: Load, progress: Callable[[], None] = lambda: None) -> Round:
    """Send the load and wait for every answer; `progress` is called at each one's end. Raises `Stop`."""
    dice = random.Random(load.seed)
    async with connected(url) as client:
        client.timeout = _TIMEOUT
        ids = await _token_ids(client, model)
        bodies = [_body(load, model, ids, dice) for _ in range(load.requests)]
        pauses = [0.0 if load.rate is None else dice.expovariate(load.rate) for _ in bodies]
        limit = asyncio.Semaphore(load.concurrency)
        shots: list[Shot] = []

        async def shoot(body: dict[str, object]) -> None:
            async with limit:
                shots.append(await _ask(client, body))
            progress()

        began = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for body, pause in zip(bodies, pauses, strict=True):
                await asyncio.sleep(pause)
                tasks.create_task(shoot(body))
        return Round(load, tuple(shots), time.perf_counter() - began)


async def _token_ids(client: httpx.AsyncClient, model: str | None) -> Sequence[int]:
    body = {"prompt": _TEXT, "add_special_tokens": False} | ({} if model is None else {"model": model})
    response = await client.post("/tokenize", json=body)
    if response.status_code != 200:
        raise refusal(response.status_code, response.content)
    return orjson.loads(response.content)["tokens"]


def _body(load: Load, model: str | None, ids: Sequence[int], dice: random.Random) -> dict[str, object]:
    length, start = load.prompt_tokens.draw(dice), dice.randrange(len(ids))
    # Each prompt begins elsewhere in the text, so that none is the beginning of another.
    body: dict[str, object] = {
        "prompt": [ids[(start + position) % len(ids)] for position in range(length)],
        "max_tokens": load.output_tokens.draw(dice),
        "ignore_eos": True,
        "seed": dice.randrange(2**31),
        "stream": True,
    }
    if model is not None:
        body["model"] = model
    if load.threshold is not None:
        body["diffusion"] = {"threshold": load.threshold}
    return body


async def _ask(client: httpx.AsyncClient, body: dict[str, Any]) -> Shot:
    prompt: Sequence[int] = body["prompt"]
    blocks: list[float] = []
    began = time.perf_counter()
    try:
        async with client.stream("POST", "/generate", json=body) as response:
            if response.status_code != 200:
                stop = refusal(response.status_code, await response.aread())
                if stop.exit_code is Exit.REFUSED:
                    # The load itself is wrong: every other request would be refused as well.
                    raise stop
                return Shot(len(prompt), fault=f"HTTP {response.status_code}", total_s=time.perf_counter() - began)
            async for event in _events(response):
                now = time.perf_counter() - began
                match event.get("event"):
                    case "append":
                        blocks.append(now)
                    case "final":
                        tokens: int = event["usage"]["completion_tokens"]
                        nfe: int = event["nfe"]
                        return Shot(len(prompt), tokens, nfe, tuple(blocks), now)
                    case "error":
                        return Shot(len(prompt), blocks_s=tuple(blocks), total_s=now, fault="error in the stream")
                    case _:
                        pass
    except httpx.ConnectError:
        raise
    except httpx.HTTPError as error:
        return Shot(len(prompt), total_s=time.perf_counter() - began, fault=type(error).__name__)
    return Shot(len(prompt), total_s=time.perf_counter() - began, fault="the stream was cut")


async def _events(response: httpx.Response) -> AsyncGenerator[dict[str, Any]]:
    async for data in sse_data(response.aiter_bytes()):
        if data != b"[DONE]":
            yield orjson.loads(data)
