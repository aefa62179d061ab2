"""The wheel that images install: built here, installed into an empty environment, imported from there."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("api", "worker", "shared", "kernels")

INSPECT = """
import importlib, json, pathlib, shared
found = {name: importlib.import_module(name).__file__ for name in %r}
scripts = sorted(path.name for path in pathlib.Path(shared.__file__).parent.glob("scripts/*.lua"))
from shared.cli.bundled import bundled_models
models = {name: sorted(file.name for file in model.folder.iterdir()) for name, model in bundled_models().items()}
print(json.dumps({"found": found, "scripts": scripts, "models": models}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("diffleet-*.whl"))


def _tracked(pattern: str) -> set[str]:
    listed = subprocess.run(["git", "ls-files", "--", *pattern.split()], cwd=ROOT, capture_output=True, text=True)
    return set(listed.stdout.split())


@pytest.mark.slow
def test_the_wheel_holds_the_four_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == set(PACKAGES)
    assert not [name for name in names if "__pycache__" in name or name.endswith((".pyc", ".log"))]


@pytest.mark.slow
def test_the_wheel_has_every_committed_script_and_model_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    wanted = _tracked("shared/scripts/*.lua worker/demo/models api/playground")
    assert wanted
    assert wanted <= names


@pytest.mark.slow
def test_the_installed_wheel_imports_finds_its_data_and_has_the_command(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", str(wheel)]
    done = subprocess.run(install, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    # Dependencies are lent by this environment. PYTHONPATH reads no .pth, so an editable Diffleet in it stays unseen.
    lent = {"PYTHONPATH": sysconfig.get_paths()["purelib"], "PATH": os.environ["PATH"]}

    def run(*command: str) -> str:
        ran = subprocess.run(command, cwd=tmp_path, env=lent, capture_output=True, text=True, timeout=60)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    report = json.loads(run(str(python), "-c", INSPECT % (PACKAGES,)))
    assert all(Path(file).is_relative_to(environment) for file in report["found"].values()), report["found"]
    assert report["scripts"] == sorted(path.name for path in (ROOT / "shared" / "scripts").glob("*.lua"))
    for name, files in report["models"].items():
        assert {"config.json", "tokenizer.json"} <= set(files), name
    assert run(str(environment / "bin" / "diffleet"), "--version").startswith("diffleet ")
