"""What a batch leaves behind that ends before its lines have all run."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest

from api.batches import Batch
from api.deps import Services
from api.jobs import runner
from api.jobs.lines import Line

MODEL = "m"


class Batches:
    """One batch in memory. It has gone over to `ends_as` once `after` outcomes were produced, not yet stored."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.outcomes: dict[int, dict[str, Any]] = {}
        self.cancel = asyncio.Event()
        self.fields: dict[str, Any] = {}
        self.looks = 0

    async def find(self, tenant: str, batch_id: str) -> Batch:
        self.looks += 1
        if self.looks == 3:  # of the runner: at first, before the lines, and once some of them have run
            self.cancel.set()
            for _ in range(5):
                await asyncio.sleep(0)  # time in which a line may end, unseen by the loop that waits for it
            self.batch = replace(self.batch, status="cancelling")
        return self.batch

    async def advance(
        self, tenant: str, batch_id: str, allowed: Sequence[str], status: Any, **fields: Any
    ) -> str | None:
        if self.batch.status in allowed:
            self.batch = replace(self.batch, status=status)
            self.fields |= fields
        return self.batch.status

    async def hold(self, *_: object) -> bool:
        return True

    async def release(self, *_: object) -> None: ...

    async def count(self, *_: object) -> None: ...

    async def forget_open(self, *_: object) -> None: ...

    async def forget_lines(self, *_: object) -> None: ...

    async def lines(self, *_: object) -> dict[int, dict[str, Any]]:
        return dict(self.outcomes)

    async def save_line(self, tenant: str, batch: Batch, number: int, outcome: dict[str, Any]) -> None:
        self.outcomes[number] = outcome


class Files:
    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self.written: dict[str, list[dict[str, Any]]] = {}

    async def read(self, *_: object) -> AsyncIterator[bytes]:
        for name in self._names:
            line = {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": {"model": MODEL}}
            yield orjson.dumps(line) + b"\n"

    async def write(
        self, tenant: str, name: str, purpose: str, content: AsyncIterator[bytes], ttl_s: int, file_id: str
    ) -> None:
        self.written[file_id.split("-")[1]] = [orjson.loads(row) async for row in content]


class Run:
    """A run of four lines at a time, whose lines do what their names say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, names: Sequence[str], status: Any = "validating") -> None:
        batch = Batch("batch_1", status, "/v1/chat/completions", "file-1", "24h", 0, 2**40, 60, 60)
        self.batches, self.files = Batches(batch), Files(names)
        self.aborted: list[str] = []
        monkeypatch.setattr(runner, "run_line", self._line)
        monkeypatch.setattr(runner, "_LOOK_S", 0.01)
        self._services = SimpleNamespace(
            stores=SimpleNamespace(batches=self.batches, files=self.files),
            settings=SimpleNamespace(batch_concurrency=4),
            fleet=SimpleNamespace(abort=self._abort),
        )

    async def _line(
        self, services: Services, endpoint: str, batch: str, line: Line, expires_at: int
    ) -> Mapping[str, Any]:
        match line.custom_id.partition("-")[0]:
            case "late":
                await self.batches.cancel.wait()
            case "never":
                await asyncio.Event().wait()
            case _:
                pass
        status = 400 if line.custom_id.startswith("bad") else 200
        return {"custom_id": line.custom_id, "response": {"status_code": status, "body": {}}, "error": None}

    async def _abort(self, request_id: str, reason: str) -> None:
        self.aborted.append(request_id)

    async def run(self) -> None:
        await runner.BatchRun(cast(Services, self._services), "tenant", "batch_1").run()

    def told(self, kind: str) -> dict[str, str | None]:
        """Return the lines of a file, each with why it has not run."""
        rows = self.files.written.get(kind, [])
        return {row["custom_id"]: row["error"] and row["error"]["code"] for row in rows}

    @property
    def counts(self) -> tuple[int, int, int]:
        fields = self.batches.fields
        return fields["total"], fields["completed"], fields["failed"]


async def test_a_cancelled_batch_tells_every_line_once_and_counts_those_that_ran(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = Run(monkeypatch, ["good-1", "bad-2", "good-3", "never-4", "late-5", "never-6", "never-7", "never-8"])
    await batch.run()
    assert batch.batches.batch.status == "cancelled"
    assert batch.told("output") == {"good-1": None, "good-3": None, "late-5": None}
    unrun = {f"never-{number}": "batch_cancelled" for number in (4, 6, 7, 8)}
    assert batch.told("error") == {"bad-2": None, **unrun}
    assert batch.counts == (8, 3, 1)


async def test_what_has_run_when_its_batch_is_cancelled_is_not_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Run(monkeypatch, ["late-1", "never-2"])
    await batch.run()
    assert (batch.told("output"), batch.told("error")) == ({"late-1": None}, {"never-2": "batch_cancelled"})
    assert batch.aborted == [runner.request_id(MODEL, "batch_1", 2, 0)]


async def test_a_batch_that_is_cancelled_before_its_lines_are_read_counts_them_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = Run(monkeypatch, ["good-1", "good-2"], "cancelling")
    await batch.run()
    assert batch.batches.batch.status == "cancelled"
    assert batch.told("error") == {"good-1": "batch_cancelled", "good-2": "batch_cancelled"}
    assert batch.counts == (2, 0, 0)
