"""`diffleet requests`, `abort` and `dead-letters`: what is open, what it costs, and what was given up."""

import sys
import time
from collections.abc import Awaitable, Callable, Sequence

from rich.console import Console
from rich.table import Table

from shared.cli.canvas import printable
from shared.cli.census import RequestView, open_requests, request
from shared.cli.exits import Exit, Stop
from shared.cli.operations import operating
from shared.client import FleetClient, UnknownRequest
from shared.events import Failed, Finished


async def print_open(redis_url: str, model: str | None, limit: int) -> None:
    """Print the oldest open requests of a model, or of all; raises `Stop`."""
    async with operating(redis_url) as (fleet, link):
        views: list[RequestView] = []
        for name in await fleet.models() if model is None else [model]:
            views += await open_requests(fleet, link, name, limit)
    if not views:
        print("no open request")
        return
    table = table_of("request", "state", "lane", "worker", right=("age", "tries", "prompt", "tokens", "forwards"))
    for view in sorted(views, key=lambda view: -view.age_s)[:limit]:
        counts = (view.attempts, view.prompt_tokens, view.tokens, view.nfe)
        texts = (view.id, view.state, view.lane, view.worker or "-", f"{view.age_s:.1f} s", *map(str, counts))
        table.add_row(*texts)
    print_table(table)


async def print_one(redis_url: str, request_id: str, *, text: bool) -> None:
    """Print one request, with `text` only what it has produced; raises `Stop`."""
    async with operating(redis_url) as (fleet, link):
        result = await fleet.result(request_id)
        if text:
            print(printable(result.text))
            return
        view = await request(link, request_id, time.time_ns() // 1_000_000)
        if view is None:
            raise UnknownRequest(request_id)
    match result.end:
        case Finished():
            end = f"{result.end.reason} ({result.end.detail})"
        case Failed():
            end = f"{result.end.code}: {result.end.message}"
        case None:
            end = "-"
    facts = {
        "request": view.id,
        "state": view.state,
        "end": end,
        "lane": view.lane,
        "worker": view.worker or "-",
        "age" if result.end is None else "took": f"{view.age_s:.1f} s",
        "tries": view.attempts,
        "prompt tokens": view.prompt_tokens,
        "tokens": len(result.token_ids),
        "forwards": view.nfe,
        "blocks": view.blocks,
    }
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in facts.items():
        table.add_row(name, str(value))
    print_table(table)


async def abort_all(redis_url: str, request_ids: Sequence[str]) -> None:
    """Abort each, and print the state that it is in; raises `Stop` if one is not known."""
    unknown: list[str] = []
    async with operating(redis_url) as (fleet, _):
        for request_id in request_ids:
            try:
                await fleet.result(request_id)
            except UnknownRequest:
                unknown.append(request_id)
                continue
            state = await fleet.abort(request_id, "operator")
            told = {"aborted": "aborted", "running": "aborting: its worker ends it within a few steps"}
            print(f"{request_id}  {told.get(state, f'had already ended: {state}')}")
    if unknown:
        raise Stop(Exit.REFUSED, f"not known, or no longer: {', '.join(name[:120] for name in unknown)}")


async def print_dead_letters(redis_url: str, model: str | None, limit: int) -> None:
    """Print the requests that were given up because they kill their workers; raises `Stop`."""
    async with operating(redis_url) as (fleet, _):
        names = await fleet.models() if model is None else [model]
        letters = [letter for name in names for letter in await fleet.dead_letters(name, limit)]
    if not letters:
        print("no dead letter")
        return
    table = table_of("request", "died (UTC)", "why", "lost workers", right=("tries",))
    for letter in sorted(letters, key=lambda letter: -letter.died_ms)[:limit]:
        died = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(letter.died_ms / 1000))
        table.add_row(letter.id, died, letter.why, " ".join(letter.lost_workers) or "-", str(letter.attempts))
    print_table(table)


async def replay_all(redis_url: str, request_ids: Sequence[str]) -> None:
    """Submit dead requests again, under new ids, which are printed; raises `Stop` if one is none."""
    async with operating(redis_url) as (fleet, _):
        await _each(fleet, request_ids, _replay)


async def discard_all(redis_url: str, request_ids: Sequence[str]) -> None:
    """Take dead letters off the list; raises `Stop` if one never was on it."""
    async with operating(redis_url) as (fleet, _):
        await _each(fleet, request_ids, _discard)


async def _each(
    fleet: FleetClient, request_ids: Sequence[str], act: Callable[[FleetClient, str], Awaitable[str]]
) -> None:
    """Do something with each dead letter and print what came of it, also behind one that is refused."""
    refused: list[str] = []
    for request_id in request_ids:
        try:
            print(f"{request_id}  {await act(fleet, request_id)}")
        except UnknownRequest:
            refused.append(await _refusal(fleet, request_id))
    if refused:
        raise Stop(Exit.REFUSED, "; ".join(refused))


async def _replay(fleet: FleetClient, request_id: str) -> str:
    submitted = await fleet.replay(request_id)
    return f"replayed already, as {submitted.id}" if submitted.duplicate else f"again as {submitted.id}"


async def _discard(fleet: FleetClient, request_id: str) -> str:
    if await fleet.discard(request_id):
        return "discarded"
    fate = await fleet.dead_fate(request_id)
    if fate.state != "dead":
        raise UnknownRequest(request_id)
    return "off the list already" + ("" if fate.replayed_as is None else f": replayed as {fate.replayed_as}")


async def _refusal(fleet: FleetClient, request_id: str) -> str:
    try:
        fate = await fleet.dead_fate(request_id)
    except UnknownRequest as error:
        return str(error)
    return f"request {request_id!r} is no dead letter: it is {fate.state}"


def table_of(*left: str, right: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in left:
        table.add_column(column, no_wrap=True)
    for column in right:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def print_table(table: Table) -> None:
    # On a pipe nothing is cut: an id must be whole to be used.
    Console(highlight=False, width=None if sys.stdout.isatty() else 240).print(table)
