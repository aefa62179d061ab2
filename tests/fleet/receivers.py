"""Receivers of webhooks as processes of their own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.conformance.fleet import free_port
from tests.fleet.processes import REPOSITORY


class Receiver:
    """A process that takes messages; it can be away, and come back on the same port."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._file = folder / "told.jsonl"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook?token=secret-in-url"

    def start(self, *statuses: int) -> "Receiver":
        command = [sys.executable, "-m", "tests.fleet.webhook_receiver", str(self.port), str(self._file)]
        self._process = subprocess.Popen([*command, *map(str, statuses)], cwd=REPOSITORY)
        return self

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(20)
            self._process = None

    @property
    def told(self) -> list[Any]:
        return [json.loads(line) for line in self._file.read_text().splitlines()] if self._file.exists() else []
