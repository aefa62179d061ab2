"""The README's examples, run as they stand (but for the address) against a live fleet; and its paths."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from api.requests import _DECODING_OPTIONS  # pyright: ignore[reportPrivateUsage]
from api.schemas import DiffusionOptions, Strategy
from shared.cli.exits import Exit
from shared.decoding import KINDS
from tests.cli.fleet_process import ROOT, Up, environment

README = (ROOT / "README.md").read_text()
DEFAULT_URL = "http://127.0.0.1:8000"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def run(*command: str) -> str:
    ran = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def run_python(script: str, tmp_path: Path, *arguments: str) -> str:
    (tmp_path / "example.py").write_text(script)
    return run(sys.executable, str(tmp_path / "example.py"), *arguments)


needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


@pytest.mark.slow
@needs_curl
def test_the_curl_example_answers(live_fleet: Up) -> None:
    (example,) = [block for block in blocks("sh") if "chat/completions" in block]
    assert DEFAULT_URL in example
    answer = json.loads(run("bash", "-c", example.replace(DEFAULT_URL, live_fleet.url)))
    assert answer["choices"][0]["message"]["content"]


@pytest.mark.slow
def test_the_example_of_a_checkpoint_serves_it(tiny_model: Path, short_folder: Path) -> None:
    (example,) = [block for block in blocks("sh") if "--model " in block]
    program, command, option, _, *rest = shlex.split(example)
    assert (program, command, option) == (".venv/bin/diffleet", "up", "--model")
    up = Up(short_folder, tiny_model, *rest, "--prompt", "")
    try:
        served = json.loads(run("curl", "-s", f"{up.wait_serving().url}/v1/models"))["data"]
        assert [entry["id"] for entry in served] == [rest[rest.index("--model-name") + 1]]
    finally:
        up.stop()
        up.put_down()


@pytest.mark.slow
@needs_curl
def test_the_native_example_streams_the_canvas(live_fleet: Up) -> None:
    (example,) = [block for block in blocks("sh") if "/generate " in block]
    stream = run("bash", "-c", example.replace(DEFAULT_URL, live_fleet.url))
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    kinds = {event["event"] for event in events}
    assert {"append", "final"} <= kinds <= {"append", "buffer_snapshot", "final"}


@pytest.mark.slow
def test_the_openai_example_prints_an_answer(live_fleet: Up, tmp_path: Path) -> None:
    (example,) = [block for block in blocks("python") if "openai" in block]
    assert run_python(example.replace(DEFAULT_URL, live_fleet.url), tmp_path).strip()


@pytest.mark.slow
def test_the_redis_example_imports_only_shared_and_prints_deltas(live_fleet: Up, tmp_path: Path) -> None:
    (example,) = [block for block in blocks("python") if "shared.client" in block]
    assert len([line for line in example.splitlines() if line.strip()]) <= 10
    assert set(re.findall(r"^(?:from|import) (\w+)", example, re.M)) == {"sys", "shared"}
    assert run_python(example, tmp_path, live_fleet.redis_url).strip()


def test_every_path_that_the_readme_names_exists() -> None:
    named = {name for name in re.findall(r"`([\w./-]+/[\w./-]*)`", README) if not name.startswith(("/", "."))}
    assert len(named) > 15
    skipped = {"valkey/valkey.sock"}
    assert [name for name in sorted(named - skipped) if not (ROOT / name).exists()] == []


def test_every_target_that_the_readme_names_exists() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"^make (\w+)$", README, re.M)) | set(re.findall(r"`make (\w+)`", README))
    assert {"run", "test"} <= named <= targets


def test_the_table_of_strategies_is_what_the_api_takes() -> None:
    own = [name for name in _DECODING_OPTIONS if name not in ("confidence", "filler_rules")]
    expected = {name: {option for option in own if option in KINDS[name].model_fields} for name in get_args(Strategy)}
    rows = re.search(r"\| strategy \|.*?\n\|---\|---\|\n(.*?)\n\n", README, re.S)
    assert rows is not None
    table = {
        name: set(re.findall(r"`(\w+)`", rest))
        for names, rest in re.findall(r"^\| (.*?) \|(.*)$", rows[1], re.M)
        for name in re.findall(r"`(\w+)`", names)
    }
    assert table == expected
    assert set(own) <= set(DiffusionOptions.model_fields)


def test_every_exit_code_that_the_readme_names_is_the_command_lines() -> None:
    listed = re.search(r"exit codes \((.*?)\)", README, re.S)
    assert listed is not None
    assert [int(code) for code in re.findall(r"\d+", listed[1])] == [code.value for code in Exit]
