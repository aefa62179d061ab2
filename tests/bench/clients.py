"""The load generators of others against a fleet: that they meet no error, and that `diffleet bench` counts as they do.

`python -m tests.bench.clients [aiperf guidellm locust]` runs each; `compare` runs aiperf and `diffleet bench` in turns,
with the same prompts and lengths. Without `--url` a fleet is started. Each tool has an environment of its own, so the
first run needs a package index.
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from tests.bench.load import show
from tests.cli.fleet_process import DIFFLEET, ROOT, Up, environment
from tests.conformance.side_environments import environment as tool_environment

REQUIREMENTS = {"aiperf": ["aiperf"], "guidellm": ["guidellm"], "locust": ["locust"]}
TOKENIZER = ROOT / "worker" / "demo" / "models" / "demo"
CONCURRENCY = (1, 4, 8)
TOKENS = 64
_TIMEOUT_S = 900.0
_COLUMNS = ["", "requests", "errors", "req/s", "tokens/s", "first p50", "first p90", "whole p50", "whole p90", "mean"]


@dataclass(frozen=True, slots=True)
class Figures:
    """Times are milliseconds; None where the tool does not say."""

    requests: int
    errors: int
    requests_per_s: float
    tokens_per_s: float | None
    first_p50: float
    first_p90: float
    total_p50: float
    total_p90: float
    total_mean: float

    def row(self, name: str) -> list[object]:
        values = [getattr(self, field) for field in _FIELDS]
        return [name, *("-" if value is None else value for value in values)]


_FIELDS = tuple(field.name for field in fields(Figures))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(REQUIREMENTS), help="aiperf, guidellm, locust, compare")
    parser.add_argument("--url", help="an api that serves `demo`; unset: a fleet is started")
    parser.add_argument("--fake", action="store_true", help="the started fleet makes its answers up, 50 ms a step")
    parser.add_argument("--rounds", type=int, default=3, help="of `compare`")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="df-") as name, served(arguments.url, arguments.fake) as url:
        folder = Path(name)
        runs = {"aiperf": by_aiperf, "guidellm": by_guidellm, "locust": by_locust}
        told = {name: runs[name](url, folder) for name in arguments.names if name != "compare"}
        if told:
            show("load generators, times in ms", _COLUMNS, [figures.row(name) for name, figures in told.items()])
        if "compare" in arguments.names:
            compare(url, folder, arguments.rounds)
    return 1 if any(figures.errors for figures in told.values()) else 0


@contextlib.contextmanager
def served(url: str | None, fake: bool) -> Generator[str]:
    if url is not None:
        yield url
        return
    folder = Path(tempfile.mkdtemp(prefix="df-"))
    up = Up(folder, Path("demo"), "--prompt", "", *(["--fake"] if fake else []), DIFFLEET_STEP_MS="50")
    try:
        yield up.wait_serving().url
        up.stop()
    finally:
        up.put_down()
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class _Server:
    """Counters of an api's metrics."""

    requests: float
    seconds: float
    tokens: float
    forwards: float

    @classmethod
    def of(cls, url: str) -> "_Server":
        text = httpx.get(f"{url}/metrics", trust_env=False, timeout=30.0).text

        def total(name: str) -> float:
            return sum(map(float, re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.M)))

        names = ("request_seconds_count", "request_seconds_sum", "completion_tokens_total", "denoising_forwards_total")
        return cls(*(total(f"diffleet_{name}") for name in names))


def by_aiperf(url: str, folder: Path) -> Figures:
    flags = ["--endpoint-type", "chat", "--isl", "64", "--osl", str(TOKENS), "--per-chunk-usage"]
    return aiperf(url, folder / "aiperf", 4, 40, flags)


def aiperf(url: str, out: Path, concurrency: int, requests: int, flags: Sequence[str]) -> Figures:
    command = ["profile", "-m", "demo", "--url", url, "--streaming", "--tokenizer", str(TOKENIZER), *flags]
    command += ["--concurrency", str(concurrency), "--request-count", str(requests), "--warmup-request-count", "2"]
    command += ["--extra-inputs", "ignore_eos:true", "--use-server-token-count", "--ui", "none", "--random-seed", "1"]
    run("aiperf", "aiperf", [*command, "--output-artifact-dir", str(out)])
    told: dict[str, Any] = json.loads((out / "profile_export_aiperf.json").read_text())
    first, total = told["time_to_first_token"], told["request_latency"]
    return Figures(
        round(told["request_count"]["avg"]),
        round((told.get("error_request_count") or {"avg": 0})["avg"]),
        told["request_throughput"]["avg"],
        told["output_token_throughput"]["avg"],
        first["p50"],
        first["p90"],
        total["p50"],
        total["p90"],
        total["avg"],
    )


def by_guidellm(url: str, folder: Path) -> Figures:
    out = folder / "guidellm.json"
    command = ["run", "--backend", f"kind=openai_http,target={url},model=demo,request_format=/v1/chat/completions"]
    command += ["--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=40"]
    command += ["--tokenizer", f"kind=hf_auto,model={TOKENIZER}", "--disable-progress"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens=64,output_tokens={TOKENS}"]
    run("guidellm", "guidellm", [*command, "--output", f"kind=json,path={out}"])
    metrics: dict[str, Any] = json.loads(out.read_text())["benchmarks"][0]["metrics"]
    totals, first, total = (
        metrics["request_totals"],
        metrics["time_to_first_token_ms"]["successful"],
        metrics["request_latency"]["successful"],
    )
    return Figures(
        totals["successful"],
        totals["errored"] + totals["incomplete"],
        metrics["requests_per_second"]["successful"]["mean"],
        metrics["output_tokens_per_second"]["successful"]["mean"],
        first["percentiles"]["p50"],
        first["percentiles"]["p90"],
        1000 * total["percentiles"]["p50"],
        1000 * total["percentiles"]["p90"],
        1000 * total["mean"],
    )


def by_locust(url: str, folder: Path) -> Figures:
    out = folder / "locust"
    command = ["-f", str(Path(__file__).with_name("locustfile.py")), "--headless", "-u", "4", "-r", "4", "-t", "20s"]
    run("locust", "locust", [*command, "-H", url, "--only-summary", "--csv", str(out)])
    lines = out.with_name("locust_stats.csv").read_text().splitlines()
    names = lines[0].split(",")
    rows = {row["Name"]: row for row in (dict(zip(names, line.split(","), strict=False)) for line in lines[1:])}
    sent, first, whole = rows["/v1/chat/completions"], rows["first block"], rows["whole answer"]
    return Figures(
        int(sent["Request Count"]),
        int(sent["Failure Count"]),
        float(sent["Requests/s"]),
        None,
        float(first["50%"]),
        float(first["90%"]),
        float(whole["50%"]),
        float(whole["90%"]),
        float(whole["Average Response Time"]),
    )


def compare(url: str, folder: Path, rounds: int) -> None:
    """Print both tools' medians over the rounds, and by how much ours differ.

    Another table has what does not depend on how busy the machine was meanwhile: each tool's mean time of a request
    over the server's own for the same requests, and the tokens per forward of the work that it gave the server.
    """
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": text}) + "\n" for text in _prompts()))
    rows: list[list[object]] = []
    checks: list[list[object]] = []
    for concurrency in CONCURRENCY:
        requests = max(16, 12 * concurrency)
        theirs: list[Figures] = []
        ours: list[Figures] = []
        seen: dict[str, list[tuple[float, float]]] = {"aiperf": [], "bench": []}
        for number in range(rounds):
            flags = ["--endpoint-type", "completions", "--input-file", str(prompts)]
            flags += ["--custom-dataset-type", "single_turn", "--extra-inputs", f"max_tokens:{TOKENS}"]
            flags += ["--extra-inputs", "temperature:0"]
            marks = [_Server.of(url)]
            theirs.append(aiperf(url, folder / f"aiperf-{concurrency}-{number}", concurrency, requests, flags))
            marks.append(_Server.of(url))
            ours.append(by_bench(url, folder / "bench.json", prompts, concurrency, requests))
            marks.append(_Server.of(url))
            for name, figures, (before, after) in zip(seen, (theirs[-1], ours[-1]), pairwise(marks), strict=True):
                mean_ms = 1000 * (after.seconds - before.seconds) / (after.requests - before.requests)
                tokens_per_forward = (after.tokens - before.tokens) / (after.forwards - before.forwards)
                seen[name].append((figures.total_mean / mean_ms, tokens_per_forward))
        first, second = _median(theirs), _median(ours)
        rows += [first.row(f"x{concurrency} aiperf"), second.row(f"x{concurrency} bench")]
        rows.append([f"x{concurrency} bench / aiperf", "", "", *_ratios(first, second)])
        for name, pairs in seen.items():
            over, work = (statistics.median(values) for values in zip(*pairs, strict=True))
            checks.append([f"x{concurrency} {name}", f"{over:.3f}", f"{work:.2f}"])
    show("beside the server's own figures", ["", "mean time / server's", "tokens/forward"], checks)
    show(f"median of {rounds} rounds in turns, times in ms", _COLUMNS, rows)


def by_bench(url: str, out: Path, prompts: Path, concurrency: int, requests: int) -> Figures:
    command = [*DIFFLEET, "bench", "--url", url, "-c", str(concurrency), "-r", str(requests), "--json", str(out)]
    command += ["--prompts", str(prompts), "--output-tokens", str(TOKENS)]
    subprocess.run(command, env=environment(), check=True, capture_output=True, timeout=_TIMEOUT_S)
    (told,) = json.loads(out.read_text())["rounds"]
    first, total = told["first_s"], told["total_s"]
    times = (1000 * value for value in (first["p50"], first["p90"], total["p50"], total["p90"], total["mean"]))
    return Figures(told["requests"], told["failed"], told["requests_per_s"], told["tokens_per_s"], *times)


def run(tool: str, program: str, arguments: Sequence[str]) -> None:
    """Run a program of a tool's environment; raises CalledProcessError, after its last lines."""
    bin_folder = tool_environment(tool, REQUIREMENTS[tool]).parent
    # Their own processes are looked for on the path.
    env = {**os.environ, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [str(bin_folder / program), *arguments], env=env, capture_output=True, text=True, timeout=_TIMEOUT_S
    )
    if done.returncode:
        print("\n".join((done.stdout + done.stderr).splitlines()[-20:]), file=sys.stderr)
    done.check_returncode()


def _median(all_figures: Sequence[Figures]) -> Figures:
    def middle(of: Callable[[Figures], float]) -> float:
        return statistics.median(map(of, all_figures))

    return Figures(
        sum(figures.requests for figures in all_figures),
        sum(figures.errors for figures in all_figures),
        middle(lambda one: one.requests_per_s),
        middle(lambda one: one.tokens_per_s or 0.0),
        middle(lambda one: one.first_p50),
        middle(lambda one: one.first_p90),
        middle(lambda one: one.total_p50),
        middle(lambda one: one.total_p90),
        middle(lambda one: one.total_mean),
    )


def _ratios(first: Figures, second: Figures) -> list[object]:
    pairs: Mapping[str, tuple[float, float]] = {
        name: (getattr(first, name), getattr(second, name)) for name in _FIELDS[2:]
    }
    return [f"{100 * (ours / theirs - 1):+.1f} %" for theirs, ours in pairs.values()]


def _prompts() -> list[str]:
    names, animals = ("Clover", "Felix", "Rusty", "Daisy", "Pip", "Hazel"), ("rabbit", "fox", "mouse", "owl")
    things = ("a red bicycle", "a little door", "an old map")
    return [
        f"Once upon a time there was a {animal} named {name}. One morning {name} found {thing} in the garden."
        for name, animal, thing in itertools.product(names, animals, things)
    ]


if __name__ == "__main__":
    sys.exit(main())
