"""C48: openai's older clients against a live fleet: `python -m tests.conformance.old_clients [version ...]`.

Makes an environment for each version, so it needs a package index; it is not part of the normal run.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from tests.conformance.fleet import MODEL, LiveFleet
from tests.conformance.side_environments import environment

VERSIONS = ("1.109.1", "2.30.0", "3.57.0")
_CHECKS = Path(__file__).with_name("old_client_checks.py")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="*", default=list(VERSIONS), help="of openai's client")
    versions: list[str] = parser.parse_args().versions
    interpreters = [environment(f"openai-{version}", [f"openai=={version}"]) for version in versions]
    fleet = LiveFleet()
    try:
        fleet.start()
        runs = [subprocess.run([str(python), str(_CHECKS), fleet.front.url, MODEL]) for python in interpreters]
    finally:
        fleet.stop()
    return 1 if any(run.returncode for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
