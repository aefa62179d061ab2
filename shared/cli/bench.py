"""`diffleet bench`: one load after the other, against one server or two."""

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from shared.cli.exits import Exit, Stop
from shared.cli.load import Load, fire
from shared.cli.load_report import PLOT_HINT, Objective, Summary, plot, summarize, table_of, write_json


@dataclass(frozen=True, slots=True)
class Outputs:
    json: Path | None = None
    plot: Path | None = None


async def bench(
    servers: Sequence[str], model: str | None, loads: Sequence[Load], objective: Objective, outputs: Outputs
) -> None:
    """Warm every server up, measure every load on each, print the table; raises `Stop`.

    Servers take turns at each load, so that what else the machine does meets them alike.
    """
    if outputs.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise Stop(Exit.USAGE, PLOT_HINT)
    summaries: list[Summary] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(file=sys.stderr, highlight=False)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        for server in servers:
            await fire(server, model, replace(loads[0], requests=min(2, loads[0].requests), rate=None))
        for load in loads:
            for server in servers:
                name = f"x{load.concurrency}" if load.rate is None else f"{load.rate:g}/s"
                task = progress.add_task(f"{server} {name}", total=load.requests)
                measured = await fire(server, model, load, lambda task=task: progress.advance(task))
                summaries.append(summarize(server, measured, objective))
                progress.remove_task(task)
    # A server's address may make the table wider than 80 columns: on a pipe nothing is cut.
    Console(highlight=False, width=None if sys.stdout.isatty() else 160).print(table_of(summaries, objective))
    for summary in summaries:
        for fault, count in summary.faults.items():
            print(f"{summary.server} x{summary.concurrency}: {count} times {fault}", file=sys.stderr)
    if outputs.json is not None:
        facts = {"servers": list(servers), "model": model, "loads": [asdict(load) for load in loads]}
        write_json(outputs.json, summaries, objective, facts)
    if outputs.plot is not None:
        plot(outputs.plot, summaries)
    if all(summary.failed == summary.requests for summary in summaries):
        raise Stop(Exit.FAILED, "no request was answered")
