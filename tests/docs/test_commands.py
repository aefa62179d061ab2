"""What the pages name but no test can run whole: programs, make's targets, and the commands for a cluster."""

import functools
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.cli.fleet_process import ROOT, environment
from tests.helm.binaries import CARRIERS, helm
from tests.helm.chart import merged, render, render_case

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "helm" / "diffleet" / "README.md"]
TEXTS = {str(page.relative_to(ROOT)): page.read_text() for page in sorted(PAGES)}
OURS = r"python -m ((?:api|worker|shared|tests)[\w.]*)([^`#\n|]*)"


def programs() -> set[tuple[str, tuple[str, ...]]]:
    """Each program that a page names, with the options given to it there."""
    found: set[tuple[str, tuple[str, ...]]] = set()
    for text in TEXTS.values():
        for module, rest in re.findall(OURS, text):
            found.add((module, tuple(sorted(re.findall(r"(?<!\S)--[\w-]+", rest)))))
    return found


@functools.cache
def help_of(module: str) -> str:
    command = [sys.executable, "-m", module, "--help"]
    ran = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_programs_are_found() -> None:
    assert {"tests.bench.control", "tests.bench.gpu.serving", "api.keys"} <= {module for module, _ in programs()}


@pytest.mark.slow
@pytest.mark.parametrize(("module", "options"), sorted(programs()), ids=lambda one: one if isinstance(one, str) else "")
def test_every_program_named_tells_its_options_and_has_those_given(module: str, options: tuple[str, ...]) -> None:
    if module.startswith("tests.bench.gpu"):
        pytest.importorskip("triton")  # Linux alone has it
    told = help_of(module)
    assert "usage:" in told.lower()
    assert [option for option in options if not re.search(rf"{option}\b", told)] == []


def test_every_target_named_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    for page, text in TEXTS.items():
        named = re.findall(r"(?:^|`|    )make ([a-z]+)", text, re.M)
        assert set(named) <= targets, page


CLUSTER = [
    pytest.param(line, id=f"{Path(page).parent.name}-{number}")
    for page, text in TEXTS.items()
    for block in re.findall(r"```console\n(.*?)```", text, re.S)
    for number, line in enumerate(block.splitlines())
]


@pytest.mark.parametrize("line", CLUSTER)
def test_every_command_for_a_cluster_is_one_that_helm_takes(line: str) -> None:
    """`helm install` is rendered with its own arguments; of `kubectl`, what the chart answers for is checked."""
    words = shlex.split(line)
    if words[0] == "kubectl":
        assert words[1] in ("create", "label")
        levels = [word.split("=")[1] for word in words if word.startswith("pod-security.kubernetes.io/")]
        assert levels in ([], ["restricted"])
        return
    assert words[0] == "helm"
    if words[1] == "test":
        pods = render_case("trial").of("Pod")
        assert any("helm.sh/hook" in pod["metadata"].get("annotations", {}) for pod in pods)
        return
    assert words[1] == "install"
    rest = [word for word in words[2:] if word not in ("--wait", "--create-namespace")]
    for carrier in CARRIERS:
        command = [helm(carrier), "template", *rest]
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
        assert ran.returncode == 0, ran.stderr
        assert "kind: Deployment" in ran.stdout


VALUES = [
    pytest.param(block, id=f"{Path(page).parent.name}-{number}")
    for page, text in TEXTS.items()
    for number, block in enumerate(re.findall(r"```yaml\n(.*?)```", text, re.S))
]


@pytest.mark.parametrize("block", VALUES)
def test_every_example_of_values_renders_and_changes_the_release(block: str) -> None:
    base = {"redis": {"host": "redis"}, "pools": {"chat": {"model": {"name": "demo"}}}}
    values = yaml.safe_load(block)
    assert render(merged(base, values)).objects != render(base).objects
