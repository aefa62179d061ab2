"""schemathesis on the served OpenAPI document: `python -m tests.conformance.fuzz [examples]`; needs schemathesis.

Zero server errors, no undocumented status, every answer in the documented content type; and the worker lives.
"""

import argparse
import subprocess
import sys

import httpx

from tests.conformance.fleet import MODEL, LiveFleet

_CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("examples", nargs="?", type=int, default=20, help="of each operation")
    examples = str(parser.parse_args().examples)
    fleet = LiveFleet()
    try:
        fleet.start()
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{fleet.front.url}/openapi.json"]
        command += ["--max-examples", examples, "--phases", "examples,coverage,fuzzing", "--checks", _CHECKS]
        command += ["--request-timeout", "30", "--continue-on-failure", "--seed", "1", "--exclude-path", "/metrics"]
        run = subprocess.run(command)
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        alive = httpx.post(f"{fleet.front.url}/v1/chat/completions", json=body, timeout=30).status_code == 200
    finally:
        fleet.stop()
    print(f"worker alive: {alive}")
    return run.returncode or int(not alive)


if __name__ == "__main__":
    sys.exit(main())
