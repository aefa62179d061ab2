"""Every command and program of the documentation, run against a live fleet; and its links."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from tests.cli.conftest import live_fleet, tiny_model
from tests.cli.fleet_process import DIFFLEET, ROOT, Up, environment

__all__ = ["live_fleet", "tiny_model"]

DEFAULT_URL = "http://127.0.0.1:8000"
ELSEWHERE = {"docs/deploy.md": "tests/helm render and run it"}
PAGES = [page for page in sorted((ROOT / "docs").glob("*.md")) if f"docs/{page.name}" not in ELSEWHERE]
COMMANDS = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```sh\n(.*?)```", page.read_text(), re.S))
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A folder with `diffleet` and `python` of this checkout."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, command in (("diffleet", DIFFLEET), ("python", (sys.executable,))):
        quoted = " ".join(f"'{part}'" for part in command)
        (folder / name).write_text(f'#!/bin/sh\nexec {quoted} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


def settings(fleet: Up, path: Path) -> dict[str, str]:
    return environment(
        PATH=f"{path}:{os.environ['PATH']}",
        DIFFLEET_URL=fleet.url,
        DIFFLEET_REDIS_URL=fleet.redis_url,
        DIFFLEET_DATA_DIR=str(fleet.data_dir),
    )


@pytest.mark.slow
@pytest.mark.parametrize("block", COMMANDS)
def test_every_command_ends_well(block: str, live_fleet: Up, path: Path, tmp_path: Path) -> None:
    script = "set -euo pipefail\n" + block.replace(DEFAULT_URL, live_fleet.url)
    done = subprocess.run(
        ["bash", "-c", script],
        env=settings(live_fleet, path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    if "999999" in block:
        assert '"param":"max_tokens"' in done.stdout
    else:
        assert '"error":{' not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(file.name for file in (ROOT / "docs" / "examples").glob("*.py")))
def test_every_example_prints_an_answer(name: str, live_fleet: Up, path: Path) -> None:
    where = live_fleet.redis_url if name == "direct_submit.py" else live_fleet.url
    program = [sys.executable, str(ROOT / "docs" / "examples" / name), where]
    done = subprocess.run(program, env=settings(live_fleet, path), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "forward" in done.stdout


@pytest.mark.slow
def test_the_figure_is_drawn_from_a_running_fleet(live_fleet: Up, path: Path, tmp_path: Path) -> None:
    out = tmp_path / "block.svg"
    program = [sys.executable, str(ROOT / "docs" / "images" / "block.py"), live_fleet.url, str(out)]
    subprocess.run(program, env=settings(live_fleet, path), check=True, timeout=100)
    rows = [text.text for text in ElementTree.parse(out).iter("{http://www.w3.org/2000/svg}text")]
    assert any(str(row).startswith("step ") for row in rows) and "committed" in rows


@pytest.mark.parametrize("page", [*PAGES, *ROOT.glob("*.md")], ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_named_exists(page: Path) -> None:
    named = re.findall(r"`((?:api|shared|worker|kernels|tests|helm|docs)/[\w./-]+)`", page.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_what_the_commands_write_beside_the_code_is_ignored_by_git() -> None:
    blocks = [block for page in PAGES for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.S)]
    written = {name for block in blocks for name in re.findall(r"(?:[^-]> |--json |tee )([\w.-]+\.\w+)", block)}
    assert {"bench.json", "lines.jsonl", "webhooks.json"} <= written
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert [name for name in written if f"/{name}" not in ignored] == []


def test_every_page_is_listed() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    assert [
        page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md" and page.name not in index
    ] == []


def test_the_runbook_has_every_alert() -> None:
    rules = yaml.safe_load((ROOT / "helm" / "diffleet" / "files" / "alerts.yaml").read_text())
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    assert set(re.findall(r"^\| (Diffleet\w+)", (ROOT / "docs" / "operations.md").read_text(), re.M)) == alerts


STRATEGIES = yaml.safe_load((ROOT / "docs" / "benchmarks" / "2026-11-28-strategies" / "figures.json").read_text())


def sweep_of(threshold: str) -> dict[str, float]:
    (row,) = (row for row in STRATEGIES["sweep"] if row["options"] == f"threshold {threshold}")
    return row


def test_the_table_of_strategies_is_that_of_the_run() -> None:
    text = (ROOT / "docs" / "benchmarks" / "strategies.md").read_text()
    assert f"{STRATEGIES['items']} held-out items of {STRATEGIES['tasks']} tasks" in text
    for row in STRATEGIES["strategies"]:
        score = f"{100 * row['accuracy']:.1f} % | {row['tokens_per_forward']:.2f}"
        assert f"| `{row['strategy']}` | {row['options'] or 'as they come'} | {score} |" in text
    for row in STRATEGIES["sweep"]:
        score = f"{100 * row['accuracy']:.1f} % | {row['tokens_per_forward']:.2f}"
        assert f"| {row['options'].split()[-1]} | {score} |" in text
    for row in STRATEGIES["drawn"]:
        kind, warmth = (option.split()[-1] for option in row["options"].split(", "))
        cells = re.search(rf"^\| {re.escape(warmth)} \| (.* \| .*) \| (.* \| .*) \|$", text, re.M)
        score = f"{100 * row['accuracy']:.1f} % | {row['tokens_per_forward']:.2f}"
        assert cells is not None and cells[1 if kind == "model" else 2] == score


def test_the_table_of_block_lengths_is_that_of_the_model() -> None:
    measured = json.loads((ROOT / "worker" / "demo" / "models" / "demo" / "block_lengths.json").read_text())
    text = (ROOT / "docs" / "tuning.md").read_text()
    section = text[text.index("## Block length by load") :]
    assert f"on the same {measured['items']} items" in section
    for row in measured["lengths"]:
        score = f"{100 * row['accuracy']:.1f} % | {row['tokens_per_forward']:.2f}"
        assert f"| of {row['block_length']} | {score} |" in section


def test_every_golden_setting_is_in_the_table_and_equal() -> None:
    text = (ROOT / "docs" / "goldens.md").read_text()
    rows = dict(re.findall(r"^\| (\w+ \| \S+) \| \d+ \| (yes \| \d+ \| yes) \|", text, re.M))
    for file in sorted((ROOT / "tests" / "goldens" / "data").glob("*/golden.json")):
        for entry in json.loads(file.read_bytes())["generate"]:
            assert f"{file.parent.name} | {entry['name']}" in rows


def test_the_tuning_tables_are_those_of_the_evaluation() -> None:
    evaluation = yaml.safe_load((ROOT / "worker" / "demo" / "models" / "demo" / "eval.json").read_text())
    text = (ROOT / "docs" / "tuning.md").read_text()
    overall = evaluation["overall"]
    assert f"{overall['items']} held-out items" in text
    rows = {"by threshold, the model's own": overall["threshold"], "one position a step": overall["sequential"]}
    rows |= {name: evaluation["groups"][name]["threshold"] for name in re.findall(r"^\| (\w+) \| \d", text, re.M)}
    assert len(rows) > 5
    rows |= {f"{float(name):g}": sweep_of(name) for name in re.findall(r"^\| (0\.\d+) \|", text, re.M)}
    for name, score in rows.items():
        assert f"| {name} | {100 * score['accuracy']:.1f} % | {score['tokens_per_forward']:.2f} |" in text
