"""The bridge between the queue and the engine, the test in the engine's place."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.card import ModelCard
from shared.commands import Generate, Preview, encode_command
from shared.events import Delta, Failed, Finished, Snapshot, Started, Usage
from shared.heart import Held, HeldState
from shared.keys import new_request_id
from shared.tracing import Tracing
from tests.worker.queue_for_tests import QueueForTests
from worker.bridge import Backoff, Bridge, BridgeError, Pace, resume_of
from worker.engine.ports import Arrival, Inbox, Outbox, Resume
from worker.mailbox import Mailbox
from worker.metrics import Metrics

PACE = Pace(slots=2, claim_poll_s=0.001, abort_poll_s=0.001, preview_s=0.0)
CARD = ModelCard("tiny", "sdar", 64, 4, False, {}, 0.0, (), (1,), 0, 8, {})


class Desk:
    """A running bridge and both of its ends."""

    def __init__(self, queue: QueueForTests, pace: Pace = PACE, tracing: Tracing | None = None) -> None:
        self.queue = queue
        self.mailbox = Mailbox()
        self.metrics = Metrics("tiny")
        self.bridge = Bridge(lambda: queue, CARD, self.mailbox, pace, "w1", self.metrics, tracing=tracing)  # type: ignore[arg-type, return-value]

    def arrivals(self, count: int) -> list[Arrival]:
        """Wait for `count` arrivals."""
        found: list[Arrival] = []
        until(lambda: len(found) >= count, lambda: found.extend(self.mailbox.collect(0.01).arrivals))
        return found

    def collect_until(self, reached: Callable[[Inbox], bool]) -> Inbox:
        inbox = Inbox()

        def more() -> None:
            new = self.mailbox.collect(0.01)
            inbox.arrivals += new.arrivals
            inbox.aborts += new.aborts
            inbox.drops += new.drops
            inbox.hurries += new.hurries
            inbox.returns += new.returns

        until(lambda: reached(inbox), more)
        return inbox

    def say(self, *events: Delta | Finished | Failed | Snapshot, handed_back: tuple[str, ...] = ()) -> None:
        self.bridge.deliver(Outbox(list(events), list(handed_back)), 0)


def until(reached: Callable[[], bool], turn: Callable[[], object] = lambda: time.sleep(0.002)) -> None:
    deadline = time.monotonic() + 10
    while not reached():
        assert time.monotonic() < deadline, "it did not come to that"
        turn()


@contextmanager
def running(queue: QueueForTests, pace: Pace = PACE, tracing: Tracing | None = None) -> Iterator[Desk]:
    desk = Desk(queue, pace, tracing)
    desk.bridge.start(10)
    try:
        yield desk
    finally:
        queue.down = False
        assert desk.bridge.close(10)


def generate(preview: Preview | None = None) -> Generate:
    return Generate(id=new_request_id("tiny"), model="tiny", prompt=(3, 4), preview=preview)


def delta(request_id: str, block: int, epoch: int = 1) -> Delta:
    return Delta(request_id, block + 2, epoch, block, 4 * block, [block] * 4, f"<{block}>", 2 * block + 2)


def finished(request_id: str, seq: int, epoch: int = 1) -> Finished:
    return Finished(request_id, seq, epoch, "stop", "stop_token", Usage(2, 4, 2, 1))


def snapshot(request_id: str, step: int) -> Snapshot:
    return Snapshot(request_id, 1, 1, 0, 0, step, step, [1, None, None, None], [0.9, 0, 0, 0])


def test_it_announces_the_model_before_it_claims() -> None:
    queue = QueueForTests()
    with running(queue):
        assert queue.card == CARD


def test_a_worker_never_claims_more_than_its_free_slots() -> None:
    queue = QueueForTests()
    requests = [generate() for _ in range(5)]
    for request in requests:
        queue.submit(request)
    with running(queue) as desk:
        first = desk.arrivals(2)
        assert {arrival.request.id for arrival in first} == {request.id for request in requests[:2]}
        assert len(queue.waiting) == 3

        desk.say(finished(requests[0].id, 2))
        assert desk.arrivals(1)[0].request.id == requests[2].id
        assert set(desk.bridge.held()) == {requests[1].id, requests[2].id}
        assert max(queue.limits) <= PACE.slots


def test_nothing_is_claimed_while_claimed_requests_wait_for_room_in_the_engine() -> None:
    queue = QueueForTests()
    first, second = generate(), generate()
    queue.submit(first)
    with running(queue) as desk:
        desk.arrivals(1)
        desk.bridge.deliver(Outbox([delta(first.id, 0)]), waiting=1)
        until(lambda: len(queue.requests[first.id].log) == 1)
        queue.submit(second)
        time.sleep(10 * PACE.claim_poll_s)
        assert len(queue.waiting) == 1
        desk.say(delta(first.id, 1))
        assert desk.arrivals(1)[0].request.id == second.id


@pytest.mark.parametrize("alone", [True, False])
def test_a_busy_worker_waits_for_news_only_where_nobody_else_could_take_it(alone: bool) -> None:
    queue = QueueForTests()
    queue.alone = alone
    request = generate()
    queue.submit(request)
    with running(queue) as desk:
        desk.arrivals(1)
        looks = len(queue.limits)
        until(lambda: len(queue.limits) > looks + 5)
        assert (1 in queue.held_in_wait) == alone


def test_who_is_alone_asks_for_as_many_as_it_has_room_for_beside_what_it_runs() -> None:
    queue = QueueForTests()
    queue.submit(generate())
    with running(queue, replace(PACE, slots=32)) as desk:
        desk.arrivals(1)
        until(lambda: 31 in queue.limits)
        queue.alone = False
        until(lambda: 4 in queue.limits)


def test_the_last_block_and_the_end_travel_in_one_call() -> None:
    queue = QueueForTests()
    request = generate()
    queue.submit(request)
    with running(queue) as desk:
        desk.arrivals(1)
        desk.say(delta(request.id, 0), delta(request.id, 1), finished(request.id, 4))
        until(lambda: request.id not in desk.bridge.held())
        assert queue.calls == ["emit 1", "finish 1"]
        assert [event.seq for event in queue.requests[request.id].log] == [2, 3]


def test_requests_that_end_in_one_step_end_in_one_call_whatever_becomes_of_each() -> None:
    queue = QueueForTests()
    with_block, lost, bare, given_back = requests = [generate() for _ in range(4)]
    for request in requests:
        queue.submit(request)
    with running(queue, replace(PACE, slots=4)) as desk:
        desk.arrivals(4)
        queue.requests[lost.id].epoch = 2
        ends = [delta(with_block.id, 0), finished(with_block.id, 3), finished(lost.id, 2), finished(bare.id, 2)]
        desk.say(*ends, handed_back=(given_back.id,))
        until(lambda: desk.bridge.held() == {})
        assert queue.calls == ["finish 3"]
        assert queue.requests[with_block.id].log == [delta(with_block.id, 0)]
        ended = {request.id: queue.requests[request.id].terminal is not None for request in requests}
        assert ended == {with_block.id: True, lost.id: False, bare.id: True, given_back.id: False}
        assert queue.requests[given_back.id].handed_back_ms == 0


def test_a_reclaimed_request_resumes_from_its_log() -> None:
    queue = QueueForTests()
    request = generate()
    log = [delta(request.id, 0), delta(request.id, 1)]
    queue.submit(request, epoch=2, log=log)
    with running(queue) as desk:
        [arrival] = desk.arrivals(1)
        assert arrival == Arrival(request, 2, Resume((0, 0, 0, 0, 1, 1, 1, 1), 6, 3, 2, 4))
        assert resume_of([]) == Resume()


def test_a_request_whose_log_lost_its_beginning_is_failed() -> None:
    queue = QueueForTests()
    request = generate()
    queue.submit(request, epoch=2, log=[delta(request.id, 0), delta(request.id, 1)])
    queue.waiting[0].log.pop(0)
    with running(queue):
        until(lambda: queue.requests[request.id].terminal is not None)
        terminal = queue.requests[request.id].terminal
        assert isinstance(terminal, Failed) and (terminal.code, terminal.seq) == ("lost", 4)


def test_a_bad_payload_fails_alone_and_names_its_field() -> None:
    queue = QueueForTests()
    bad, good = new_request_id("tiny"), generate()
    envelope = (
        b'{"v":1,"kind":"generate","must":[],"body":{"id":"%s","model":"tiny","prompt":[1],"limits":{"max_tokens":0}}}'
    )
    queue.submit((bad, envelope % bad.encode()))
    queue.submit(good)
    with running(queue) as desk:
        [arrival] = desk.arrivals(1)
        assert arrival.request == good
        until(lambda: queue.requests[bad].terminal is not None)
        terminal = queue.requests[bad].terminal
        assert isinstance(terminal, Failed)
        assert (terminal.code, terminal.param, terminal.seq) == ("invalid_request", "limits.max_tokens", 2)


@pytest.mark.parametrize("payload", [b"", b"\xff{", b"[1]", b'{"v":1,"kind":"generate","must":[],"body":"x"}'])
def test_a_payload_that_is_no_command_fails_without_reaching_the_engine(payload: bytes) -> None:
    queue = QueueForTests()
    request_id = new_request_id("tiny")
    queue.submit((request_id, payload))
    with running(queue) as desk:
        until(lambda: queue.requests[request_id].terminal is not None)
        assert desk.mailbox.collect(0).arrivals == []


def test_a_payload_under_another_requests_id_fails() -> None:
    queue = QueueForTests()
    request_id = new_request_id("tiny")
    queue.submit((request_id, encode_command(generate())))
    with running(queue):
        until(lambda: queue.requests[request_id].terminal is not None)


def test_a_command_of_a_newer_version_is_handed_back_for_a_while() -> None:
    queue = QueueForTests()
    request_id = new_request_id("tiny")
    queue.submit((request_id, b'{"v":1,"kind":"generate","must":["adapter"],"body":{}}'))
    with running(queue) as desk:
        until(lambda: queue.requests[request_id].handed_back_ms == 5000)
        until(lambda: desk.bridge.held() == {})


def test_events_wait_out_an_outage_in_order() -> None:
    queue = QueueForTests()
    request = generate()
    queue.submit(request)
    with running(queue) as desk:
        desk.arrivals(1)
        queue.down = True
        for block in range(3):
            desk.say(delta(request.id, block))
        desk.say(delta(request.id, 3), finished(request.id, 6))
        until(lambda: len(queue.calls) >= 2)
        assert queue.requests[request.id].log == []

        queue.down = False
        until(lambda: desk.bridge.held() == {})
        assert queue.requests[request.id].log == [delta(request.id, block) for block in range(4)]
        assert queue.requests[request.id].terminal == finished(request.id, 6)


@settings(max_examples=25, deadline=None)
@given(
    faults=st.lists(st.booleans(), max_size=4),
    batches=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    ends_with_delta=st.booleans(),
)
def test_lost_replies_neither_lose_nor_repeat_nor_reorder(
    faults: list[bool], batches: list[int], ends_with_delta: bool
) -> None:
    queue = QueueForTests()
    request = generate()
    queue.submit(request)
    queue.faults = faults
    with running(queue) as desk:
        desk.arrivals(1)
        deltas = [delta(request.id, block) for block in range(sum(batches))]
        end = finished(request.id, len(deltas) + 2)
        rest = list(deltas)
        for size in batches:
            batch, rest = rest[:size], rest[size:]
            desk.say(*batch, *([end] if ends_with_delta and not rest else []))
        if not ends_with_delta:
            desk.say(end)
        until(lambda: desk.bridge.held() == {})
    assert queue.requests[request.id].log == deltas
    assert queue.requests[request.id].terminal == end


@settings(max_examples=25, deadline=None)
@given(faults=st.lists(st.booleans(), max_size=6), with_block=st.lists(st.booleans(), min_size=2, max_size=4))
def test_a_call_that_breaks_off_among_several_ends_neither_loses_nor_repeats_one(
    faults: list[bool], with_block: list[bool]
) -> None:
    queue = QueueForTests()
    requests = [generate() for _ in with_block]
    for request in requests:
        queue.submit(request)
    with running(queue, replace(PACE, slots=4)) as desk:
        desk.arrivals(len(requests))
        queue.faults = faults
        events: list[Delta | Finished] = []
        for request, block in zip(requests, with_block, strict=True):
            events += [delta(request.id, 0)] if block else []
            events.append(finished(request.id, 2 + block))
        desk.say(*events)
        until(lambda: desk.bridge.held() == {})
    for request, block in zip(requests, with_block, strict=True):
        assert queue.requests[request.id].log == ([delta(request.id, 0)] if block else [])
        assert queue.requests[request.id].terminal == finished(request.id, 2 + block)


def test_a_log_that_fell_back_is_written_again() -> None:
    queue = QueueForTests()
    request = generate()
    queue.submit(request, epoch=2, log=[delta(request.id, 0)])
    with running(queue) as desk:
        desk.arrivals(1)
        desk.say(delta(request.id, 1, epoch=2))
        until(lambda: len(queue.requests[request.id].log) == 2)
        queue.requests[request.id].log.clear()

        desk.say(delta(request.id, 2, epoch=2), finished(request.id, 5, epoch=2))
        until(lambda: desk.bridge.held() == {})
        assert queue.requests[request.id].log == [delta(request.id, block, epoch=2) for block in range(3)]
        assert queue.requests[request.id].terminal is not None


def test_a_fenced_request_is_dropped_and_its_late_events_are_swallowed() -> None:
    queue = QueueForTests()
    request = generate()
    queue.submit(request)
    with running(queue) as desk:
        desk.arrivals(1)
        queue.requests[request.id].epoch = 2
        desk.say(delta(request.id, 0))
        inbox = desk.collect_until(lambda inbox: bool(inbox.drops))
        assert inbox.drops == [request.id]

        desk.say(delta(request.id, 1), finished(request.id, 4))
        assert desk.bridge.held() == {}
        assert queue.requests[request.id].log == []


def test_a_request_that_comes_back_replaces_its_former_life() -> None:
    queue = QueueForTests()
    request = generate()
    queue.submit(request)
    with running(queue) as desk:
        desk.arrivals(1)
        queue.submit(request, epoch=3, log=[delta(request.id, 0)])
        inbox = desk.collect_until(lambda inbox: bool(inbox.arrivals))
        assert inbox.drops == [request.id]
        assert [arrival.epoch for arrival in inbox.arrivals] == [3]

        desk.say(delta(request.id, 0, epoch=1), delta(request.id, 1, epoch=3))
        until(lambda: len(queue.requests[request.id].log) == 2)
        assert queue.requests[request.id].log[-1] == delta(request.id, 1, epoch=3)


def test_an_abort_key_reaches_the_engine_once() -> None:
    queue = QueueForTests()
    request = generate()
    queue.submit(request)
    with running(queue) as desk:
        desk.arrivals(1)
        queue.abort_reasons[request.id] = "client left"
        inbox = desk.collect_until(lambda inbox: bool(inbox.aborts))
        time.sleep(10 * PACE.abort_poll_s)
        desk.say(finished(request.id, 2))
        until(lambda: desk.bridge.held() == {})
        inbox.aborts += desk.mailbox.collect(0).aborts
        assert inbox.aborts == [(request.id, "client left")]


def test_a_request_is_hurried_at_its_deadline_unless_it_has_left() -> None:
    queue = QueueForTests()
    timely, gone = generate(), generate()
    for request in (gone, timely):
        ms = 30 if request is gone else 60
        queue.submit(request.model_copy(update={"limits": request.limits.model_copy(update={"deadline_ms": ms})}))
    with running(queue) as desk:
        desk.arrivals(2)
        desk.say(finished(gone.id, 2))
        inbox = desk.collect_until(lambda inbox: bool(inbox.hurries))
        assert inbox.hurries == [timely.id]
        desk.say(finished(timely.id, 2))


def test_a_heartbeats_answer_counts_only_for_the_epoch_it_was_asked_for() -> None:
    queue = QueueForTests()
    lost, aborted, late, stale = (generate() for _ in range(4))
    for request in (lost, aborted, late, stale):
        queue.submit(request, epoch=2)
    with running(queue, Pace(4, 0.001, 0.001, 0.0)) as desk:
        desk.arrivals(4)
        desk.bridge.judge(
            {lost.id: 2, aborted.id: 2, late.id: 2, stale.id: 1},
            {
                lost.id: Held(HeldState.FENCED),
                aborted.id: Held(HeldState.ABORTED, "why not"),
                late.id: Held(HeldState.EXPIRED),
                stale.id: Held(HeldState.FENCED),
            },
        )
        inbox = desk.collect_until(lambda inbox: len(inbox.aborts) == 2 and bool(inbox.drops))
        assert inbox.drops == [lost.id]
        assert sorted(inbox.aborts) == sorted([(aborted.id, "why not"), (late.id, "expired")])
        assert stale.id in desk.bridge.held()


def test_a_request_is_handed_back_behind_its_last_block() -> None:
    queue = QueueForTests()
    request = generate()
    queue.submit(request)
    with running(queue) as desk:
        desk.arrivals(1)
        desk.say(delta(request.id, 0), handed_back=(request.id,))
        until(lambda: desk.bridge.held() == {})
        assert (len(queue.requests[request.id].log), queue.requests[request.id].handed_back_ms) == (1, 0)


def test_what_is_held_is_given_back_where_suspects_of_a_crash_wait_for_this_worker() -> None:
    queue = QueueForTests()
    requests = [generate(), generate()]
    queue.submit(requests[0])
    with running(queue, replace(PACE, slots=3)) as desk:
        desk.arrivals(1)
        queue.wants_room = True
        queue.submit(requests[1])
        inbox = desk.collect_until(lambda inbox: {request.id for request in requests} <= set(inbox.returns))
        queue.wants_room = False
        assert [arrival.request.id for arrival in inbox.arrivals] == [requests[1].id]
        desk.say(delta(requests[0].id, 0), handed_back=(requests[0].id,))
        until(lambda: list(desk.bridge.held()) == [requests[1].id])
        assert queue.requests[requests[0].id].handed_back_ms == 0


def test_a_claim_that_comes_after_the_drain_began_is_handed_back() -> None:
    queue = QueueForTests()
    with running(queue) as desk:
        desk.bridge.stop_taking()
        until(lambda: desk.bridge.claims_ended)
        queue.submit(generate())
        time.sleep(0.02)
        assert len(queue.waiting) == 1
    assert queue.closed


def test_previews_keep_their_interval_and_follow_the_start() -> None:
    queue = QueueForTests()
    request = generate(Preview(interval_ms=10_000))
    queue.submit(request)
    with running(queue) as desk:
        desk.arrivals(1)
        for step in range(5):
            desk.say(snapshot(request.id, step))
        desk.say(finished(request.id, 2))
        until(lambda: desk.bridge.held() == {})
        assert queue.previews[0] == Started(request.id, 1, "w1", queued_ms=0)
        assert all(event == snapshot(request.id, 0) for event in queue.previews[1:])
        assert len(queue.previews) <= 2


def test_a_preview_is_not_sent_after_the_block_that_it_shows() -> None:
    queue = QueueForTests()
    request = generate(Preview(interval_ms=0))
    queue.submit(request)
    with running(queue) as desk:
        desk.arrivals(1)
        desk.say(snapshot(request.id, 0), delta(request.id, 0))
        until(lambda: len(queue.requests[request.id].log) == 1)
        desk.say(finished(request.id, 3))
        until(lambda: desk.bridge.held() == {})
        assert not any(isinstance(event, Snapshot) for event in queue.previews)


def test_a_dead_redis_at_start_is_an_error_with_its_cause() -> None:
    queue = QueueForTests()
    queue.down = True
    desk = Desk(queue)
    with pytest.raises(BridgeError) as caught:
        desk.bridge.start(10)
    assert "told so" in str(caught.value.__cause__)
    with pytest.raises(BridgeError):
        desk.say()


def test_the_end_waits_for_what_is_unwritten_but_not_for_ever() -> None:
    queue = QueueForTests()
    request = generate()
    queue.submit(request)
    with running(queue) as desk:
        desk.arrivals(1)
        queue.down = True
        desk.say(delta(request.id, 0))
        assert not desk.bridge.close(0.05)
        queue.down = False
        assert desk.bridge.close(10)
        assert len(queue.requests[request.id].log) == 1


def test_its_counters_tell_claims_reclaims_and_losses() -> None:
    queue = QueueForTests()
    fresh, again = generate(), generate()
    queue.submit(fresh)
    queue.submit(again, epoch=2)
    with running(queue) as desk:
        desk.arrivals(2)
        queue.requests[again.id].epoch = 3
        desk.say(delta(again.id, 0, epoch=2))
        desk.collect_until(lambda inbox: bool(inbox.drops))
        lines = desk.metrics.render().decode().splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        named = {
            name: float(values[f'diffleet_{name}_total{{model="tiny"}}']) for name in ("claims", "reclaims", "fenced")
        }
        assert named == {"claims": 2, "reclaims": 1, "fenced": 1}


def test_the_backoff_of_an_outage_grows_but_stays_bounded() -> None:
    backoff = Backoff()
    ceilings: list[float] = []
    for _ in range(12):
        assert 0.05 <= backoff.next_s() <= 5.0
        ceilings.append(backoff.ceiling_s)
    assert all(later >= sooner for sooner, later in pairwise(ceilings)) and ceilings[-1] == 5.0
