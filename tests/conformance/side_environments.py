"""Environments for clients that must not be mixed with the project's own; kept in the cache between runs."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def environment(name: str, requirements: Sequence[str]) -> Path:
    """Return the interpreter of an environment with these requirements; it is made if it is not there."""
    digest = hashlib.sha256("\n".join(requirements).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = cache / "diffleet" / "clients" / f"{name}-{digest}"
    python = folder / "bin" / "python"
    if not (folder / "ready").is_file():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements]
        subprocess.run(install, check=True)
        (folder / "ready").touch()
    return python
