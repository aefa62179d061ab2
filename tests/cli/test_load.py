"""`diffleet bench`: its load, its statistics, its outputs."""

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.cli.load import Load, Range, Round, Shot
from shared.cli.load_report import Objective, Spread, percentile, plot, summarize
from tests.cli.fleet_process import Up, diffleet

LOAD = Load(4, 2, None, Range(8, 8), Range(8, 8))


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1.0))
def test_a_percentile_is_a_measured_value_that_enough_values_do_not_exceed(values: list[float], share: float) -> None:
    found = percentile(sorted(values), share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-6
    assert sum(value < found for value in values) <= share * len(values) + 1e-6


@given(st.integers(1, 10_000), st.integers(0, 10_000), st.integers())
def test_a_range_draws_within_its_bounds(low: int, more: int, seed: int) -> None:
    drawn = Range.parse(f"{low}-{low + more}").draw(random.Random(seed))
    assert low <= drawn <= low + more


@pytest.mark.parametrize("text", ["", "0", "-5", "9-3", "a", "1-"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Range.parse(text)


def test_a_round_is_summed_up_over_what_was_answered() -> None:
    good = Shot(8, tokens=8, nfe=4, blocks_s=(0.5, 0.7), total_s=0.8)
    slow = Shot(8, tokens=8, nfe=4, blocks_s=(2.0, 2.2), total_s=2.4)
    summary = summarize("here", Round(LOAD, (good, slow, Shot(8, fault="HTTP 503")), 4.0), Objective(first_s=1.0))
    assert (summary.requests, summary.failed, summary.faults) == (3, 1, {"HTTP 503": 1})
    assert (summary.tokens_per_s, summary.tokens_per_forward) == (4.0, 2.0)
    assert (summary.goodput, summary.good_share) == (0.25, 1 / 3)
    assert summary.first_s == Spread(1.25, 0.5, 2.0, 2.0)
    assert summary.block_s.p50 == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("objective", "kept"),
    [
        (Objective(), True),
        (Objective(first_s=0.4), False),
        (Objective(block_s=0.3), True),
        (Objective(block_s=0.2), False),
        (Objective(total_s=1.0), True),
        (Objective(total_s=0.9), False),
    ],
)
def test_a_request_is_good_if_it_keeps_every_part_of_the_objective(objective: Objective, kept: bool) -> None:
    assert objective.kept_by(Shot(8, tokens=9, nfe=3, blocks_s=(0.5, 0.7, 1.0), total_s=1.0)) is kept


def test_a_failed_request_is_never_good() -> None:
    assert not Objective().kept_by(Shot(8, fault="error in the stream", blocks_s=(0.1,)))


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    shots = (Shot(8, tokens=8, nfe=4, blocks_s=(0.5, 0.7), total_s=0.8),)
    plot(tmp_path / "out.png", [summarize("here", Round(LOAD, shots, 1.0), Objective())])
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


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


@pytest.mark.slow
def test_requests_that_arrive_by_themselves_are_all_answered(live_fleet: Up) -> None:
    done = diffleet("bench", "--url", live_fleet.url, "-r", "4", "--rate", "20", "--output-tokens", "4")
    assert done.returncode == 0, done.stderr
    assert "20/s" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [("-c", "0"), ("--rate", "none"), ("--output-tokens", "9-3")])
def test_a_wrong_load_ends_with_2_and_names_the_option(wrong: tuple[str, str]) -> None:
    done = diffleet("bench", *wrong)
    assert done.returncode == 2
    assert {"-c": "--concurrency"}.get(wrong[0], wrong[0]) in done.stderr


@pytest.mark.slow
def test_a_load_that_the_model_refuses_ends_with_4(live_fleet: Up) -> None:
    done = diffleet("bench", "--url", live_fleet.url, "-r", "1", "-c", "1", "--output-tokens", "9999")
    assert done.returncode == 4 and "max_tokens" in done.stderr
