"""A fleet under faults, and the oracle: `python -m tests.fleet.chaos` or `make chaos`.

Real worker processes with a real model, a real server with AOF, customers who follow their requests, and a monkey that
draws faults from `DIFFLEET_CHAOS_SEED` for `DIFFLEET_CHAOS_SECONDS`. In the end every accepted request must have ended
once, with every block once and the text of the undisturbed run, for the log and for its customer alike; nothing may be
pending, nothing queued, and no key may live for ever.
"""

import argparse
import asyncio
import math
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.client import FleetClient
from shared.commands import LANES
from shared.connection import open_sync_client
from shared.embedded import EmbeddedServer
from shared.events import Delta, Failed, Finished, decode_event, is_terminal
from shared.keys import GROUP, Keys, partition
from tests.fleet.customers import Customer, Visit, cook
from tests.fleet.diary import Interruption, Span, at_work, blocks_begun_again, interruptions, read_diary, uncovered
from tests.fleet.models import BLOCK_LENGTH, write_tiny_model
from tests.fleet.monkey import Monkey
from tests.fleet.network import Network
from tests.fleet.nursery import Child, Nursery

MODEL = "storm"
LEASE_MS = 1500
WORKERS = 3
CUSTOMERS = 16
LENGTHS = (4, 11, 30, 60, 90, 140)
"""Tokens of the requests on the menu; one forward each."""
DRAIN_S = 180.0
"""Patience for the last requests once the monkey has stopped."""


@dataclass
class Report:
    """What was done to the fleet, and what became of it."""

    seed: int
    seconds: float
    faults: Counter[str]
    requests: int = 0
    aborted: int = 0
    lost: list[str] = field(default_factory=list[str])
    """Accepted, and no good end."""
    repeated: list[str] = field(default_factory=list[str])
    """A seq, a block or an end twice."""
    gapped: list[str] = field(default_factory=list[str])
    wrong: list[str] = field(default_factory=list[str])
    """Another text than the undisturbed one."""
    left: list[str] = field(default_factory=list[str])
    """Pending or queued entries, keys without a TTL."""
    resumes_s: list[float] = field(default_factory=list[float])
    """As customers saw it: between the last block of one owner and the first of the next."""
    moves: int = 0
    """How often a request went from one owner to the next in mid-stream."""
    hits: int = 0
    """How often a request lost its worker."""
    interruptions: list[Interruption] = field(default_factory=list[Interruption])
    dark: list[Span] = field(default_factory=list[Span])
    """When no worker could work."""
    blocks: int = 0
    repeated_blocks: Counter[str] = field(default_factory=Counter[str])
    """Blocks that were begun again, by the fault that made it so."""

    @property
    def clean(self) -> bool:
        return not (self.lost or self.repeated or self.gapped or self.wrong or self.left)

    @property
    def crashes(self) -> int:
        return sum(self.faults[name] for name in ("worker kill -9", "worker frozen", "network paused", "Redis kill -9"))

    def _again(self, kind: str) -> float:
        """Return how many blocks were begun again for a request that met a fault."""
        met = sum(interruption.kind == kind for interruption in self.interruptions)
        return self.repeated_blocks[kind] / max(1, met)

    def lines(self) -> list[str]:
        whole = [interruption.total_s for interruption in self.interruptions]
        fleet = [interruption.fleet_s for interruption in self.interruptions]
        rows: list[tuple[str, object]] = [
            ("seed", self.seed),
            ("seconds", round(self.seconds)),
            *sorted(self.faults.items()),
            ("requests", self.requests),
            ("of them aborted by their customers", self.aborted),
            ("lost", len(self.lost)),
            ("repeated", len(self.repeated)),
            ("gapped", len(self.gapped)),
            ("wrong text", len(self.wrong)),
            ("left in Redis", len(self.left)),
            ("moves to another owner in mid-stream", self.moves),
            ("interruptions of requests", len(whole)),
            ("resume time p50, s", f"{quantile(fleet, 0.5):.2f}"),
            ("resume time p99, s", f"{quantile(fleet, 0.99):.2f}"),
            ("the same with dark time p50, s", f"{quantile(whole, 0.5):.2f}"),
            ("the same with dark time p99, s", f"{quantile(whole, 0.99):.2f}"),
            ("as customers saw it p50, s", f"{quantile(self.resumes_s, 0.5):.2f}"),
            ("as customers saw it p99, s", f"{quantile(self.resumes_s, 0.99):.2f}"),
            ("dark time (no worker there), s", f"{sum(span.end - span.start for span in self.dark):.1f}"),
            ("blocks committed", self.blocks),
            ("requests that lost their worker", self.hits),
            ("blocks begun again, per crash", f"{self.repeated_blocks.total() / max(1, self.crashes):.2f}"),
            ("for a request whose worker was killed", f"{self._again('worker kill -9'):.2f}"),
            ("for one whose worker was frozen", f"{self._again('worker frozen'):.2f}"),
            ("for one whose worker was cut off", f"{self._again('network paused'):.2f}"),
        ]
        return [f"{name:<38}{value!s:>12}" for name, value in rows]


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` of the others do not exceed; 0.0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * len(ordered)))] if ordered else 0.0


class Staff:
    """Keeps `WORKERS` workers alive: whoever ends is replaced, as an orchestrator would."""

    def __init__(self, nursery: Nursery, model: Path, urls: list[str]) -> None:
        self._nursery = nursery
        self._model = model
        self._urls = urls
        self._hired = 0
        self.workers: list[Child] = []
        self.lives: dict[int, Span] = {}
        """When each worker was ready; the end is infinite for those that are."""

    async def keep(self) -> None:
        while True:
            now, left = time.monotonic(), [worker for worker in self.workers if worker.alive]
            for worker in self.workers:
                life = self.lives.get(worker.pid)
                if worker not in left:
                    self.lives[worker.pid] = Span(now if life is None else life.start, now)
                elif life is None and worker.ready:
                    self.lives[worker.pid] = Span(now, math.inf)
            self.workers = left
            while len(self.workers) < WORKERS:
                await asyncio.to_thread(self._hire)
            await asyncio.sleep(0.05)

    def _hire(self) -> None:
        url = self._urls[self._hired % len(self._urls)]
        self._hired += 1
        flags = ["--redis-url", url, "--model", str(self._model), "--model-name", MODEL, "--threads", "1"]
        flags += ["--lease-ms", str(LEASE_MS), "--max-attempts", "100", "--max-rows", "8", "--drain-s", "0.3"]
        flags += ["--redis-wait-s", "120", "--log-format", "text", "--preview-interval-ms", "0"]
        self.workers.append(self._nursery.spawn(*flags, remote=url != self._urls[0]))


async def run(seed: int, seconds: float) -> Report:
    with tempfile.TemporaryDirectory(prefix="df-") as name:
        folder = Path(name)
        # The promise is as good as the server: it has to keep what it has acknowledged.
        server = EmbeddedServer(folder, fsync="always")
        server.start()
        nursery = Nursery(folder)
        try:
            model = write_tiny_model(folder / "model")
            async with Network(server.socket_path) as network:
                return await _run(seed, seconds, server, nursery, model, network)
        finally:
            nursery.close()
            server.stop()


async def _run(
    seed: int, seconds: float, server: EmbeddedServer, nursery: Nursery, model: Path, network: Network
) -> Report:
    staff = Staff(nursery, model, [server.url, network.url])
    keeper = asyncio.create_task(staff.keep())
    monkey = Monkey(seed, lambda: staff.workers, server, network, LEASE_MS / 1000)
    async with FleetClient.connect(server.url) as near, FleetClient.connect(network.url) as far:
        async with asyncio.timeout(150):
            while MODEL not in await near.models():
                await asyncio.sleep(0.05)
            menu = await cook(near, MODEL, LENGTHS)
        customers = [Customer([near, far], MODEL, menu, seed * 1000 + number) for number in range(CUSTOMERS)]
        stays = [asyncio.create_task(customer.stay()) for customer in customers]
        began = time.monotonic()
        rage = asyncio.create_task(monkey.rage())
        await asyncio.wait([*stays, rage, keeper], timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        monkey.stopped = True
        for customer in customers:
            customer.leaving = True
        await rage
        report = Report(seed, time.monotonic() - began, monkey.faults)
        done, waiting = await asyncio.wait(stays, timeout=DRAIN_S)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        for task in done:
            task.result()
    visits = [visit for customer in customers for visit in customer.visits if visit.accepted]
    judge(report, visits, server.url)
    lines = read_diary(nursery.diary)
    faults = sorted(monkey.hits, key=lambda fault: fault.span.start)
    report.repeated_blocks = blocks_begun_again(lines, faults)
    whole = Span(lines[0].at, lines[-1].at)
    report.dark = uncovered(whole, at_work(staff.lives, faults))
    accepted = {visit.id for visit in visits}
    report.interruptions = [
        interruption
        for interruption in interruptions(lines, faults, report.dark)
        if interruption.request_id in accepted
    ]
    return report


def judge(report: Report, visits: list[Visit], url: str) -> None:
    """Fill in what became of the requests."""
    redis: Any = open_sync_client(url)
    report.requests = len(visits)
    for visit in visits:
        _judge_customer(report, visit)
        _judge_log(report, visit, redis)
    keys = Keys(partition(MODEL))
    for lane in (keys.lane(lane) for lane in LANES):
        if redis.exists(lane):
            queued, pending = redis.xlen(lane), redis.xpending(lane, GROUP)["pending"]
            report.left += [f"{lane}: {queued} queued, {pending} pending"] if queued or pending else []
    lasting = ("card", "q:rt", "q:std", "q:bulk", "dlq", "df:models")
    for key in redis.scan_iter():
        if redis.ttl(key) == -1 and not key.decode().endswith(lasting):
            report.left.append(f"{key.decode()} lives for ever")
    if letters := redis.xlen(keys.dead_letters()):
        report.left.append(f"{letters} dead letters")
    redis.close()


def _judge_customer(report: Report, visit: Visit) -> None:
    """What the customer saw: every seq once, its end once, the right text."""
    seqs = [delta.seq for delta in visit.deltas]
    if len(set(seqs)) != len(seqs) or len(visit.ends) > 1:
        report.repeated.append(f"{visit.id}: its customer got {seqs} and {len(visit.ends)} ends")
    elif seqs != list(range(2, 2 + len(seqs))):
        report.gapped.append(f"{visit.id}: its customer got {seqs}")
    text = "".join(delta.text for delta in visit.deltas)
    tokens = tuple(token for delta in visit.deltas for token in delta.token_ids)
    match visit.ends:
        case [Finished(reason="aborted")] if visit.asked_to_abort:
            report.aborted += 1
            right = visit.dish.text.startswith(text) and visit.dish.tokens[: len(tokens)] == tokens
        case [Finished()]:
            right = (text, tokens) == (visit.dish.text, visit.dish.tokens)
        case [Failed() as end]:
            report.lost.append(f"{visit.id}: {end.code}, {end.message}")
            return
        case _:
            report.lost.append(f"{visit.id}: no end")
            return
    if not right:
        report.wrong.append(f"{visit.id}: {text!r} for {visit.dish.text!r}")
    report.resumes_s += visit.resumes_s
    report.moves += len(visit.resumes_s)
    report.blocks += -(-len(tokens) // BLOCK_LENGTH)


def _judge_log(report: Report, visit: Visit, redis: Any) -> None:
    """What the log holds: ids without a hole, blocks in order, one end, and the same as the customer saw."""
    entries = redis.xrange(Keys.of(visit.id).log(visit.id))
    ids = [entry_id.decode() for entry_id, _ in entries]
    events = [decode_event(fields[b"d"]) for _, fields in entries]
    if ids != [f"{seq}-0" for seq in range(2, len(ids) + 2)]:
        report.gapped.append(f"{visit.id}: its log has {ids}")
    if sum(is_terminal(event) for event in events) != 1 or not is_terminal(events[-1]):
        report.repeated.append(f"{visit.id}: {sum(map(is_terminal, events))} ends in its log")
    logged = [(event.seq, event.token_ids) for event in events if isinstance(event, Delta)]
    report.hits += max(0, int(redis.hget(Keys.of(visit.id).request(visit.id), "att") or 1) - 1)
    if visit.ends and logged != [(delta.seq, delta.token_ids) for delta in visit.deltas]:
        report.wrong.append(f"{visit.id}: its log and its customer differ")


def main() -> int:
    seed = int(os.environ.get("DIFFLEET_CHAOS_SEED", "1"))
    seconds = float(os.environ.get("DIFFLEET_CHAOS_SECONDS", "60"))
    report = asyncio.run(run(seed, seconds))
    print("\n".join(report.lines()))
    for fault in (*report.lost, *report.repeated, *report.gapped, *report.wrong, *report.left)[:20]:
        print(fault)
    return 0 if report.clean else 1


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    sys.exit(main())
