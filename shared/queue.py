"""The worker's side of the queue: claim requests, commit their blocks, end them, give them back.

A claim has an epoch, and every write carries it: once a request has moved to another worker, the writes of the first
are refused (`Outcome.FENCED`) and it drops its slot. The protocol's scripts are the only writers of request state.
"""

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Self, assert_never

from redis import exceptions

from shared.adapters import TARGETS_FILE
from shared.card import InvalidCard, ModelCard, differences, pack, unpack
from shared.commands import LANES, WIRE_VERSION, Lane
from shared.connection import Argument, FleetUnavailable, GroupMissing, Link, jitter_s
from shared.events import Delta, Event, Failed, Finished, InvalidEvent, Snapshot, Started, decode_event, encode_event
from shared.keys import GROUP, MODELS, Keys, partition
from shared.keys import card as card_key
from shared.lanes import Entry, LaneReader
from shared.lua import script
from shared.memory import NO_WORK, MemoryGauge
from shared.orders import OrderBook, Orders
from shared.roster import WorkerInfo, is_deserted, read_roster

log = logging.getLogger(__name__)

LEASE_MS = 15_000
MAX_ATTEMPTS = 4
"""Attempts before a request may be given up: then, if its last worker was lost while it ran nothing else."""
MAX_BLOCK_MS = 4_000
"""Longest blocking read: the socket's timeout is twice that."""
_ROUND = 8
"""In so many claims each lane is the first to be read at least once, so that none starves."""
_OTHER_ORDERS: dict[int, tuple[Lane, ...]] = {0: ("bulk", "std", "rt"), _ROUND // 2: ("std", "rt", "bulk")}
"""Turns of a round that do not read by priority."""
_EMPTY_YOURSELF = 2
"""What `take` says of an officer whose requests others can go on with."""
_MOST_LOOKERS = 8
"""Beyond it the pause between looks grows no more: a worker with the only free slot must not leave it empty long."""
_AMID_A_BURST = 4
"""By how much sooner a worker that is alone looks again where it has just found something."""
_FORGET_EVERY_S = 60.0
_FORGET_AFTER_MS = 600_000


class Outcome(Enum):
    """What became of a write."""

    OK = 1
    DUPLICATE = 0
    """It was there already: a retry whose first answer was lost."""
    FENCED = -1
    """The request is no longer this claim's: drop it, write nothing more."""
    GAP = -2
    """A seq is missing before it: a fault of the writer; nothing was written."""


@dataclass(frozen=True, slots=True)
class Published:
    """What became of a model's card when a worker published its own."""

    differs: tuple[str, ...] = ()
    """Fields and files in which the former card was another, `version` if it was written by another program; empty:
    there was none, or the same."""
    others: int = 0
    """Other workers of the model that took requests then, if the former card was another."""
    kept: bool = False
    """The former one stays, since those others take adapters and this worker does not."""
    adapters: bool = False
    """The former one was of workers that take adapters."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A request that this worker owns from now on."""

    id: str
    epoch: int
    attempt: int
    """How many workers have claimed it, this one included; hand-backs and lost replies do not count."""
    payload: bytes
    """The command envelope, see `shared.commands.decode_command`."""
    blocks: int
    """Committed blocks."""
    seq: int
    """The last durable seq."""
    queued_ms: int
    """Since the submit."""
    log: list[Event] = field(default_factory=list[Event])
    """The committed deltas so far, in order: what the next block continues."""


class WorkerQueue:
    """The lanes of one model, seen by one worker. For one event loop; calls may overlap, except `take` and `wait`."""

    def __init__(
        self,
        link: Link,
        reader: LaneReader,
        model: str,
        worker_id: str,
        lease_ms: int = LEASE_MS,
        max_attempts: int = MAX_ATTEMPTS,
        partitions: int = 1,
        reap_every_ms: int | None = None,
        slots: int = 1,
    ) -> None:
        self._link = link
        self._memory = MemoryGauge(link)
        self._reader = reader
        self._model = model
        self._worker = worker_id
        self._lease_ms = lease_ms
        self._reap_every_s = (lease_ms / 3 if reap_every_ms is None else reap_every_ms) / 1000
        self._max_attempts = max_attempts
        self._slots = slots
        self._probation: _Partition | None = None
        self._make_room = False
        self._could_give_back = False
        self._workers = 1
        self._partitions = [_Partition(Keys(partition(model, number))) for number in range(partitions)]
        self._turn = 0
        self._forget_at = time.monotonic() + random.uniform(0.5, 1.0) * _FORGET_EVERY_S
        self._group_failures = 0
        self._dropped = 0
        self._deserted: tuple[object, float] | None = None
        """The card of which no live worker was seen, and since when (monotonic)."""

    @classmethod
    def connect(
        cls,
        url: str,
        model: str,
        worker_id: str,
        lease_ms: int = LEASE_MS,
        max_attempts: int = MAX_ATTEMPTS,
        partitions: int = 1,
        reap_every_ms: int | None = None,
        slots: int = 1,
    ) -> Self:
        """Build a queue with its own connections; nothing is sent before the first call.

        `reap_every_ms`: how often `take` looks for what other workers lost; unset, a third of the lease. `slots`: how
        many requests this worker runs at the same time, of which it runs fewer while it looks for one that kills.
        """
        reader = LaneReader(url, worker_id, [Keys(partition(model, number)) for number in range(partitions)])
        return cls(
            Link.open(url),
            reader,
            model,
            worker_id,
            lease_ms,
            max_attempts,
            partitions,
            reap_every_ms=reap_every_ms,
            slots=slots,
        )

    @property
    def dropped(self) -> int:
        """How many entries of the lanes this worker has removed because no submit can have written them."""
        return self._dropped

    @property
    def on_probation(self) -> bool:
        """True while `take` gives nothing but the suspects of a crash, a group at a time, to this worker alone."""
        return self._probation is not None

    @property
    def wants_room(self) -> bool:
        """True if the last `take` found suspects that wait for this worker, and others for what it runs."""
        return self._make_room

    @property
    def alone(self) -> bool:
        """True if the last `take` found no other worker of the model: what this one leaves is left to nobody."""
        return self._workers <= 1

    def pause_s(self, poll_s: float, found: bool) -> float:
        """Return how long a worker that runs something waits before it takes again; `found`: the last take gave some.

        Of several workers each looks so much more seldom as there are others who look too, up to `_MOST_LOOKERS`: what
        comes is found as soon, and the queue is not asked the more the larger the fleet. At different times, or all
        would look at once. One that is alone and finds something is amid a burst, whose rest nobody else will take.
        """
        if self._probation is not None:
            return poll_s
        if found:
            return poll_s / _AMID_A_BURST if self.alone else poll_s
        return poll_s * random.uniform(0.75, 1.25) * max(1, min(self._workers, _MOST_LOOKERS))

    async def take(self, limit: int, held: int = 0) -> list[Claim]:
        """Claim up to `limit` requests without waiting, those that other workers lost first.

        `held`: how many the worker runs. Suspects of a crash come by themselves: none before the worker is empty, and
        nothing else after them until it is empty again.

        Raises `FleetUnavailable`; what was claimed but could not be told idles out of the lease and is claimed again.
        """
        if limit < 1:
            return []
        self._turn += 1
        self._make_room = False
        await self._forget_idle_consumers()
        claims: list[Claim] = []
        count = len(self._partitions)
        parts = [self._partitions[(self._turn + offset) % count] for offset in range(count)]
        for part in parts if self._probation is None else [self._probation]:
            if len(claims) < limit:
                claims += await self._take_from(part, limit - len(claims), held + len(claims))
            if self._probation is not None:
                break
        return claims

    async def wait(self, timeout_ms: int, limit: int = 1) -> list[Claim]:
        """Wait for new requests, for an idle worker; claim up to `limit` of those that come.

        Never cancel it: what a cancelled read was given stays unseen until its lease ends. At most `MAX_BLOCK_MS`.
        """
        try:
            read = await self._reader.read(max(1, min(timeout_ms, MAX_BLOCK_MS)))
        except GroupMissing:
            await self._create_groups()
            return []
        entries: dict[str, list[Entry]] = {}
        for entry in read:
            entries.setdefault(entry.lane.rpartition(":q:")[0], []).append(entry)
        claims: list[Claim] = []
        for part in self._partitions:
            if found := entries.get(part.keys.lane("rt").rpartition(":q:")[0]):
                claims += await self._start(part, found, limit - len(claims))
        return claims

    async def emit(self, events: Sequence[Delta]) -> list[Outcome]:
        """Commit blocks, one outcome each, in one round trip; idempotent, retried for a few seconds."""
        if not events:
            return []
        calls: list[tuple[list[str], list[Argument]]] = []
        for event in events:
            keys = Keys.of(event.id)
            names = [keys.request(event.id), keys.log(event.id), keys.channel(event.id)]
            calls.append((names, [event.epoch, self._worker, *_block(event)]))
        replies = await self._link.run_many(script("emit"), calls)
        return [Outcome(reply) for reply in replies]

    async def preview(self, events: Sequence[Started | Snapshot]) -> None:
        """Publish what is never stored. Lost without a word while Redis is away or nearly full."""
        if not events or await self._memory.share(self._partitions[0].keys) >= NO_WORK:
            return
        publishes = [("PUBLISH", Keys.of(event.id).channel(event.id), encode_event(event)) for event in events]
        try:
            await self._link.pipeline(publishes)
        except FleetUnavailable:
            return

    async def finish(self, last: Delta | None, terminal: Finished | Failed) -> Outcome:
        """Commit the last block, the terminal event and the acknowledgement together; idempotent, retried."""
        [outcome] = await self.finish_all([(last, terminal)])
        return outcome

    async def finish_all(self, ends: Sequence[tuple[Delta | None, Finished | Failed]]) -> list[Outcome]:
        """Do what `finish` does for several requests, one outcome each, in one round trip."""
        if not ends:
            return []
        calls: list[tuple[list[str], list[Argument]]] = []
        for last, terminal in ends:
            keys, lanes = _names(terminal.id)
            names = [keys.request(terminal.id), keys.log(terminal.id), keys.channel(terminal.id), keys.rate(), *lanes]
            if isinstance(terminal, Finished):
                terminal = replace(terminal, ended_ms=time.time_ns() // 1_000_000)
            ending: list[Argument] = [terminal.seq, terminal.t, encode_event(terminal)]
            block = _costs(terminal) if last is None else _block(last)
            calls.append((names, [terminal.epoch, self._worker, GROUP, _state(terminal), *ending, *block]))
        replies = await self._link.run_many(script("finish"), calls)
        return [Outcome(reply) for reply in replies]

    async def hand_back(self, request_id: str, epoch: int, delay_ms: int = 0) -> Outcome:
        """Give a request back at a block boundary: the next worker takes it at once, or after `delay_ms` (< lease)."""
        keys, lanes = _names(request_id)
        names = [keys.request(request_id), keys.handed_back(), *lanes]
        args = [epoch, GROUP, self._worker, self._lease_ms, delay_ms, 0]
        return Outcome(await self._link.run_again(script("hand_back"), names, args))

    async def pass_on(self, request_id: str, epoch: int, delay_ms: int, most: int) -> bool:
        """Give back a request that this worker is unable to run; False if `most` workers have tried.

        Then it is still this worker's, which has to end it.
        """
        keys, lanes = _names(request_id)
        names = [keys.request(request_id), keys.handed_back(), *lanes]
        args = [epoch, GROUP, self._worker, self._lease_ms, delay_ms, most]
        return Outcome(await self._link.run_again(script("hand_back"), names, args)) is not Outcome.DUPLICATE

    async def orders(self) -> Orders:
        """Return what operators ask of this worker."""
        return await OrderBook(self._link).read(self._model, self._worker)

    async def find_aborted(self, request_ids: Sequence[str]) -> dict[str, str]:
        """Return those of the requests that are to be aborted, with the reasons, in one round trip."""
        by_part: dict[str, list[str]] = {}
        for request_id in request_ids:
            by_part.setdefault(Keys.of(request_id).part, []).append(request_id)
        found: dict[str, str] = {}
        for part, ids in by_part.items():
            reasons: list[bytes | None] = await self._link.read(
                "MGET", *[Keys(part).abort(request_id) for request_id in ids]
            )
            for request_id, reason in zip(ids, reasons, strict=True):
                if reason is not None:
                    found[request_id] = reason.decode(errors="replace")
        return found

    async def publish_card(self, card: ModelCard) -> Published:
        """Write the model card, unless the one there has its digest, or says the same and what adapters need besides.

        That one stays while there are other workers: they go on taking requests with adapters.
        """
        key = card_key(card.name)
        published = await self._compare(card, await self._link.read("HGETALL", key))
        if not published.kept:
            await self._write(card, "*")
        await self._link.read("SADD", MODELS, card.name)
        return published

    async def _compare(self, card: ModelCard, fields: dict[bytes, bytes]) -> Published:
        if not fields or fields.get(b"digest") == card.digest.encode():
            return Published()
        others = sum(info.state == "ready" and info.id != self._worker for info in await self._roster())
        try:
            former = unpack(fields)
        except InvalidCard:
            return Published(("version",), others)
        # A newer program may say what this one cannot read.
        differs = differences(card, former) or ("version",)
        adapters = TARGETS_FILE in former.files
        kept = differs == (TARGETS_FILE,) and adapters and TARGETS_FILE not in card.files and others > 0
        return Published(differs, others, kept, adapters)

    async def restore_card(self, card: ModelCard) -> None:
        """Write the model card if there is none at all: Redis has restarted without its data."""
        if not await self._link.read("EXISTS", card_key(card.name)):
            await self.publish_card(card)

    async def reclaim_card(self, card: ModelCard) -> Published | None:
        """Write the model card if no worker has the one there any more, so that fronts follow one who lives.

        That must have been so at every look for a lease's time: also a live worker is unheard for as long while Redis
        is away. Returns what was other, None if the card there stays; of several who try at a time one wins.
        """
        key = card_key(card.name)
        try:
            found: list[bytes | None] = await self._link.read("HMGET", key, "digest", "by")
            digest, by = found
            own = digest == card.digest.encode()
            if digest is None or own or not is_deserted(digest.decode(errors="replace"), await self._roster()):
                self._deserted = None
                return None
            there, now = (digest, by), time.monotonic()
            if self._deserted is None or self._deserted[0] != there:
                self._deserted = there, now
            if now - self._deserted[1] < self._lease_ms / 1000:
                return None
            former = await self._compare(card, await self._link.read("HGETALL", key))
            won = await self._write(card, by or b"")
        except FleetUnavailable:
            self._deserted = None
            raise
        self._deserted = None
        return replace(former, kept=False) if won else None

    async def _write(self, card: ModelCard, condition: str | bytes) -> bool:
        """Write the card if the one there was published by that worker ("*": by any); return whether it was."""
        fields: list[Argument] = [part for pair in pack(card).items() for part in pair]
        args = [card.digest, self._worker, condition, *fields]
        return bool(await self._link.run_again(script("publish_card"), [card_key(card.name)], args))

    async def _roster(self) -> list[WorkerInfo]:
        return await read_roster(self._link, self._partitions[0].keys)

    async def close(self) -> None:
        """Leave the group, if nothing of this worker is pending in it, and close the connections."""
        try:
            for part in self._partitions:
                lanes = [part.keys.lane(lane) for lane in LANES]
                await self._link.run(script("forget_consumers"), lanes, [GROUP, self._worker, "", 0])
                await self._link.command("DEL", part.keys.worker(self._worker))
                if part is self._probation:
                    await self._link.command("ZREM", part.keys.officers(), self._worker)
                await self._link.command("ZREM", part.keys.workers(), self._worker)
        except FleetUnavailable:
            pass  # Others forget an idle consumer, and the worker's hash expires.
        finally:
            await self._link.close()
            await self._reader.close()

    async def _take_from(self, part: "_Partition", limit: int, held: int) -> list[Claim]:
        order = _OTHER_ORDERS.get(self._turn % _ROUND, LANES)
        if part.was_away:
            # While Redis was away nobody could beat: leave the others a lease's time before their leases count.
            part.reap_at = time.monotonic() + self._lease_ms / 1000
        reap = time.monotonic() >= part.reap_at
        names = [*[part.keys.lane(lane) for lane in order], part.keys.dead_letters()]
        names += [part.keys.handed_back(), part.keys.rate(), part.keys.officers(), part.keys.workers()]
        limits: list[Argument] = [limit, self._lease_ms, int(reap), self._max_attempts, WIRE_VERSION, self._slots, held]
        cursors = [part.cursors[lane] for lane in order]
        args = [*self._me(part), *limits, *cursors, int(self._could_give_back)]
        try:
            claims, cursors, officer, dropped, workers = await self._link.run(script("take"), names, args)
        except GroupMissing:
            await self._create_groups()
            claims, cursors, officer, dropped, workers = await self._link.run(script("take"), names, args)
        except FleetUnavailable:
            part.was_away = True
            raise
        part.was_away = False
        self._count_dropped(dropped)
        self._workers = workers
        entered = bool(officer) and self._probation is None
        self._enter_probation(part if officer else None)
        self._make_room = officer == _EMPTY_YOURSELF
        # What it holds when it enters office are no suspects; as long as the rest cannot go on with them, ask again.
        self._could_give_back = (
            bool(officer) and held > 0 and not self._make_room and (entered or self._could_give_back)
        )
        part.cursors = {lane: cursor.decode() for lane, cursor in zip(order, cursors, strict=True)}
        found = [_claim(reply) for reply in claims]
        # All that was asked for, and some of it from other workers: more of theirs may wait, and goes before new work.
        more = len(found) == limit and any(claim.epoch > 1 for claim in found)
        if reap and not more:
            part.reap_at = time.monotonic() + random.uniform(0.75, 1.25) * self._reap_every_s
        return found

    async def _start(self, part: "_Partition", entries: list[Entry], limit: int) -> list[Claim]:
        names = [part.keys.dead_letters(), part.keys.handed_back(), part.keys.rate(), *[e.lane for e in entries]]
        args = [*self._me(part), limit, self._lease_ms, self._max_attempts, WIRE_VERSION]
        args += [value for entry in entries for value in (entry.entry_id, entry.request_id, entry.version)]
        claims, dropped = await self._link.run(script("start"), names, args)
        self._count_dropped(dropped)
        return [_claim(reply) for reply in claims]

    def _enter_probation(self, part: "_Partition | None") -> None:
        if part is not self._probation:
            log.info(
                "from now on this worker runs %s", "whatever comes" if part is None else "suspects of a crash only"
            )
        self._probation = part

    def _count_dropped(self, dropped: int) -> None:
        if dropped:
            self._dropped += dropped
            log.warning("entries dropped that no submit has written: %d", dropped)

    def _me(self, part: "_Partition") -> list[Argument]:
        return [part.keys.request("").removesuffix("r:"), GROUP, self._worker]

    async def _create_groups(self) -> None:
        """Create the groups at 0: whatever is in the lanes has not been finished, so none of it is skipped."""
        if self._group_failures:
            await asyncio.sleep(jitter_s(self._group_failures, 5.0))
        self._group_failures += 1
        for part in self._partitions:
            for lane in LANES:
                try:
                    await self._link.command("XGROUP", "CREATE", part.keys.lane(lane), GROUP, "0", "MKSTREAM")
                except exceptions.ResponseError as error:
                    if not str(error).startswith(("BUSYGROUP", "WRONGTYPE")):
                        raise
        self._group_failures = 0

    async def _forget_idle_consumers(self) -> None:
        if time.monotonic() < self._forget_at:
            return
        self._forget_at = time.monotonic() + random.uniform(0.75, 1.25) * _FORGET_EVERY_S
        for part in self._partitions:
            lanes = [part.keys.lane(lane) for lane in LANES]
            await self._link.run(script("forget_consumers"), lanes, [GROUP, "", self._worker, _FORGET_AFTER_MS])


class _Partition:
    """One partition's names, and how far its pending lists have been looked through."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        self.cursors: dict[Lane, str] = dict.fromkeys(LANES, "0-0")
        self.reap_at = 0.0
        self.was_away = False


def _claim(reply: list[Any]) -> Claim:
    request_id, epoch, attempt, payload, blocks, seq, queued_ms, committed = reply
    events: list[Event] = []
    for event in committed:
        # One that is missing shows in the count: the claim's owner then ends the request as lost.
        with suppress(InvalidEvent):
            events.append(decode_event(event))
    return Claim(request_id.decode(), epoch, attempt, payload, blocks, seq, queued_ms, events)


def _names(request_id: str) -> tuple[Keys, list[str]]:
    keys = Keys.of(request_id)
    return keys, [keys.lane(lane) for lane in LANES]


def _costs(terminal: Finished | Failed) -> list[Argument]:
    """Return what stands in place of a last block: forwards whose block had no text are counted as well."""
    if isinstance(terminal, Failed):
        return []
    return ["", "", "", terminal.usage.blocks, "", terminal.usage.nfe]


def _block(event: Delta) -> list[Argument]:
    """Return a block's arguments: seq, type, event, committed blocks, produced tokens, nfe."""
    produced = event.offset + len(event.token_ids)
    return [event.seq, event.t, encode_event(event), event.block + 1, produced, event.nfe]


def _state(terminal: Finished | Failed) -> str:
    match terminal:
        case Finished(reason="aborted"):
            return "aborted"
        case Finished():
            return "done"
        case Failed(code="expired"):
            return "expired"
        case Failed(code="poison"):
            return "dead"
        case Failed():
            return "failed"
        case _:
            assert_never(terminal)
