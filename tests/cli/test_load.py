"""`diffleet bench`: its load, its statistics, its outputs."""

import json
import random
import re
import signal
import subprocess
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.cli.bench import Outputs, bench
from shared.cli.exits import Exit, Stop
from shared.cli.load import Load, Range, Round, Shot, pauses, read_prompts
from shared.cli.load_report import Objective, percentile, plot, summarize
from tests.cli.fleet_process import DIFFLEET, Up, diffleet, environment
from tests.fleet.processes import until

LOAD = Load(4, 2, None, Range(8, 8), Range(8, 8))


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.0, 1.0))
def test_a_percentile_is_numpys(values: list[float], share: float) -> None:
    assert percentile(sorted(values), share) == pytest.approx(numpy.percentile(values, 100 * share), abs=1e-6)


@given(st.integers(1, 10_000), st.integers(0, 10_000), st.integers())
def test_a_range_draws_within_its_bounds(low: int, more: int, seed: int) -> None:
    drawn = Range.parse(f"{low}-{low + more}").draw(random.Random(seed))
    assert low <= drawn <= low + more


@pytest.mark.parametrize("text", ["", "0", "-5", "9-3", "a", "1-"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Range.parse(text)


def test_a_round_is_summed_up_over_what_was_answered() -> None:
    good = Shot(8, tokens=8, nfe=4, blocks_s=(0.5, 0.75), block_tokens=(4, 4), total_s=0.75, started_s=1.0)
    slow = Shot(8, tokens=8, nfe=4, blocks_s=(2.0, 3.0), block_tokens=(6, 2), total_s=3.0, started_s=2.0)
    summary = summarize("here", Round(LOAD, (good, slow, Shot(8, fault="HTTP 503", started_s=1.0))), Objective(1.0))
    assert (summary.planned, summary.requests, summary.failed, summary.faults) == (4, 3, 1, {"HTTP 503": 1})
    assert summary.seconds == 4.0  # from the first submit, at 1, to the last text, at 5
    assert (summary.tokens_per_s, summary.tokens_per_forward) == (4.0, 2.0)
    assert (summary.goodput, summary.good_share) == (0.25, 1 / 3)
    assert asdict(summary.first_s) == pytest.approx({"mean": 1.25, "p50": 1.25, "p90": 1.85, "p99": 1.985})
    assert summary.block_s.p50 == pytest.approx((0.25 + 1.0) / 2)
    assert summary.token_s.mean == pytest.approx((0.25 / 4 + 1.0 / 2) / 2)


def test_an_answer_of_one_block_has_no_time_per_token() -> None:
    assert Shot(8, tokens=8, blocks_s=(0.5,), block_tokens=(8,), total_s=0.5).token_s is None


def test_nothing_measured_is_no_rate() -> None:
    summary = summarize("here", Round(LOAD, ()), Objective())
    assert (summary.requests_per_s, summary.tokens_per_s, summary.goodput) == (0.0, 0.0, 0.0)


def test_a_trace_has_the_statistics_that_aiperf_computed_of_it() -> None:
    trace = json.loads((Path(__file__).parent / "data" / "aiperf-0.13.0.json").read_text())
    summary = summarize("here", Round(LOAD, tuple(map(_traced, trace["requests"]))), Objective(0.230, token_s=0.013))
    aiperf = trace["aiperf"]
    # aiperf takes the ends of a run from another clock than the times of a request.
    assert summary.seconds == pytest.approx(aiperf["benchmark_duration"]["avg"], rel=1e-5)
    # Its rates are over a window that begins before the first submit and ends behind the last text.
    assert summary.requests_per_s == pytest.approx(aiperf["request_throughput"]["avg"], rel=0.005)
    assert summary.tokens_per_s == pytest.approx(aiperf["output_token_throughput"]["avg"], rel=0.005)
    assert summary.goodput == pytest.approx(aiperf["goodput"]["avg"], rel=0.005)
    spreads = {
        "time_to_first_token": summary.first_s,
        "inter_chunk_latency": summary.block_s,
        "inter_token_latency": summary.token_s,
        "request_latency": summary.total_s,
    }
    for name, spread in spreads.items():
        told = {"mean": aiperf[name]["avg"], **{share: aiperf[name][share] for share in ("p50", "p90", "p99")}}
        assert {share: 1000 * value for share, value in asdict(spread).items()} == pytest.approx(told), name


def _traced(request: dict[str, Any]) -> Shot:
    """Return the shot that `fire` would have made of these times."""
    started = request["start_ns"]
    counts = [tokens for _, tokens in request["chunks"]]
    blocks = tuple((when - started) / 1e9 for when, _ in request["chunks"])
    sizes = tuple(now - before for before, now in pairwise([0, *counts]))
    return Shot(8, counts[-1], 1, blocks, sizes, blocks[-1], started / 1e9)


@pytest.mark.parametrize(
    ("objective", "kept"),
    [
        (Objective(), True),
        (Objective(first_s=0.4), False),
        (Objective(block_s=0.3), True),
        (Objective(block_s=0.2), False),
        (Objective(total_s=1.0), True),
        (Objective(total_s=0.9), False),
        (Objective(token_s=0.1), True),
        (Objective(token_s=0.08), False),
    ],
)
def test_a_request_is_good_if_it_keeps_every_part_of_the_objective(objective: Objective, kept: bool) -> None:
    shot = Shot(8, tokens=9, nfe=3, blocks_s=(0.5, 0.7, 1.0), block_tokens=(4, 4, 1), total_s=1.0)
    assert objective.kept_by(shot) is kept


def test_a_failed_request_is_never_good() -> None:
    assert not Objective().kept_by(Shot(8, fault="error in the stream", blocks_s=(0.1,)))


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    shots = (Shot(8, tokens=8, nfe=4, blocks_s=(0.5, 0.7), total_s=0.8),)
    plot(tmp_path / "out.png", [summarize("here", Round(LOAD, shots), Objective())])
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@given(st.floats(0.1, 100), st.floats(0.2, 50), st.integers())
def test_arrivals_keep_their_rate_whatever_their_burstiness(rate: float, burstiness: float, seed: int) -> None:
    load = replace(LOAD, requests=4000, rate=rate, burstiness=burstiness)
    drawn = pauses(load, random.Random(seed))
    # Of 4000 gamma variates the mean is within 6 of its standard deviations.
    assert sum(drawn) / len(drawn) * rate == pytest.approx(1.0, abs=6 / (burstiness * len(drawn)) ** 0.5)


def test_without_a_rate_nobody_waits() -> None:
    assert pauses(LOAD, random.Random(0)) == [0.0] * 4


def test_prompts_are_json_lines_of_texts_or_objects(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('"one"\n\n{"text": "two"}\n{"prompt": "three", "other": 1}\n')
    assert read_prompts(file) == ("one", "two", "three")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "no prompt"),
        ("once\n", "line 1 is not JSON"),
        ('"a"\n{"x": 1}\n', "line 2 has no"),
        ('""\n', "line 1 has no"),
    ],
)
def test_a_file_without_usable_prompts_is_refused(tmp_path: Path, content: str, complaint: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(ValueError, match=complaint):
        read_prompts(file)


@pytest.mark.parametrize("faults", [(None, "HTTP 503"), ("HTTP 503", "HTTP 503")])
async def test_a_request_that_failed_ends_the_command_with_1_after_the_table(
    faults: tuple[str | None, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fire(url: str, model: str | None, load: Load, told: Callable[[Shot], None]) -> None:
        for fault in faults:
            told(Shot(8, tokens=8, nfe=4, blocks_s=(0.5,), block_tokens=(8,), total_s=0.5, fault=fault))

    monkeypatch.setattr("shared.cli.bench.fire", fire)
    with pytest.raises(Stop) as stopped:
        await bench(["http://here"], None, [LOAD], Objective(), Outputs())
    assert stopped.value.exit_code == Exit.FAILED
    printed = capsys.readouterr()
    assert "x2 (2 of 4)" in printed.out and "times HTTP 503" in printed.err


async def test_where_no_request_failed_the_command_ends_with_0(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fire(url: str, model: str | None, load: Load, told: Callable[[Shot], None]) -> None:
        told(Shot(8, tokens=8, nfe=4, blocks_s=(0.5,), block_tokens=(8,), total_s=0.5))

    monkeypatch.setattr("shared.cli.bench.fire", fire)
    await bench(["http://here"], None, [LOAD], Objective(), Outputs())


@pytest.mark.slow
def test_two_servers_are_measured_with_the_same_load(live_fleet: Up, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    done = diffleet(
        *("bench", "--url", live_fleet.url, "--against", live_fleet.url, "-r", "4", "-c", "1,2"),
        *("--prompt-tokens", "5-9", "--output-tokens", "12", "--slo-total-ms", "60000", "--json", str(out)),
    )
    assert done.returncode == 0, done.stderr
    assert "good" in done.stdout and "…" not in done.stdout
    rounds = json.loads(out.read_text())["rounds"]
    assert [one["concurrency"] for one in rounds] == [1, 1, 2, 2]
    assert {one["tokens"] for one in rounds} == {48}
    assert all(one["failed"] == 0 and one["good_share"] == 1.0 for one in rounds)
    assert len({one["tokens_per_forward"] for one in rounds}) == 1
    assert all(sum(shot["block_tokens"]) == shot["tokens"] == 12 for one in rounds for shot in one["shots"])


@pytest.mark.slow
def test_requests_that_arrive_by_themselves_are_all_answered(live_fleet: Up) -> None:
    arrivals = ("--rate", "20", "--burstiness", "0.5")
    done = diffleet("bench", "--url", live_fleet.url, "-r", "4", *arrivals, "--output-tokens", "4")
    assert done.returncode == 0, done.stderr
    assert "20/s" in done.stdout


@pytest.mark.slow
def test_own_prompts_are_asked_in_turn(live_fleet: Up, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "bench.json"
    prompts.write_text('"Once"\n{"text": "Once upon a time there was a rabbit"}\n')
    load = ("-r", "3", "-c", "1", "--output-tokens", "4", "--prompts", str(prompts), "--json", str(out))
    done = diffleet("bench", "--url", live_fleet.url, *load)
    assert done.returncode == 0, done.stderr
    first, second, third = (shot["prompt_tokens"] for shot in json.loads(out.read_text())["rounds"][0]["shots"])
    assert 0 < first == third < second


@pytest.mark.slow
def test_ctrl_c_reports_what_was_measured(live_fleet: Up, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    load = ("-r", "100000", "-c", "2", "--output-tokens", "4", "--json", str(out))
    command = [*DIFFLEET, "bench", "--url", live_fleet.url, *load]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=environment(), stdout=pipe, stderr=pipe, text=True, preexec_fn=_take_interrupts
    ) as bench:
        try:
            with httpx.Client(base_url=live_fleet.url, trust_env=False) as client:
                before = _finished(client)
                until(lambda: _finished(client) > before + 10 or bench.poll() is not None, "some requests are answered")
            bench.send_signal(signal.SIGINT)
            stdout, stderr = bench.communicate(timeout=60)
        finally:
            bench.kill()
    assert bench.returncode == 130, stderr
    assert "of 100000)" in stdout
    told = json.loads(out.read_text())
    assert told["complete"] is False
    (one,) = told["rounds"]
    assert 0 < one["requests"] == len(one["shots"]) < one["planned"] == 100000


def _take_interrupts() -> None:
    # Where the tests run in a shell's background, it has told them to ignore Ctrl-C, and a child inherits that.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _finished(client: httpx.Client) -> float:
    found = re.findall(r"^diffleet_requests_finished_total\{.*\} (\S+)$", client.get("/metrics").text, re.M)
    return sum(map(float, found))


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [("-c", "0"), ("--rate", "none"), ("--output-tokens", "9-3"), ("--prompts", "no")])
def test_a_wrong_load_ends_with_2_and_names_the_option(wrong: tuple[str, str]) -> None:
    done = diffleet("bench", *wrong)
    assert done.returncode == 2
    assert {"-c": "--concurrency"}.get(wrong[0], wrong[0]) in done.stderr


@pytest.mark.slow
def test_a_load_that_the_model_refuses_ends_with_4(live_fleet: Up) -> None:
    done = diffleet("bench", "--url", live_fleet.url, "-r", "1", "-c", "1", "--output-tokens", "9999")
    assert done.returncode == 4 and "max_tokens" in done.stderr
