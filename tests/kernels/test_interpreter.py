"""Triton's interpreter, which runs the kernels where there is no GPU, in the order that pytest happens to import in."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.gpu_cases import ON_GPU

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(ON_GPU, reason="kernels are compiled here")
def test_kernels_are_interpreted_also_behind_a_test_that_imports_triton_itself(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    tests = ["tests/goldens/test_embeddings.py", "tests/kernels/test_router_logits.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:xdist", *tests, "-k", "narrow"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)
    assert ran.returncode == 0, ran.stdout[-2000:]
