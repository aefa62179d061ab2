"""Who may import whom, and that the names are ours."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("api", "worker", "shared", "kernels")


@pytest.mark.slow
def test_the_import_contracts_hold() -> None:
    lint_imports = shutil.which("lint-imports", path=str(Path(sys.executable).parent))
    assert lint_imports is not None, "import-linter is part of the dev extra"
    done = subprocess.run([lint_imports, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("package", PACKAGES)
def test_a_bare_package_name_is_ours(package: str) -> None:
    # An installed distribution of the same name (there is a public one called kernels) would shadow it or be shadowed.
    module = __import__(package)
    assert module.__file__ is not None
    assert Path(module.__file__).parent == ROOT / package


def test_the_command_line_loads_no_model_code_and_no_web_framework() -> None:
    script = (
        "import sys; import shared.cli.commands, shared.cli.up;"
        "print([name for name in ('torch', 'worker', 'kernels', 'api', 'fastapi', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
