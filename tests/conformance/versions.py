"""All checks with one openai client after the other: `python -m tests.conformance.versions [version ...]`.

Each version is put before the packages of this interpreter, so it needs a package index the first time. Prints a table
of the checks, and ends with 1 if one has failed.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from tests.conformance.old_clients import VERSIONS
from tests.conformance.side_environments import overlay

_ROOT = Path(__file__).parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="*", default=list(VERSIONS), help="of openai's client")
    parser.add_argument("-k", dest="chosen", help="only checks that match, as pytest takes it")
    arguments = parser.parse_args()
    results = {version: run(version, arguments.chosen) for version in arguments.versions}
    print(table(results))
    return 1 if any("failed" in result.values() for result in results.values()) else 0


def run(version: str, chosen: str | None) -> dict[str, str]:
    """Return the outcome of each check with this client; raises CalledProcessError if it is not the one that runs."""
    # Versions before 3 also need `distro`, which nothing else here does.
    packages = overlay(f"openai-{version}", [f"openai=={version}", "distro==1.9.0"])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(packages), str(_ROOT)))}
    which = f"import openai; assert openai.__version__ == {version!r}, openai.__version__"
    subprocess.run([sys.executable, "-c", which], env=env, check=True)
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        command = [sys.executable, "-m", "pytest", "tests/conformance", f"--junitxml={report.name}"]
        subprocess.run([*command, *(() if chosen is None else ("-k", chosen))], env=env, cwd=_ROOT)
        return outcomes(Path(report.name).read_text())


def outcomes(report: str) -> dict[str, str]:
    """Return `ok`, `failed` or `skipped` of each check in a JUnit report; a check of several tests is their worst."""
    worst: dict[str, int] = {}
    for case in ElementTree.fromstring(report).iter("testcase"):
        if number := re.match(r"test_(c\d\d)", case.get("name", "")):
            bad = case.find("failure") is not None or case.find("error") is not None
            rank = 2 if bad else 1 if case.find("skipped") is not None else 0
            worst[number[1].upper()] = max(rank, worst.get(number[1].upper(), 0))
    return {check: ("ok", "skipped", "failed")[rank] for check, rank in sorted(worst.items())}


def table(results: Mapping[str, Mapping[str, str]]) -> str:
    """Return the outcomes as Markdown, a row for each check."""
    versions: Sequence[str] = list(results)
    checks = sorted({check for result in results.values() for check in result})
    lines = ["| check | " + " | ".join(versions) + " |", "|---" * (len(versions) + 1) + "|"]
    for check in checks:
        lines.append(f"| {check} | " + " | ".join(results[version].get(check, "-") for version in versions) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
