"""`diffleet bench`: one load after the other, against one server or two."""

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from shared.cli.exits import Exit, Stop
from shared.cli.load import Load, Round, Shot, fire
from shared.cli.load_report import PLOT_HINT, Objective, plot, summarize, table_of, write_json


@dataclass(frozen=True, slots=True)
class Outputs:
    json: Path | None = None
    plot: Path | None = None


@dataclass(frozen=True, slots=True)
class _Measured:
    server: str
    round: Round


async def bench(
    servers: Sequence[str], model: str | None, loads: Sequence[Load], objective: Objective, outputs: Outputs
) -> None:
    """Warm every server up, measure every load on each, print the table; raises `Stop`, also if a request failed.

    Servers take turns at each load, so that what else the machine does meets them alike. What ends it early, as Ctrl-C
    does, ends it only after the report of what was measured by then.
    """
    if outputs.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise Stop(Exit.USAGE, PLOT_HINT)
    for option, path in (("--json", outputs.json), ("--plot", outputs.plot)):
        if path is not None:
            _check_writable(option, path)
    measured: list[_Measured] = []
    complete = False
    try:
        await _measure(servers, model, loads, measured)
        complete = True
    finally:
        if measured:
            facts = {
                "servers": list(servers),
                "model": model,
                "complete": complete,
                "loads": [{**asdict(load), "prompts": len(load.prompts)} for load in loads],
            }
            _report(measured, objective, outputs, facts)
    faults = [shot.fault for one in measured for shot in one.round.shots]
    failed = sum(fault is not None for fault in faults)
    if failed == len(faults):
        raise Stop(Exit.FAILED, "no request was answered")
    if failed:
        raise Stop(Exit.FAILED, f"{failed} of {len(faults)} requests failed")


def _check_writable(option: str, path: Path) -> None:
    """Raises `Stop` if no file can be written there: better before the measurement than behind it."""
    is_new = not os.path.lexists(path)
    try:
        path.open("ab").close()
    except OSError as error:
        raise Stop(Exit.USAGE, f"{option}: {path}: {error.strerror}") from error
    if is_new:
        path.unlink()


async def _measure(servers: Sequence[str], model: str | None, loads: Sequence[Load], measured: list[_Measured]) -> None:
    """Append each round to `measured`, also one that is cut short with at least one request at its end."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        for server in servers:
            await fire(server, model, replace(loads[0], requests=min(2, loads[0].requests), rate=None), lambda _: None)
        for load in loads:
            for server in servers:
                name = f"{server} x{load.concurrency}" if load.rate is None else f"{server} {load.rate:g}/s"
                task = progress.add_task(name, total=load.requests)
                shots: list[Shot] = []

                def told(shot: Shot, shots: list[Shot] = shots, task: TaskID = task) -> None:
                    shots.append(shot)
                    progress.advance(task)

                try:
                    await fire(server, model, load, told)
                finally:
                    round_ = Round(load, tuple(shots))
                    if shots:
                        measured.append(_Measured(server, round_))
                    progress.remove_task(task)
                    progress.console.print(f"{name}: {len(shots)} of {load.requests} requests, {round_.seconds:.1f} s")


def _report(measured: Sequence[_Measured], objective: Objective, outputs: Outputs, facts: Mapping[str, object]) -> None:
    summaries = [summarize(one.server, one.round, objective) for one in measured]
    # A server's address may make the table wider than 80 columns: on a pipe nothing is cut.
    Console(highlight=False, width=None if sys.stdout.isatty() else 200).print(table_of(summaries, objective))
    for summary in summaries:
        for fault, count in summary.faults.items():
            print(f"{summary.server} x{summary.concurrency}: {count} times {fault}", file=sys.stderr)
    if outputs.json is not None:
        write_json(outputs.json, summaries, [one.round for one in measured], objective, facts)
    if outputs.plot is not None:
        plot(outputs.plot, summaries)
