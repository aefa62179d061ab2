"""A program of ten lines needs nothing but `shared.client`."""

import os
import subprocess
import sys
from pathlib import Path

from tests.fleet.conftest import SpawnWorker
from tests.fleet.processes import PATIENCE_S, REPOSITORY

PROGRAM = """
from shared.client import Fleet

with Fleet() as fleet:
    for event in fleet.generate("direct", "once upon a time", max_tokens=24, seed=1):
        if event.t == "delta":
            print(event.token_ids, repr(event.text))
        else:
            print(event.t)
"""


def test_a_program_of_ten_lines_submits_through_redis_and_prints_its_deltas(
    spawn_worker: SpawnWorker, tmp_path: Path, fleet_server: object
) -> None:
    spawn_worker("direct").wait_ready()
    lines = PROGRAM.strip().splitlines()
    assert len(lines) <= 10
    assert [line for line in lines if "import" in line] == ["from shared.client import Fleet"]

    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    url = fleet_server.url  # type: ignore[attr-defined]
    ran = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"DIFFLEET_REDIS_URL": url, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ran.returncode == 0, ran.stderr
    printed = ran.stdout.splitlines()
    assert printed[-1] == "finished"
    assert sum(line.startswith("[") for line in printed) >= 2
