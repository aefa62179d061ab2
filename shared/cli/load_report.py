"""What `diffleet bench` has measured: statistics of a round, a table, JSON, a picture."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson
from rich.table import Table

from shared.cli.exits import Exit, Stop
from shared.cli.load import Round, Shot

PLOT_HINT = "--plot needs matplotlib: pip install 'diffleet[plot]'"


@dataclass(frozen=True, slots=True)
class Objective:
    """What a request must keep to count as good; None: whatever. Seconds."""

    first_s: float | None = None
    block_s: float | None = None
    total_s: float | None = None
    token_s: float | None = None

    @property
    def empty(self) -> bool:
        return self == Objective()

    def kept_by(self, shot: Shot) -> bool:
        """True if the request was answered and its first block, its mean time per block, its time per token behind the
        first block and its whole time are in."""
        if shot.fault is not None or shot.first_s is None:
            return False
        mean_gap = sum(shot.gaps_s) / len(shot.gaps_s) if shot.gaps_s else 0.0
        pairs = (
            (shot.first_s, self.first_s),
            (mean_gap, self.block_s),
            (shot.total_s, self.total_s),
            (shot.token_s or 0.0, self.token_s),
        )
        return all(limit is None or value <= limit for value, limit in pairs)


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds; all 0 if there was nothing to measure."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        ordered = sorted(values)
        if not ordered:
            return cls(0.0, 0.0, 0.0, 0.0)
        p50, p90, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.99))
        return cls(sum(ordered) / len(ordered), p50, p90, p99)


@dataclass(frozen=True, slots=True)
class Summary:
    """One round. Rates are a second of its duration."""

    server: str
    concurrency: int
    rate: float | None
    planned: int
    """Requests of the load; more than `requests` if the round was cut short."""
    requests: int
    failed: int
    seconds: float
    first_s: Spread
    block_s: Spread
    token_s: Spread
    """Of each request's mean time for a token behind its first block."""
    total_s: Spread
    tokens: int
    tokens_per_s: float
    tokens_per_forward: float
    requests_per_s: float
    good_share: float
    """Of all requests, those that kept the objective."""
    goodput: float
    """Such requests a second."""
    faults: Mapping[str, int]


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which a share of sorted values lies, with a line from each to the next, as numpy does."""
    rank = share * (len(ordered) - 1)
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def summarize(server: str, round_: Round, objective: Objective) -> Summary:
    answered = [shot for shot in round_.shots if shot.fault is None]
    tokens, nfe = sum(shot.tokens for shot in answered), sum(shot.nfe for shot in answered)
    seconds = round_.seconds
    good = sum(objective.kept_by(shot) for shot in round_.shots)
    faults: dict[str, int] = {}
    for shot in round_.shots:
        if shot.fault is not None:
            faults[shot.fault] = faults.get(shot.fault, 0) + 1
    return Summary(
        server=server,
        concurrency=round_.load.concurrency,
        rate=round_.load.rate,
        planned=round_.load.requests,
        requests=len(round_.shots),
        failed=len(round_.shots) - len(answered),
        seconds=seconds,
        first_s=Spread.of(shot.first_s for shot in answered if shot.first_s is not None),
        block_s=Spread.of(gap for shot in answered for gap in shot.gaps_s),
        token_s=Spread.of(shot.token_s for shot in answered if shot.token_s is not None),
        total_s=Spread.of(shot.total_s for shot in answered),
        tokens=tokens,
        tokens_per_s=_rate(tokens, seconds),
        tokens_per_forward=tokens / nfe if nfe else 0.0,
        requests_per_s=_rate(len(answered), seconds),
        good_share=good / len(round_.shots) if round_.shots else 0.0,
        goodput=_rate(good, seconds),
        faults=faults,
    )


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds else 0.0


def table_of(summaries: Sequence[Summary], objective: Objective) -> Table:
    """Return one row for each round; with several servers, their rows for one load stand together."""
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    servers = len({summary.server for summary in summaries}) > 1
    if servers:
        table.add_column("\nserver", no_wrap=True)
    columns = [
        "\nload",
        "\nfail",
        "first\np50",
        "block\np99",
        "each\np50",
        "block\np99",
        "token\np50",
        "whole\np50",
        "\np99",
    ]
    columns += ["requests\n/s", "tokens\n/s", "tokens/\nforward"] + ([] if objective.empty else ["\ngood", "good\n/s"])
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for summary in sorted(summaries, key=lambda one: (one.concurrency, one.rate or 0.0)):
        load = f"x{summary.concurrency}" if summary.rate is None else f"{summary.rate:g}/s"
        if summary.requests < summary.planned:
            load += f" ({summary.requests} of {summary.planned})"
        row = [summary.server] if servers else []
        row += [load, str(summary.failed)]
        for spread in (summary.first_s, summary.block_s):
            row += [_time(spread.p50), _time(spread.p99)]
        row += [f"{1000 * summary.token_s.p50:.1f}ms", _time(summary.total_s.p50), _time(summary.total_s.p99)]
        row += [f"{summary.requests_per_s:.2f}", f"{summary.tokens_per_s:.1f}", f"{summary.tokens_per_forward:.2f}"]
        if not objective.empty:
            row += [f"{100 * summary.good_share:.0f} %", f"{summary.goodput:.2f}"]
        table.add_row(*row)
    return table


def write_json(
    path: Path,
    summaries: Sequence[Summary],
    rounds: Sequence[Round],
    objective: Objective,
    facts: Mapping[str, object],
) -> None:
    """Write everything that was measured, each request by itself as well; raises `Stop` if it cannot."""
    told = [
        {**asdict(summary), "shots": [asdict(shot) for shot in round_.shots]}
        for summary, round_ in zip(summaries, rounds, strict=True)
    ]
    content = {**facts, "objective": asdict(objective), "rounds": told}
    try:
        path.write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    except OSError as error:
        raise Stop(Exit.FAILED, f"cannot write {path}: {error.strerror}") from error


def plot(path: Path, summaries: Sequence[Summary]) -> None:
    """Write a PNG: throughput and the time to the first block over the load; raises `Stop` if it cannot."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Stop(Exit.USAGE, PLOT_HINT) from error
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2)
    closed = all(summary.rate is None for summary in summaries)
    for server in dict.fromkeys(summary.server for summary in summaries):
        own = [summary for summary in summaries if summary.server == server]
        loads = [float(summary.concurrency) if closed else summary.rate or 0.0 for summary in own]
        panels[0].plot(loads, [summary.tokens_per_s for summary in own], marker="o", label=server)
        panels[1].plot(loads, [summary.first_s.p50 for summary in own], marker="o", label=f"{server} p50")
        panels[1].plot(loads, [summary.first_s.p99 for summary in own], marker="o", ls="--", label=f"{server} p99")
    for panel, title in zip(panels, ("tokens / s", "time to the first block, s"), strict=True):
        panel.set_title(title)
        panel.set_xlabel("requests at a time" if closed else "requests arriving / s")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    try:
        figure.savefig(path, dpi=150)  # pyright: ignore[reportUnknownMemberType]
    except (OSError, ValueError) as error:
        raise Stop(Exit.FAILED, f"cannot write {path}: {error}") from error


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.0f}ms" if seconds < 1 else f"{seconds:.2f}s"
