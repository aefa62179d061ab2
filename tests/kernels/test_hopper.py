"""Kernels compiled for Hopper, where there is none: the interpreter takes what the compiler refuses."""

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
GROUPS = ("mixtures", "small_experts", "statistics", "attentions", "products", "canvases")


@cache
def told(group: str) -> tuple[str, ...]:
    """Return what `tests.kernels.hopper` prints. A process of its own: in this one kernels are interpreted."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.hopper", group]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return tuple(ran.stdout.splitlines())


@pytest.mark.parametrize("group", GROUPS)
def test_what_the_operations_launch_compiles_for_hopper(group: str) -> None:
    assert told(group)


@pytest.mark.timeout(500)
def test_every_kernel_is_among_what_compiles() -> None:
    compiled = {" ".join(line.split()[:2]) for group in GROUPS for line in told(group)}
    assert compiled == set(told("launched"))
