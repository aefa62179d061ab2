"""C47: other client libraries against a live fleet: `python -m tests.conformance.third_party [name ...]`.

Makes an environment for each library, so it needs a package index; it is not part of the normal run.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from tests.conformance.fleet import MODEL, LiveFleet
from tests.conformance.side_environments import environment

REQUIREMENTS = {
    "litellm": ["litellm"],
    "langchain": ["langchain-openai"],
    "instructor": ["instructor"],
    "pydantic-ai": ["pydantic-ai-slim[openai]"],
    "openai-agents": ["openai-agents"],
    "llama-index": ["llama-index-llms-openai-like"],
    "ollama": ["ollama"],
}
_CHECKS = Path(__file__).with_name("third_party_checks.py")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(REQUIREMENTS)}; all unless named")
    names: list[str] = parser.parse_args().names or list(REQUIREMENTS)
    if unknown := [name for name in names if name not in REQUIREMENTS]:
        parser.error(f"unknown: {', '.join(unknown)}")
    interpreters = {name: environment(name, REQUIREMENTS[name]) for name in names}
    fleet = LiveFleet()
    failed: list[str] = []
    try:
        fleet.start()
        for name, python in interpreters.items():
            run = subprocess.run([str(python), str(_CHECKS), name, fleet.front.url, MODEL])
            if run.returncode:
                failed.append(name)
    finally:
        fleet.stop()
    print(f"failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
