"""`diffleet top`: a fleet, live."""

import asyncio
import contextlib
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field

import httpx
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shared.cli.canvas import terminal_size
from shared.cli.census import Census, ModelView, take_census
from shared.cli.exposition import sums
from shared.cli.http_fleet import server_of
from shared.cli.operations import operating
from shared.roster import WorkerInfo

FROM_API = ("diffleet_completion_tokens_total", "diffleet_denoising_forwards_total")
_SCRAPE_TIMEOUT_S = 2.0
_LOOKS = 5
_NONE: Mapping[str, float] = {}


@dataclass(frozen=True, slots=True)
class Sample:
    """A census, and by model the sums of the metrics that answered."""

    at: float
    """Monotonic seconds."""
    census: Census
    metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])


async def samples(redis_url: str, interval_s: float, api: str | None, model: str | None) -> AsyncGenerator[Sample]:
    """Yield a sample every `interval_s`, until closed; raises `Stop`."""
    async with operating(redis_url) as (fleet, link), httpx.AsyncClient(timeout=_SCRAPE_TIMEOUT_S) as http:
        while True:
            began = time.monotonic()
            census = await take_census(fleet, link, model)
            text = await _scrape(http, api) if api else ""
            yield Sample(began, census, {view.name: sums(text, FROM_API, view.name) for view in census.models})
            await asyncio.sleep(max(0.0, interval_s - (time.monotonic() - began)))


async def watch(samples: AsyncGenerator[Sample], *, once: bool) -> None:
    """Draw each sample in place on stdout; plain, and one after the other, where that is no terminal.

    With `once` the second sample alone is drawn: the first has no rates.
    """
    console = Console(highlight=False)
    draws = console.is_terminal and not once
    # Workers beat once a second or so: rates over less than a few looks would flicker.
    seen: deque[Sample] = deque(maxlen=_LOOKS)
    async with contextlib.aclosing(samples):
        with contextlib.ExitStack() as stack:
            live = stack.enter_context(Live(console=console, auto_refresh=False, screen=True)) if draws else None
            async for sample in samples:
                picture = draw(sample, seen[0] if seen else None)
                if live is not None:
                    console.size = terminal_size(sys.stdout)  # pyright: ignore[reportAttributeAccessIssue]
                    live.update(Group(picture, Text("\nCtrl-C ends", "dim")), refresh=True)
                elif not once or seen:
                    console.print(picture)
                if once and seen:
                    return
                seen.append(sample)


def draw(sample: Sample, before: Sample | None) -> Group:
    """Return the picture of a sample; rates are those since an earlier one."""
    if not sample.census.models:
        return Group(Text("no worker has announced a model at this Redis yet"))
    parts: list[Table | Text] = []
    for view in sample.census.models:
        parts += [_headline(view, sample, before), _lanes(view), _workers(view, sample, before)]
        if view.strangers:
            parts.append(Text(f"other cards than the one that fronts follow: {', '.join(view.strangers)}", "yellow"))
        parts.append(Text(""))
    return Group(*parts[:-1])


def _headline(view: ModelView, sample: Sample, before: Sample | None) -> Text:
    metrics = sample.metrics.get(view.name, _NONE)
    earlier: Mapping[str, float] = before.metrics.get(view.name, _NONE) if before is not None else _NONE
    seconds = 0.0 if before is None else sample.at - before.at
    text = Text(view.name, "bold")
    facts = [
        f"{len(view.workers)} worker{'' if len(view.workers) == 1 else 's'}",
        f"{view.running} running",
        f"{view.open_requests} open",
    ]
    if seconds:
        known = _workers_of(before)
        made = sum(worker.tokens - known[worker.id].tokens for worker in view.workers if worker.id in known)
        facts.append(f"{made / seconds:.1f} tokens/s")
    tokens, forwards = (_change(metrics, earlier, name) for name in FROM_API)
    if tokens and forwards:
        facts.append(f"{tokens / forwards:.2f} tokens/forward")
    reclaims = sum(worker.reclaims for worker in view.workers)
    facts.append(f"{reclaims} reclaim{'' if reclaims == 1 else 's'}")
    if view.dead_letters:
        facts.append(f"{view.dead_letters} dead letters")
    return text.append("  " + " · ".join(facts), "not bold")


def _lanes(view: ModelView) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column, justify in (("lane", "left"), ("open", "right"), ("oldest", "right")):
        table.add_column(column, justify=justify)  # pyright: ignore[reportArgumentType]
    for lane in view.lanes:
        table.add_row(lane.lane, str(lane.length), "-" if lane.oldest_s is None else f"{lane.oldest_s:.1f} s")
    return table


def _workers(view: ModelView, sample: Sample, before: Sample | None) -> Table | Text:
    if not view.workers:
        # As a cell it would take the width of all columns, and be cut in a terminal of 80.
        return Text("no worker is alive: requests wait until one comes", "red")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("worker", "state", "device"):
        table.add_column(column, no_wrap=True)
    for column in ("running", "pages", "tok/s", "steps/s", "beat", "pid"):
        table.add_column(column, justify="right", no_wrap=True)
    known = _workers_of(before)
    seconds = 0.0 if before is None else sample.at - before.at
    for worker in view.workers:
        earlier = known.get(worker.id)
        beat_s = max(0, sample.census.now_ms - worker.beat_ms) / 1000
        style = {"ready": "", "loading": "yellow", "draining": "yellow"}[worker.state]
        table.add_row(
            worker.id,
            Text(worker.state, style),
            worker.device or "-",
            f"{worker.slots - worker.free}/{worker.slots}",
            f"{1 - worker.pages_free / worker.pages:.0%}" if worker.pages else "-",
            "-" if earlier is None else _rate((worker.tokens - earlier.tokens) / seconds),
            "-" if earlier is None else _rate((worker.steps - earlier.steps) / seconds),
            f"{beat_s:.1f} s",
            str(worker.pid or "-"),
        )
    return table


def _rate(rate: float) -> str:
    return f"{rate:.1f}" if rate < 100 else f"{rate:.0f}"


def _workers_of(sample: Sample | None) -> Mapping[str, WorkerInfo]:
    """Return the workers by their ids, which are never reused."""
    return {worker.id: worker for view in sample.census.models for worker in view.workers} if sample else {}


def _change(now: Mapping[str, float], before: Mapping[str, float], name: str) -> float | None:
    if name not in now or name not in before:
        return None
    # A process that has started anew counts from zero.
    return now[name] - before[name] if now[name] >= before[name] else now[name]


async def _scrape(http: httpx.AsyncClient, url: str) -> str:
    """Return the metrics of a process; nothing if it does not answer: the rest can still be shown."""
    with contextlib.suppress(httpx.HTTPError):
        response = await http.get(f"{server_of(url).removesuffix('/metrics')}/metrics")
        if response.status_code == 200:
            return response.text
    return ""
