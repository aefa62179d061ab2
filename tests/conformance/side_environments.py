"""Environments for clients that must not be mixed with the project's own; kept in the cache between runs."""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "diffleet" / "clients"


def environment(name: str, requirements: Sequence[str]) -> Path:
    """Return the interpreter of an environment with these requirements; it is made if it is not there."""
    digest = hashlib.sha256("\n".join(requirements).encode()).hexdigest()[:12]
    folder = _CACHE / f"{name}-{digest}"
    python = folder / "bin" / "python"
    if not (folder / "ready").is_file():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements]
        subprocess.run(install, check=True)
        (folder / "ready").touch()
    return python


def overlay(name: str, requirements: Sequence[str]) -> Path:
    """Return a folder with these packages and nothing that they need, to be put before this interpreter's own."""
    digest = hashlib.sha256("\n".join(requirements).encode()).hexdigest()[:12]
    folder = _CACHE / f"{name}-alone-{digest}"
    if not (folder / "ready").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*install, "--target", str(folder), *requirements], check=True)
        (folder / "ready").touch()
    return folder
