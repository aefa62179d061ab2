"""Run one batch from where it stands to its end.

The batch object in Redis is the truth; a lease keeps two processes from running one batch. Whoever takes over reads
the outcomes that are stored and runs the other lines again: their requests have ids made of batch and line, so the
fleet finds what was submitted before.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from secrets import token_hex

import orjson

from api.batches import Batch, BatchStatus
from api.deps import Services
from api.jobs.lines import Faults, Line, read_lines, request_count, request_id, run_line, unfinished

logger = logging.getLogger("diffleet.jobs")

LEASE_MS = 6_000
_RENEW_S = 1.5
_LOOK_S = 0.5


class BatchRun:
    def __init__(self, services: Services, tenant: str, batch_id: str) -> None:
        self._services = services
        self._batches = services.stores.batches
        self._files = services.stores.files
        self._tenant = tenant
        self._id = batch_id
        self._holder = token_hex(8)

    async def run(self) -> None:
        """Return when the batch has ended, or somebody else runs it. Raises `FleetUnavailable`."""
        if not await self._batches.hold(self._tenant, self._id, self._holder, LEASE_MS):
            return
        work = asyncio.create_task(self._work())
        try:
            while not work.done():
                await asyncio.wait({work}, timeout=_RENEW_S)
                if not work.done() and not await self._batches.hold(self._tenant, self._id, self._holder, LEASE_MS):
                    return
            work.result()
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            with contextlib.suppress(Exception):
                # If this fails the lease ends by itself.
                await self._batches.release(self._tenant, self._id, self._holder)

    async def _work(self) -> None:
        batch = await self._batches.find(self._tenant, self._id)
        if batch is None:
            await self._batches.forget_open(self._tenant, self._id)
            return
        logger.info("batch goes on", extra={"batch": batch.id, "status": batch.status})
        lines = await read_lines(self._files.read(self._tenant, batch.input_file_id), batch.endpoint)
        if isinstance(lines, Faults):
            await self._advance(["validating", "in_progress"], "failed", errors=orjson.dumps(lines.entries))
            await self._finish_cancelled(batch, [])
            return
        model = lines[0].body.get("model")
        named = {"model": model} if isinstance(model, str) else {}
        await self._advance(["validating"], "in_progress", total=len(lines), **named)
        status = await self._run_lines(batch, lines)
        match status:
            case "in_progress" | "finalizing":
                await self._advance(["in_progress"], "finalizing")
                await self._finish(batch, lines, ["finalizing"], "completed", None)
            case "expired":
                await self._finish(
                    batch, lines, ["in_progress"], "expired", ("batch_expired", "the batch ran out of time")
                )
            case "cancelling":
                await self._finish_cancelled(batch, lines)
            case _:
                await self._batches.forget_open(self._tenant, self._id)

    async def _run_lines(self, batch: Batch, lines: Sequence[Line]) -> BatchStatus | None:
        """Run what has no outcome yet, until all have one, the batch is cancelled or its time is up."""
        done = await self._batches.lines(self._tenant, self._id)
        todo = iter([line for line in lines if line.number not in done])
        completed = sum(_succeeded(outcome) for outcome in done.values())
        failed = len(done) - completed
        running: dict[asyncio.Task[dict[str, object]], Line] = {}
        looked = 0.0
        status: BatchStatus | None = "in_progress"
        try:
            while True:
                if time.monotonic() - looked >= _LOOK_S:
                    looked = time.monotonic()
                    now = await self._batches.find(self._tenant, self._id)
                    status = None if now is None else now.status
                    if status != "in_progress":
                        break
                    if time.time() >= batch.expires_at:
                        status = "expired"
                        break
                while len(running) < self._services.settings.batch_concurrency and (line := next(todo, None)):
                    call = run_line(self._services, batch.endpoint, batch.id, line, batch.expires_at)
                    running[asyncio.create_task(call)] = line
                if not running:
                    break
                ended, _ = await asyncio.wait(running, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    line, outcome = running.pop(task), task.result()
                    await self._batches.save_line(self._tenant, batch, line.number, outcome)
                    completed += _succeeded(outcome)
                    failed += not _succeeded(outcome)
                if ended:
                    await self._batches.count(self._tenant, self._id, completed, failed)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        if status in ("cancelling", "expired"):
            unrun: list[Line] = []
            for task, line in running.items():
                # One that ended while the status was read has run.
                if task.cancelled() or task.exception() is not None:
                    unrun.append(line)
                else:
                    await self._batches.save_line(self._tenant, batch, line.number, task.result())
            await self._abort(unrun)
        return status

    async def _abort(self, lines: Iterable[Line]) -> None:
        for line in lines:
            model = line.body.get("model")
            names = [model] if isinstance(model, str) else await self._services.catalog.names()
            for name in names:
                for index in range(request_count(line.body)):
                    await self._services.fleet.abort(request_id(name, self._id, line.number, index), "batch ended")

    async def _finish_cancelled(self, batch: Batch, lines: Sequence[Line]) -> None:
        await self._finish(batch, lines, ["cancelling"], "cancelled", ("batch_cancelled", "the batch was cancelled"))

    async def _finish(
        self,
        batch: Batch,
        lines: Sequence[Line],
        allowed: Sequence[BatchStatus],
        status: BatchStatus,
        unrun: tuple[str, str] | None,
    ) -> None:
        """Write the files, then move on: whoever sees the batch ended can read them.

        Lines that have not run are told in the file of errors, as `unrun` says, and count in the total alone.
        """
        done = await self._batches.lines(self._tenant, self._id)
        good = [done[line.number] for line in lines if line.number in done and _succeeded(done[line.number])]
        bad = [done[line.number] for line in lines if line.number in done and not _succeeded(done[line.number])]
        if unrun is not None:
            bad += [unfinished(batch.id, line, *unrun) for line in lines if line.number not in done]
        stem = batch.id.removeprefix("batch_")
        fields: dict[str, str | bytes | int] = {"usage": orjson.dumps(_usage(good))}
        for kind, rows in (("output", good), ("error", bad)):
            if rows:
                name = f"file-{kind}-{stem}"
                await self._files.write(
                    self._tenant, f"{batch.id}_{kind}.jsonl", "batch_output", _jsonl(rows), batch.output_ttl_s, name
                )
                fields[f"{kind}_file_id"] = name
        # The total too: a batch that was cancelled before its lines were read has none.
        fields |= {"total": len(lines), "completed": len(good), "failed": len(done) - len(good)}
        await self._advance(allowed, status, **fields)
        await self._batches.forget_lines(self._tenant, self._id)
        logger.info("batch ended", extra={"batch": batch.id, "status": status, "lines": len(lines)})

    async def _advance(self, allowed: Sequence[BatchStatus], status: BatchStatus, **fields: str | bytes | int) -> None:
        await self._batches.advance(self._tenant, self._id, allowed, status, **fields)


def _succeeded(outcome: Mapping[str, object]) -> bool:
    match outcome.get("response"):
        case {"status_code": 200}:
            return True
        case _:
            return False


def _usage(outcomes: Sequence[Mapping[str, object]]) -> dict[str, int]:
    total = {"input_tokens": 0, "output_tokens": 0}
    for outcome in outcomes:
        match outcome:
            case {"response": {"body": {"usage": {"prompt_tokens": int(given), "completion_tokens": int(made)}}}}:
                total["input_tokens"] += given
                total["output_tokens"] += made
            case {"response": {"body": {"usage": {"input_tokens": int(given), "output_tokens": int(made)}}}}:
                total["input_tokens"] += given
                total["output_tokens"] += made
            case {"response": {"body": {"usage": {"prompt_tokens": int(given)}}}}:
                # An embedding.
                total["input_tokens"] += given
            case _:
                pass
    return total


async def _jsonl(rows: Sequence[Mapping[str, object]]) -> AsyncIterator[bytes]:
    for row in rows:
        yield orjson.dumps(row) + b"\n"
