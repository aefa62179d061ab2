"""A short storm; `make chaos` runs longer ones."""

import os

import pytest

from tests.fleet.chaos import run

SECONDS = float(os.environ.get("DIFFLEET_CHAOS_SECONDS", "12"))


@pytest.mark.slow
@pytest.mark.timeout(300 + SECONDS)
async def test_under_any_faults_every_request_ends_once_with_the_text_of_the_undisturbed_run() -> None:
    report = await run(int(os.environ.get("DIFFLEET_CHAOS_SEED", "7")), SECONDS)
    print("\n".join(report.lines()))
    assert report.faults.total() > 0 and report.requests > 0
    assert report.clean, (report.lost, report.repeated, report.gapped, report.wrong, report.left)
