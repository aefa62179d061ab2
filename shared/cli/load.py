"""Load for `diffleet bench`: requests of chosen lengths, sent by a chosen arrival process, and what became of each."""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import httpx
import orjson

from shared.cli.exits import Exit
from shared.cli.http_fleet import connected, refusal
from shared.cli.numbers import whole
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
        drawn = cls(whole(low), whole(high if dash else low))
        if not 1 <= drawn.low <= drawn.high:
            raise ValueError(f"{text!r} is not a range of numbers from 1")
        return drawn

    def draw(self, dice: random.Random) -> int:
        return dice.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Load:
    """One point of a sweep. With `rate` None, `concurrency` callers ask one request after the other; else requests
    arrive by themselves, `rate` a second, and at most `concurrency` are open."""

    requests: int
    concurrency: int
    rate: float | None
    prompt_tokens: Range
    output_tokens: Range
    seed: int = 0
    threshold: float | None = None
    burstiness: float = 1.0
    """Shape of the gamma distribution of pauses: 1 makes them exponential (Poisson arrivals), less comes in bursts,
    more is more even."""
    prompts: tuple[str, ...] = ()
    """Asked in turn, instead of made-up ones of `prompt_tokens`."""


@dataclass(frozen=True, slots=True)
class Shot:
    """One request. Times are seconds from its submit; those of blocks are when their text came."""

    prompt_tokens: int
    tokens: int = 0
    nfe: int = 0
    blocks_s: tuple[float, ...] = ()
    block_tokens: tuple[int, ...] = ()
    """Tokens of each block."""
    total_s: float = 0.0
    """To the last text, or to the end where there was none."""
    started_s: float = 0.0
    """Of its submit, from the beginning of the round."""
    fault: str | None = None

    @property
    def first_s(self) -> float | None:
        return self.blocks_s[0] if self.blocks_s else None

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Time from block to block."""
        return tuple(later - earlier for earlier, later in zip(self.blocks_s, self.blocks_s[1:], strict=False))

    @property
    def token_s(self) -> float | None:
        """Time for each token behind the first block; None if that was all."""
        if self.first_s is None or not self.block_tokens or self.tokens <= self.block_tokens[0]:
            return None
        return (self.total_s - self.first_s) / (self.tokens - self.block_tokens[0])


@dataclass(frozen=True, slots=True)
class Round:
    """One point of the sweep, measured; the shots are fewer than the load's requests if it was cut short."""

    load: Load
    shots: tuple[Shot, ...]

    @property
    def seconds(self) -> float:
        """From the first submit to the last text."""
        if not self.shots:
            return 0.0
        return max(shot.started_s + shot.total_s for shot in self.shots) - min(shot.started_s for shot in self.shots)


def read_prompts(path: Path) -> tuple[str, ...]:
    """Return the prompts of JSON lines, each a text or an object with `text` or `prompt`; raises ValueError."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    prompts = tuple(_prompt(line, number) for number, line in enumerate(lines, start=1) if line.strip())
    if not prompts:
        raise ValueError(f"{path} has no prompt")
    return prompts


def _prompt(line: bytes, number: int) -> str:
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"line {number} is not JSON: {error}") from error
    if isinstance(value, dict):
        entry = cast(dict[str, object], value)
        value = entry.get("text", entry.get("prompt"))
    if not isinstance(value, str) or not value:
        raise ValueError(f"line {number} has no `text` or `prompt`")
    return value


async def fire(url: str, model: str | None, load: Load, told: Callable[[Shot], None]) -> None:
    """Send the load and wait for every answer; `told` gets each one as it ends. Raises `Stop`."""
    dice = random.Random(load.seed)
    async with connected(url) as client:
        client.timeout = _TIMEOUT
        ids: Sequence[int] = () if load.prompts else await _token_ids(client, model)
        bodies = [_body(load, model, _chosen(load, ids, dice, number), dice) for number in range(load.requests)]
        limit = asyncio.Semaphore(load.concurrency)
        began = time.perf_counter()

        async def shoot(body: dict[str, object]) -> None:
            async with limit:
                started = time.perf_counter() - began
                shot = await _ask(client, body)
            told(replace(shot, started_s=started))

        async with asyncio.TaskGroup() as tasks:
            for body, pause in zip(bodies, pauses(load, dice), strict=True):
                await asyncio.sleep(pause)
                tasks.create_task(shoot(body))


def pauses(load: Load, dice: random.Random) -> list[float]:
    """Return how long to wait before each request, seconds."""
    if load.rate is None:
        return [0.0] * load.requests
    scale = 1 / (load.rate * load.burstiness)
    return [dice.gammavariate(load.burstiness, scale) for _ in range(load.requests)]


async def _token_ids(client: httpx.AsyncClient, model: str | None) -> Sequence[int]:
    body = {"prompt": _TEXT, "add_special_tokens": False} | ({} if model is None else {"model": model})
    response = await client.post("/tokenize", json=body)
    if response.status_code != 200:
        raise refusal(response.status_code, response.content)
    return orjson.loads(response.content)["tokens"]


def _chosen(load: Load, ids: Sequence[int], dice: random.Random, number: int) -> str | list[int]:
    if load.prompts:
        return load.prompts[number % len(load.prompts)]
    length, start = load.prompt_tokens.draw(dice), dice.randrange(len(ids))
    # Each prompt begins elsewhere in the text, so that none is the beginning of another.
    return [ids[(start + position) % len(ids)] for position in range(length)]


def _body(load: Load, model: str | None, prompt: str | list[int], dice: random.Random) -> dict[str, object]:
    body: dict[str, object] = {
        "prompt": prompt,
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
    prompt_tokens = 0 if isinstance(body["prompt"], str) else len(body["prompt"])
    blocks: list[float] = []
    sizes: list[int] = []
    began = time.perf_counter()
    try:
        async with client.stream("POST", "/generate", json=body) as response:
            if response.status_code != 200:
                stop = refusal(response.status_code, await response.aread())
                if stop.exit_code is Exit.REFUSED:
                    # The load itself is wrong: every other request would be refused as well.
                    raise stop
                return Shot(prompt_tokens, fault=f"HTTP {response.status_code}", total_s=time.perf_counter() - began)
            async for event in _events(response):
                now = time.perf_counter() - began
                match event.get("event"):
                    case "append":
                        blocks.append(now)
                        sizes.append(len(event["token_ids"]))
                    case "final":
                        usage: dict[str, int] = event["usage"]
                        counts = (usage["prompt_tokens"], usage["completion_tokens"], event["nfe"])
                        return Shot(*counts, tuple(blocks), tuple(sizes), blocks[-1] if blocks else now)
                    case "error":
                        return Shot(prompt_tokens, blocks_s=tuple(blocks), total_s=now, fault="error in the stream")
                    case _:
                        pass
    except httpx.ConnectError:
        raise
    except httpx.HTTPError as error:
        return Shot(prompt_tokens, total_s=time.perf_counter() - began, fault=type(error).__name__)
    return Shot(prompt_tokens, total_s=time.perf_counter() - began, fault="the stream was cut")


async def _events(response: httpx.Response) -> AsyncGenerator[dict[str, Any]]:
    async for data in sse_data(response.aiter_bytes()):
        if data != b"[DONE]":
            yield orjson.loads(data)
