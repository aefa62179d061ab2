"""The protocol's promise under arbitrary interleavings of several workers, some frozen, some woken up too late.

Time is the test's: leases last an hour and end where a rule says so. The model here knows what the server must answer
to each call; whatever happened, at the end every request has ended exactly once, with every block once.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from shared.client import FleetClient, QueueFull
from shared.commands import LANES, Generate, Lane
from shared.connection import Link, open_sync_client
from shared.events import Delta, Failed, Finished, is_terminal
from shared.heart import Heart, HeldState
from shared.keys import Keys, ulid
from shared.queue import Claim, Outcome, WorkerQueue
from shared.roster import WorkerInfo
from shared.subscriber import Subscriber
from tests.shared.protocol_for_tests import (
    block_of,
    card_of,
    command_for,
    end_of,
    lengths_of,
    logs_of,
    pending_of,
    run_out_of_lease,
    state_of,
)

HOUR_MS = 3_600_000
WORKERS = ("a", "b", "c")
MAX_ATTEMPTS = 3
SLOTS = 4
QUEUE_LIMIT = 4


@dataclass
class Request:
    """What must be true of one request."""

    command: Generate
    owner: str | None = None
    epoch: int = 0
    attempts: int = 0
    alone: bool = False
    blocks: int = 0
    aborted: bool = False
    lease_over: bool = False
    end: type[Finished] | type[Failed] | None = None


@dataclass
class Slot:
    """A claim as its worker believes in it, true or not."""

    worker: str
    claim: Claim
    written: int
    """Blocks that the worker has seen committed."""
    ended: bool = False


@dataclass
class Worker:
    queue: WorkerQueue
    heart: Heart
    slots: dict[str, Slot] = field(default_factory=dict[str, Slot])


class Interleavings(RuleBasedStateMachine):
    url = ""

    @initialize()
    def open(self) -> None:
        self.runner = asyncio.Runner()
        self.redis: Any = open_sync_client(self.url)
        self.model = f"m{ulid()}"
        self.requests: dict[str, Request] = {}
        self.stale: list[Slot] = []
        self.heard: set[str] = set()
        """Workers whose last beat is not a lease ago."""
        link = Link.open(self.url)
        # The subscriber is never entered: nobody follows here.
        self.fleet = FleetClient(link, Subscriber(self.url, link))
        self.close_link = link.close
        self.workers = {
            name: Worker(
                WorkerQueue.connect(self.url, self.model, name, HOUR_MS, MAX_ATTEMPTS, reap_every_ms=0, slots=SLOTS),
                Heart.connect(self.url, name, self.model, HOUR_MS),
            )
            for name in WORKERS
        }
        self.runner.run(self.workers["a"].queue.publish_card(card_of(self.model)))

    @rule(lane=st.sampled_from(LANES))
    def submit(self, lane: Lane) -> None:
        command = command_for(self.model, lane)
        waiting = sum(request.end is None and request.command.lane == lane for request in self.requests.values())
        try:
            self.runner.run(self.fleet.submit(command, queue_limit=QUEUE_LIMIT))
        except QueueFull:
            assert waiting >= QUEUE_LIMIT
        else:
            assert waiting < QUEUE_LIMIT
            self.requests[command.id] = Request(command)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def submit_again(self, data: st.DataObject) -> None:
        request = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        assert self.runner.run(self.fleet.submit(request.command)).duplicate

    @rule(name=st.sampled_from(WORKERS), limit=st.integers(1, 3), waits=st.booleans(), lost=st.booleans())
    def claim(self, name: str, limit: int, waits: bool, lost: bool) -> None:
        """Take or wait; a lost reply leaves requests that run nowhere."""
        queue = self.workers[name].queue
        held = len(self.workers[name].slots)
        if waits:
            claims = self.runner.run(queue.wait(1, limit))
        else:
            claims = self.runner.run(queue.take(limit, held))
        assert len(claims) <= limit
        suspects = [claim for claim in claims if "sus" in state_of(self.redis, claim.id)]
        assert not suspects or (held == 0 and len(suspects) == len(claims) <= SLOTS // 2)
        for claim in claims:
            request = self.requests[claim.id]
            assert request.end is None and not request.aborted
            assert request.owner is None or request.lease_over
            if request.owner in self.heard and claim not in suspects:
                # Its owner has been heard of, so it was only the reply of the claim that got lost.
                request.attempts -= 1
            assert claim in suspects or request.attempts < 2 or request.owner is None
            assert request.attempts < MAX_ATTEMPTS or not request.alone
            request.alone = bool(suspects) and len(claims) == 1
            request.owner, request.lease_over = name, False
            request.epoch, request.attempts = request.epoch + 1, request.attempts + 1
            assert (claim.epoch, claim.attempt) == (request.epoch, request.attempts)
            assert (claim.blocks, claim.seq) == (request.blocks, request.blocks + 1)
            assert [event.block for event in claim.log if isinstance(event, Delta)] == list(range(request.blocks))
            if not lost:
                self._keep(Slot(name, claim, claim.blocks))
        self._end_what_no_worker_may_run()

    @precondition(lambda self: any(worker.slots for worker in self.workers.values()))
    @rule(data=st.data(), blocks=st.integers(1, 2))
    def emit(self, data: st.DataObject, blocks: int) -> None:
        slot = self._draw(data)
        deltas = [block_of(slot.claim, slot.written + number) for number in range(blocks)]
        outcomes = self.runner.run(self.workers[slot.worker].queue.emit(deltas))
        self._check(slot, deltas, outcomes)
        again = self.runner.run(self.workers[slot.worker].queue.emit(deltas))
        owned = self._owned(slot)
        assert again == [Outcome.DUPLICATE if owned else Outcome.FENCED] * blocks

    @precondition(lambda self: any(worker.slots for worker in self.workers.values()))
    @rule(data=st.data(), with_block=st.booleans(), aborting=st.booleans())
    def finish(self, data: st.DataObject, with_block: bool, aborting: bool) -> None:
        slot = self._draw(data)
        self._finish(slot, with_block, aborting)

    @precondition(lambda self: any(worker.slots for worker in self.workers.values()))
    @rule(data=st.data())
    def hand_back(self, data: st.DataObject) -> None:
        slot = self._draw(data)
        owned = self._owned(slot)
        outcome = self.runner.run(self.workers[slot.worker].queue.hand_back(slot.claim.id, slot.claim.epoch))
        assert outcome is (Outcome.OK if owned else Outcome.FENCED)
        if owned:
            request = self.requests[slot.claim.id]
            request.owner, request.lease_over, request.alone = None, False, False
            request.epoch, request.attempts = request.epoch + 1, request.attempts - 1

    @rule(name=st.sampled_from(WORKERS))
    def beat(self, name: str) -> None:
        worker = self.workers[name]
        self.heard.add(name)
        held = {slot.claim.id: slot.claim.epoch for slot in worker.slots.values()}
        answers = worker.heart.beat(held, WorkerInfo(name, self.model, "ready"))
        assert answers.keys() == held.keys()
        for request_id, answer in answers.items():
            slot, request = worker.slots[request_id], self.requests[request_id]
            if not self._owned(slot):
                assert answer.state is HeldState.FENCED
                request.attempts = int(state_of(self.redis, request_id)["att"])  # it was not killed: one fewer
                self.stale.append(worker.slots.pop(request_id))
            else:
                assert answer.state is (HeldState.ABORTED if request.aborted else HeldState.OK)
                request.lease_over = False

    @precondition(lambda self: any(request.owner for request in self.requests.values()))
    @rule(data=st.data())
    def freeze(self, data: st.DataObject) -> None:
        """An owner has not beaten for a lease; it does not know. Nor has any other: none of them counts as alive."""
        owned = sorted(request_id for request_id, request in self.requests.items() if request.owner)
        request_id = data.draw(st.sampled_from(owned))
        run_out_of_lease(self.redis, request_id)
        self.requests[request_id].lease_over = True
        self._bury_workers()

    @rule()
    def lapse(self) -> None:
        """Whoever examines the suspects of a crash is gone as well: its lock has timed out."""
        self.redis.delete(Keys(f"{self.model}.0").officers())

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        request = self.requests[request_id]
        state = self.runner.run(self.fleet.abort(request_id))
        if request.end is not None:
            assert state not in ("unknown", "queued", "running")
        elif request.owner is None:
            assert state == "aborted"
            request.end = Finished
        else:
            assert state == "running"
            request.aborted = True

    @invariant()
    def every_log_is_whole(self) -> None:
        logs = logs_of(self.redis, list(self.requests))
        for request, entries in zip(self.requests.values(), logs, strict=True):
            assert [entry_id for entry_id, _ in entries] == [f"{seq}-0" for seq in range(2, len(entries) + 2)]
            events = [event for _, event in entries]
            deltas = [event for event in events if isinstance(event, Delta)]
            assert [delta.block for delta in deltas] == list(range(request.blocks))
            ends = [event for event in events if is_terminal(event)]
            assert [type(end) for end in ends] == ([] if request.end is None else [request.end])
            assert len(events) == len(deltas) + len(ends) and (not ends or events[-1] is ends[0])

    @invariant()
    def the_lanes_hold_what_is_queued_or_running(self) -> None:
        alive = sum(request.end is None for request in self.requests.values())
        assert lengths_of(self.redis, self.model) == alive

    def teardown(self) -> None:
        if not hasattr(self, "runner"):
            return
        # Zombies write once more, then one worker takes over whatever is left.
        for slot in [*self.stale, *[slot for worker in self.workers.values() for slot in worker.slots.values()]]:
            if not self._owned(slot):
                self._finish(slot, with_block=True, aborting=False)
        for _ in range(MAX_ATTEMPTS):
            for request_id, request in self.requests.items():
                if request.owner is not None and request.end is None:
                    run_out_of_lease(self.redis, request_id)
                    request.lease_over = True
            self._bury_workers()
            self.lapse()
            self._empty("a")
            self.claim("a", 3, False, False)
        for _ in range(2 * len(self.requests) + 2):
            for slot in list(self.workers["a"].slots.values()):
                if self._owned(slot):
                    self._finish(slot, with_block=True, aborting=False)
            self._empty("a")
            self.claim("a", 3, False, False)
        assert all(request.end is not None for request in self.requests.values())
        self.every_log_is_whole()
        assert (lengths_of(self.redis, self.model), pending_of(self.redis, self.model)) == (0, 0)
        self._close()

    def _close(self) -> None:
        for worker in self.workers.values():
            worker.heart.close()
            self.runner.run(worker.queue.close())
        self.runner.run(self.close_link())
        self.redis.close()
        self.runner.close()

    def _empty(self, name: str) -> None:
        """Let a worker forget what it has ended or lost."""
        slots = self.workers[name].slots
        for request_id in [request_id for request_id, slot in slots.items() if not self._owned(slot)]:
            self.stale.append(slots.pop(request_id))

    def _bury_workers(self) -> None:
        keys = Keys(f"{self.model}.0")
        self.redis.delete(*[keys.worker(name) for name in WORKERS])
        self.heard.clear()

    def _draw(self, data: st.DataObject) -> Slot:
        slots = [slot for worker in self.workers.values() for slot in worker.slots.values()]
        return data.draw(st.sampled_from(slots + self.stale))

    def _keep(self, slot: Slot) -> None:
        slots = self.workers[slot.worker].slots
        if slot.claim.id in slots:
            self.stale.append(slots[slot.claim.id])
        slots[slot.claim.id] = slot

    def _owned(self, slot: Slot) -> bool:
        request = self.requests[slot.claim.id]
        return request.end is None and (request.owner, request.epoch) == (slot.worker, slot.claim.epoch)

    def _check(self, slot: Slot, deltas: list[Delta], outcomes: list[Outcome]) -> None:
        if not self._owned(slot):
            assert outcomes == [Outcome.FENCED] * len(deltas)
            return
        assert outcomes == [Outcome.OK] * len(deltas)
        slot.written += len(deltas)
        self.requests[slot.claim.id].blocks = slot.written

    def _finish(self, slot: Slot, with_block: bool, aborting: bool) -> None:
        last = block_of(slot.claim, slot.written) if with_block else None
        end = end_of(slot.claim, slot.written + with_block)
        if aborting:
            end = Finished(end.id, end.seq, end.epoch, "aborted", "aborted", end.usage)
        queue = self.workers[slot.worker].queue
        owned = self._owned(slot)
        outcome = self.runner.run(queue.finish(last, end))
        if owned:
            assert outcome is Outcome.OK
            request = self.requests[slot.claim.id]
            request.end, request.owner, slot.ended = Finished, None, True
            request.blocks = slot.written = slot.written + with_block
            assert self.runner.run(queue.finish(last, end)) is Outcome.DUPLICATE
        elif not slot.ended:
            assert outcome is Outcome.FENCED

    def _end_what_no_worker_may_run(self) -> None:
        """A take has ended the aborted and the worn-out requests that it met; how many it met is its own affair."""
        for request_id, request in self.requests.items():
            free = request.owner is None or request.lease_over
            worn = free and request.attempts >= MAX_ATTEMPTS and request.alone
            if request.end is None and (worn or (free and request.aborted)):
                match state_of(self.redis, request_id)["st"]:
                    case "aborted" if request.aborted:
                        request.end, request.owner = Finished, None
                    case "dead" if worn:
                        request.end, request.owner = Failed, None
                    case state:
                        assert state in ("queued", "running")


def test_every_request_ends_exactly_once_whatever_happens(redis_url: str) -> None:
    class Machine(Interleavings):
        url = redis_url

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=25,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
