"""Each step of the protocol by example, on a real server."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
from redis import exceptions

from shared import keys as names
from shared.adapters import TARGETS_FILE
from shared.client import FleetClient, IdempotencyConflict, InvalidArgument, QueueFull, UnknownModel
from shared.commands import LANES
from shared.connection import Argument, FleetUnavailable, Link
from shared.events import Failed, Finished, Queued, Started, Usage, decode_event
from shared.heart import Heart, Held, HeldState
from shared.keys import Keys
from shared.lua import script
from shared.queue import Claim, Outcome, Published, WorkerQueue
from shared.roster import WorkerInfo
from tests.shared.protocol_for_tests import (
    MODEL,
    block_of,
    card_of,
    command_for,
    end_of,
    finish,
    lengths_of,
    log_of,
    pending_of,
    run_out_of_lease,
    state_of,
)

HOUR_MS = 3_600_000
"""A lease that ends only when a test says so."""

NewQueue = Callable[..., WorkerQueue]


@pytest.fixture
async def fleet(redis_url: str) -> AsyncIterator[FleetClient]:
    async with FleetClient.connect(redis_url) as fleet:
        yield fleet


@pytest.fixture
async def new_queue(redis_url: str) -> AsyncIterator[NewQueue]:
    async with AsyncExitStack() as stack:

        def build(worker_id: str = "w1", **options: Any) -> WorkerQueue:
            queue = WorkerQueue.connect(
                redis_url, MODEL, worker_id, **{"lease_ms": HOUR_MS, "reap_every_ms": 0, **options}
            )
            stack.push_async_callback(queue.close)
            return queue

        yield build


@pytest.fixture
async def queue(new_queue: NewQueue) -> WorkerQueue:
    queue = new_queue()
    await queue.publish_card(card_of())
    return queue


@pytest.fixture
def new_heart(redis_url: str) -> Any:
    hearts: list[Heart] = []

    def build(worker_id: str = "w1") -> Heart:
        hearts.append(Heart.connect(redis_url, worker_id, MODEL, lease_ms=HOUR_MS))
        return hearts[-1]

    yield build
    for heart in hearts:
        heart.close()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(10):
        while not await condition():
            await asyncio.sleep(0.005)


# --- submit


async def test_a_submit_queues_once_however_often_it_is_sent(
    fleet: FleetClient, queue: WorkerQueue, fleet_redis: Any
) -> None:
    command = command_for()
    assert not (await fleet.submit(command)).duplicate
    assert (await fleet.submit(command)).duplicate
    assert lengths_of(fleet_redis) == 1
    assert log_of(fleet_redis, command.id) == []
    assert (await anext(fleet.stream(command.id))) == Queued(command.id)


async def test_a_full_lane_refuses_with_a_time_to_come_back(fleet: FleetClient, queue: WorkerQueue) -> None:
    await fleet.submit(command_for(), queue_limit=1)
    with pytest.raises(QueueFull) as refused:
        await fleet.submit(command_for(), queue_limit=1)
    assert refused.value.retry_after_s == 5
    await fleet.submit(command_for(lane="rt"), queue_limit=1)


async def test_running_requests_count_against_the_limit(fleet: FleetClient, queue: WorkerQueue) -> None:
    await fleet.submit(command_for(), queue_limit=1)
    [claim] = await queue.take(1)
    with pytest.raises(QueueFull):
        await fleet.submit(command_for(), queue_limit=1)
    await finish(queue, claim)
    await fleet.submit(command_for(), queue_limit=1)


async def test_a_known_drain_rate_gives_the_time_to_come_back(fleet: FleetClient, queue: WorkerQueue) -> None:
    for _ in range(3):
        await fleet.submit(command_for())
    for claim in await queue.take(2):
        await finish(queue, claim)
    with pytest.raises(QueueFull) as refused:
        await fleet.submit(command_for(), queue_limit=1)
    assert refused.value.retry_after_s == 1


async def test_the_pace_of_idle_times_is_no_drain_rate(fleet: FleetClient, queue: WorkerQueue) -> None:
    for _ in range(3):
        await fleet.submit(command_for())
        [claim] = await queue.take(1)
        await finish(queue, claim)
    await fleet.submit(command_for(), queue_limit=1)
    with pytest.raises(QueueFull) as refused:
        await fleet.submit(command_for(), queue_limit=1)
    assert refused.value.retry_after_s == 5


async def test_an_idempotency_key_returns_the_older_request(fleet: FleetClient, queue: WorkerQueue) -> None:
    first, second, other = command_for(), command_for(), command_for(lane="rt")
    await fleet.submit(first, idempotency_key="k", tenant="t")
    again = await fleet.submit(second, idempotency_key="k", tenant="t")
    assert (again.id, again.duplicate) == (first.id, True)
    with pytest.raises(IdempotencyConflict) as conflict:
        await fleet.submit(other, idempotency_key="k", tenant="t")
    assert conflict.value.request_id == first.id
    assert (await fleet.submit(second, idempotency_key="k", tenant="u")).id == second.id


async def test_a_model_that_nobody_announced_is_unknown(fleet: FleetClient, queue: WorkerQueue) -> None:
    with pytest.raises(UnknownModel) as unknown:
        await fleet.submit(command_for("other"))
    assert unknown.value.known == (MODEL,)
    with pytest.raises(InvalidArgument, match="id must be a request id of model"):
        await fleet.submit(command_for().model_copy(update={"model": "other"}))


# --- take, wait


async def test_a_claim_carries_the_command_and_counts_epoch_and_attempt(
    fleet: FleetClient, queue: WorkerQueue, fleet_redis: Any
) -> None:
    command = command_for()
    await fleet.submit(command)
    [claim] = await queue.take(5)
    assert (claim.id, claim.epoch, claim.attempt, claim.blocks, claim.seq, claim.log) == (command.id, 1, 1, 0, 1, [])
    assert state_of(fleet_redis, command.id)["st"] == "running"
    assert await queue.take(5) == []


async def test_take_never_claims_more_than_asked_over_all_lanes(fleet: FleetClient, queue: WorkerQueue) -> None:
    for lane in LANES:
        for _ in range(3):
            await fleet.submit(command_for(lane=lane))
    assert [len(await queue.take(4)) for _ in range(3)] == [4, 4, 1]


async def test_lanes_are_served_in_order_but_the_last_one_in_eight_first(
    fleet: FleetClient, queue: WorkerQueue
) -> None:
    bulk = [command_for(lane="bulk").id for _ in range(2)]
    for request_id in bulk:
        await fleet.submit(command_for(lane="bulk").model_copy(update={"id": request_id}))
    for _ in range(16):
        await fleet.submit(command_for(lane="rt"))
    taken = [(await queue.take(1))[0].id for _ in range(16)]
    assert [number for number, request_id in enumerate(taken) if request_id in bulk] == [7, 15]


async def test_wait_wakes_for_a_new_request(fleet: FleetClient, queue: WorkerQueue) -> None:
    assert await queue.wait(1) == []  # the groups do not exist yet
    waiting = asyncio.create_task(queue.wait(4000))
    await asyncio.sleep(0.01)
    command = command_for()
    await fleet.submit(command)
    assert [claim.id for claim in await waiting] == [command.id]


async def test_wait_gives_back_at_once_what_it_read_beyond_its_limit(fleet: FleetClient, new_queue: NewQueue) -> None:
    first, second = new_queue("w1"), new_queue("w2", reap_every_ms=HOUR_MS)
    await first.publish_card(card_of())
    await first.take(1)
    await second.take(1)
    for lane in LANES:
        await fleet.submit(command_for(lane=lane))
    assert len(await first.wait(100, limit=1)) == 1
    assert len(await second.take(5)) == 2


async def test_an_empty_server_that_lost_its_groups_gets_them_back_at_the_beginning(
    fleet: FleetClient, queue: WorkerQueue, fleet_redis: Any
) -> None:
    await queue.take(1)
    fleet_redis.flushall()
    await queue.publish_card(card_of())
    await fleet.submit(command_for())
    assert len(await queue.take(1)) == 1


async def test_an_entry_without_its_request_is_swept_away(
    fleet: FleetClient, queue: WorkerQueue, fleet_redis: Any
) -> None:
    command = command_for()
    await fleet.submit(command)
    fleet_redis.delete(Keys.of(command.id).request(command.id))
    assert await queue.take(1) == []
    await queue.take(1)
    assert (lengths_of(fleet_redis), pending_of(fleet_redis)) == (0, 0)


async def test_an_envelope_version_of_the_future_is_left_in_the_queue(
    fleet: FleetClient, queue: WorkerQueue, fleet_redis: Any
) -> None:
    command = command_for()
    await fleet.submit(command)
    lane = Keys.of(command.id).lane("std")
    [(old, fields)] = fleet_redis.xrange(lane)
    fleet_redis.xdel(lane, old)
    new = fleet_redis.xadd(lane, {**fields, b"v": 2})
    fleet_redis.hset(Keys.of(command.id).request(command.id), "eid", new)
    assert await queue.take(1) == []
    assert await queue.take(1) == []
    state = state_of(fleet_redis, command.id)
    assert (state["st"], state["att"], lengths_of(fleet_redis)) == ("queued", "0", 1)


# --- emit, finish, fences


async def test_a_block_is_committed_once_and_gaps_are_refused(
    fleet: FleetClient, queue: WorkerQueue, fleet_redis: Any
) -> None:
    await fleet.submit(command_for())
    [claim] = await queue.take(1)
    outcomes = await queue.emit([block_of(claim, 0), block_of(claim, 0), block_of(claim, 2), block_of(claim, 1)])
    assert outcomes == [Outcome.OK, Outcome.DUPLICATE, Outcome.GAP, Outcome.OK]
    ids = [entry_id for entry_id, _ in log_of(fleet_redis, claim.id)]
    assert ids == ["2-0", "3-0"]
    await finish(queue, claim, 2)


async def test_finish_commits_the_last_block_the_end_and_the_acknowledgement_together(
    fleet: FleetClient, queue: WorkerQueue, fleet_redis: Any
) -> None:
    await fleet.submit(command_for())
    [claim] = await queue.take(1)
    last, end = block_of(claim, 0), end_of(claim, 1)
    assert await queue.finish(last, replace(end, seq=4)) is Outcome.GAP
    assert log_of(fleet_redis, claim.id) == []
    assert await queue.finish(last, end) is Outcome.OK
    assert await queue.finish(last, end) is Outcome.DUPLICATE
    assert [event for _, event in log_of(fleet_redis, claim.id)] == [last, end]
    assert (lengths_of(fleet_redis), pending_of(fleet_redis)) == (0, 0)
    state = state_of(fleet_redis, claim.id)
    assert state["st"] == "done" and "in" not in state


async def three_claims(fleet: FleetClient, queue: WorkerQueue) -> list[Claim]:
    for _ in range(3):
        await fleet.submit(command_for())
    return await queue.take(3)


async def test_several_ends_take_one_round_trip_and_each_has_its_own_outcome(
    fleet: FleetClient, new_queue: NewQueue, fleet_redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, heir = new_queue("w1"), new_queue("heir")
    await queue.publish_card(card_of())
    lost, early, whole = await three_claims(fleet, queue)
    run_out_of_lease(fleet_redis, lost.id)
    [reclaimed] = await heir.take(1)
    sent: list[int] = []
    pipeline = Link.pipeline

    async def counted(link: Link, commands: Sequence[tuple[Argument, ...]]) -> list[Any]:
        sent.append(len(commands))
        return await pipeline(link, commands)

    monkeypatch.setattr(Link, "pipeline", counted)
    ends = [(block_of(lost, 0), end_of(lost, 1)), (None, end_of(early, 1)), (block_of(whole, 0), end_of(whole, 1))]
    assert await queue.finish_all(ends) == [Outcome.FENCED, Outcome.GAP, Outcome.OK]
    assert await queue.finish_all([]) == []
    assert sent == [3]
    assert [len(log_of(fleet_redis, claim.id)) for claim in (lost, early, whole)] == [0, 0, 2]
    assert (lengths_of(fleet_redis), pending_of(fleet_redis)) == (2, 2)
    rest = [(block_of(early, 0), end_of(early, 1)), (block_of(whole, 0), end_of(whole, 1))]
    assert await queue.finish_all(rest) == [Outcome.OK, Outcome.DUPLICATE]
    assert await heir.finish(None, end_of(reclaimed, 0)) is Outcome.OK
    assert (lengths_of(fleet_redis), pending_of(fleet_redis)) == (0, 0)


async def test_an_end_that_the_server_cannot_write_holds_up_none_beside_it_and_repeats_none(
    fleet: FleetClient, queue: WorkerQueue, fleet_redis: Any
) -> None:
    claims = first, broken, last = await three_claims(fleet, queue)
    log = Keys.of(broken.id).log(broken.id)
    fleet_redis.set(log, "no stream")
    ends = [(block_of(claim, 0), end_of(claim, 1)) for claim in claims]
    with pytest.raises(exceptions.ResponseError, match="WRONGTYPE"):
        await queue.finish_all(ends)
    assert [state_of(fleet_redis, claim.id)["st"] for claim in claims] == ["done", "running", "done"]
    fleet_redis.delete(log)
    assert await queue.finish_all(ends) == [Outcome.DUPLICATE, Outcome.OK, Outcome.DUPLICATE]
    for claim in (first, broken, last):
        assert [event for _, event in log_of(fleet_redis, claim.id)] == [block_of(claim, 0), end_of(claim, 1)]


async def test_ends_whose_replies_are_lost_are_sent_again_and_written_once(
    fleet: FleetClient, queue: WorkerQueue, fleet_redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims = await three_claims(fleet, queue)
    pipeline, lost = Link.pipeline, [True]

    async def losing(link: Link, commands: Sequence[tuple[Argument, ...]]) -> list[Any]:
        replies = await pipeline(link, commands)
        if lost and lost.pop():
            raise FleetUnavailable("the replies are lost")
        return replies

    monkeypatch.setattr(Link, "pipeline", losing)
    ends = [(block_of(claim, 0), end_of(claim, 1)) for claim in claims]
    assert await queue.finish_all(ends) == [Outcome.DUPLICATE] * 3
    for claim in claims:
        assert [event for _, event in log_of(fleet_redis, claim.id)] == [block_of(claim, 0), end_of(claim, 1)]


async def test_an_end_without_a_block_says_what_it_has_cost_as_its_usage_does(
    fleet: FleetClient, queue: WorkerQueue, fleet_redis: Any
) -> None:
    await fleet.submit(command_for())
    [claim] = await queue.take(1)
    end = replace(end_of(claim, 0), usage=Usage(nfe=7, blocks=2))
    assert await queue.finish(None, end) is Outcome.OK
    state = state_of(fleet_redis, claim.id)
    assert (state["st"], state["nb"], state["nt"], state["nfe"]) == ("done", "2", "0", "7")


async def test_emit_and_finish_survive_a_server_that_forgot_its_scripts(
    fleet: FleetClient, queue: WorkerQueue, fleet_redis: Any
) -> None:
    await fleet.submit(command_for())
    [claim] = await queue.take(1)
    fleet_redis.script_flush()
    assert await queue.emit([block_of(claim, 0), block_of(claim, 1)]) == [Outcome.OK, Outcome.OK]
    fleet_redis.script_flush()
    assert await queue.finish(None, end_of(claim, 2)) is Outcome.OK


@pytest.mark.parametrize(
    ("end", "state"),
    [
        (Finished("", 2, 1, "stop", "stop_token", Usage()), "done"),
        (Finished("", 2, 1, "aborted", "aborted", Usage()), "aborted"),
        (Failed("", 2, 1, "expired", "late"), "expired"),
        (Failed("", 2, 1, "poison", "bad"), "dead"),
        (Failed("", 2, 1, "nan", "bad"), "failed"),
    ],
)
async def test_the_end_decides_the_state(
    fleet: FleetClient, queue: WorkerQueue, fleet_redis: Any, end: Finished | Failed, state: str
) -> None:
    await fleet.submit(command_for())
    [claim] = await queue.take(1)
    assert await queue.finish(None, replace(end, id=claim.id)) is Outcome.OK
    assert (await fleet.result(claim.id)).state == state


async def test_a_zombie_is_refused_everywhere_after_its_lease_ended(
    fleet: FleetClient, new_queue: NewQueue, new_heart: Any, fleet_redis: Any
) -> None:
    zombie, heir = new_queue("zombie"), new_queue("heir")
    await zombie.publish_card(card_of())
    await fleet.submit(command_for())
    [lost] = await zombie.take(1)
    await zombie.emit([block_of(lost, 0)])
    run_out_of_lease(fleet_redis, lost.id)
    [claim] = await heir.take(1)

    assert (claim.epoch, claim.attempt, claim.blocks, claim.seq) == (2, 2, 1, 2)
    assert claim.log == [block_of(lost, 0)]
    assert await zombie.emit([block_of(lost, 0), block_of(lost, 1)]) == [Outcome.FENCED, Outcome.FENCED]
    assert await zombie.finish(block_of(lost, 1), end_of(lost, 2)) is Outcome.FENCED
    assert await zombie.hand_back(lost.id, lost.epoch) is Outcome.FENCED
    beaten = new_heart("zombie").beat({lost.id: lost.epoch}, WorkerInfo("zombie", MODEL, "ready"))
    assert beaten == {lost.id: Held(HeldState.FENCED)}
    assert await heir.finish(block_of(claim, 1), end_of(claim, 2)) is Outcome.OK
    assert pending_of(fleet_redis) == 0


async def test_one_epoch_handed_out_twice_by_a_server_that_lost_a_second_has_one_owner(
    fleet: FleetClient, new_queue: NewQueue, fleet_redis: Any
) -> None:
    first, second = new_queue("w1"), new_queue("w2")
    await first.publish_card(card_of())
    await fleet.submit(command_for())
    [claim] = await first.take(1)
    fleet_redis.hset(Keys.of(claim.id).request(claim.id), "own", "w2")  # the same claim again, in another history
    assert await first.emit([block_of(claim, 0)]) == [Outcome.FENCED]
    assert await second.emit([block_of(claim, 0)]) == [Outcome.OK]
    await finish(second, claim)


async def test_the_event_of_an_end_tells_when(fleet: FleetClient, queue: WorkerQueue) -> None:
    command = command_for()
    await fleet.submit(command)
    [claim] = await queue.take(1)
    before = time.time_ns() // 1_000_000
    await finish(queue, claim)
    end = (await fleet.result(command.id)).end
    assert isinstance(end, Finished) and before <= end.ended_ms <= time.time_ns() // 1_000_000


# --- leases


async def test_a_beat_keeps_the_lease_and_its_end_passes_the_request_on(
    fleet: FleetClient, new_queue: NewQueue, redis_url: str
) -> None:
    owner, other = new_queue("w1", lease_ms=200), new_queue("w2", lease_ms=200)
    heart = Heart.connect(redis_url, "w1", MODEL, lease_ms=200)
    await owner.publish_card(card_of())
    await fleet.submit(command_for())
    [claim] = await owner.take(1)
    beats = 0
    async with asyncio.timeout(10):
        while beats < 8:
            held = await asyncio.to_thread(heart.beat, {claim.id: claim.epoch}, WorkerInfo("w1", MODEL, "ready"))
            if held[claim.id].state is HeldState.FENCED:
                break  # this machine slept through a lease: then the other one's claim is right
            assert held == {claim.id: Held(HeldState.OK)}
            beats += 1
            await asyncio.sleep(0.05)
    heart.close()
    stolen = []

    async def passed_on() -> bool:
        stolen.extend(await other.take(1))
        return bool(stolen)

    await until(passed_on)
    assert [claim.id for claim in stolen] == [claim.id]


async def test_a_lost_reply_of_take_comes_back_although_its_worker_lives(
    fleet: FleetClient, queue: WorkerQueue, new_heart: Any, fleet_redis: Any
) -> None:
    for _ in range(2):
        await fleet.submit(command_for())
    held, unseen = await queue.take(2)
    run_out_of_lease(fleet_redis, unseen.id)
    run_out_of_lease(fleet_redis, held.id)
    new_heart().beat({held.id: held.epoch}, WorkerInfo("w1", MODEL, "ready"))
    assert [claim.id for claim in await queue.take(2)] == [unseen.id]


async def test_what_a_worker_lost_is_taken_in_portions_without_a_pause_and_before_what_is_new(
    fleet: FleetClient, new_queue: NewQueue, fleet_redis: Any
) -> None:
    gone = new_queue("gone")
    await gone.publish_card(card_of())
    lost = [(await fleet.submit(command_for())).id for _ in range(4)]
    await gone.take(4)
    for request_id in lost:
        run_out_of_lease(fleet_redis, request_id)
    new = (await fleet.submit(command_for())).id
    heir = new_queue("heir", reap_every_ms=HOUR_MS)
    taken = [claim.id for number in range(1, 6) for claim in await heir.take(1, held=number)]
    assert taken == [*lost, new]


async def test_the_reaper_sees_past_many_live_entries(
    fleet: FleetClient, new_queue: NewQueue, fleet_redis: Any
) -> None:
    owner, other = new_queue("w1"), new_queue("w2")
    await owner.publish_card(card_of())
    for _ in range(45):
        await fleet.submit(command_for())
    claims = await owner.take(45)
    run_out_of_lease(fleet_redis, claims[-1].id)
    assert [claim.id for claim in await other.take(1)] == [claims[-1].id]


async def test_what_is_handed_back_is_taken_at_once_and_does_not_count_as_an_attempt(
    fleet: FleetClient, new_queue: NewQueue
) -> None:
    first, second = new_queue("w1"), new_queue("w2", reap_every_ms=HOUR_MS)
    await first.publish_card(card_of())
    await second.take(1)
    await second.take(1)  # its reaping is not due for an hour from here on
    await fleet.submit(command_for())
    [claim] = await first.take(1)
    await first.emit([block_of(claim, 0)])
    assert await first.hand_back(claim.id, claim.epoch) is Outcome.OK
    assert await first.emit([block_of(claim, 1)]) == [Outcome.FENCED]
    [heir] = await second.take(1)
    assert (heir.epoch, heir.attempt, heir.blocks, heir.log) == (3, 1, 1, [block_of(claim, 0)])


async def test_a_delayed_hand_back_waits(fleet: FleetClient, new_queue: NewQueue) -> None:
    queue = new_queue("w1")
    await queue.publish_card(card_of())
    await fleet.submit(command_for())
    [claim] = await queue.take(1)
    await queue.hand_back(claim.id, claim.epoch, delay_ms=60_000)
    assert await queue.take(1) == []
    soon = new_queue("w2", lease_ms=HOUR_MS - 60_000)  # for which the hour less a minute has passed
    assert [claim.id for claim in await soon.take(1)] == [claim.id]


async def test_a_request_that_every_worker_loses_is_dead_lettered(
    fleet: FleetClient, new_queue: NewQueue, fleet_redis: Any
) -> None:
    queue = new_queue("w1", max_attempts=2)
    await queue.publish_card(card_of())
    command = command_for()
    await fleet.submit(command)
    for attempt in (1, 2, 3):
        [claim] = await queue.take(1)
        assert claim.attempt == attempt
        await queue.emit([block_of(claim, claim.blocks)])  # progress does not clear the count
        run_out_of_lease(fleet_redis, claim.id)
    assert await queue.take(1) == []
    result = await fleet.result(command.id)
    assert result.state == "dead" and isinstance(result.end, Failed) and result.end.code == "poison"
    [(_, letter)] = fleet_redis.xrange(Keys.of(command.id).dead_letters())
    assert letter[b"id"].decode() == command.id
    assert (lengths_of(fleet_redis), pending_of(fleet_redis)) == (0, 0)


# --- aborts and deadlines


async def test_a_queued_request_is_aborted_at_once(fleet: FleetClient, queue: WorkerQueue, fleet_redis: Any) -> None:
    command = command_for()
    await fleet.submit(command)
    assert await fleet.abort(command.id) == "aborted"
    assert await fleet.abort(command.id) == "aborted"
    assert lengths_of(fleet_redis) == 0
    end = Finished(command.id, 2, 0, "aborted", "aborted", Usage(prompt_tokens=3))
    assert (await fleet.result(command.id)).end == end
    assert await queue.take(1) == []


async def test_the_owner_of_a_running_request_sees_its_abort(
    fleet: FleetClient, queue: WorkerQueue, new_heart: Any
) -> None:
    await fleet.submit(command_for())
    await fleet.submit(command_for())
    one, two = await queue.take(2)
    assert await queue.find_aborted([one.id, two.id]) == {}
    assert await fleet.abort(one.id, "because") == "running"
    assert await queue.find_aborted([one.id, two.id]) == {one.id: "because"}
    held = new_heart().beat({one.id: one.epoch, two.id: two.epoch}, WorkerInfo("w1", MODEL, "ready"))
    assert held == {one.id: Held(HeldState.ABORTED, "because"), two.id: Held(HeldState.OK)}
    await finish(queue, two)
    assert await fleet.abort(two.id) == "done"


async def test_an_abort_outlives_the_worker_and_is_counted_honestly(
    fleet: FleetClient, new_queue: NewQueue, fleet_redis: Any
) -> None:
    first, second = new_queue("w1"), new_queue("w2")
    await first.publish_card(card_of())
    await fleet.submit(command_for())
    [claim] = await first.take(1)
    await first.emit([block_of(claim, 0)])
    await fleet.abort(claim.id)
    run_out_of_lease(fleet_redis, claim.id)
    assert await second.take(1) == []
    end = Finished(claim.id, 3, 2, "aborted", "aborted", Usage(3, 2, 1, 1))
    assert (await fleet.result(claim.id)).end == end
    assert await first.finish(None, end_of(claim, 1)) is Outcome.FENCED


async def test_an_abort_that_comes_before_its_request_is_not_lost(
    fleet: FleetClient, queue: WorkerQueue, fleet_redis: Any
) -> None:
    command = command_for()
    assert await fleet.abort(command.id) == "unknown"
    await fleet.submit(command)
    assert (await fleet.result(command.id)).state == "aborted"
    assert lengths_of(fleet_redis) == 0


@pytest.mark.parametrize(("queue_ms", "total_ms"), [(1, None), (None, 1)])
async def test_a_request_that_nobody_started_in_time_expires_without_work(
    fleet: FleetClient, queue: WorkerQueue, fleet_redis: Any, queue_ms: int | None, total_ms: int | None
) -> None:
    command = command_for(queue_ms=queue_ms, total_ms=total_ms)
    await fleet.submit(command)
    await asyncio.sleep(0.01)
    assert await queue.take(1) == []
    result = await fleet.result(command.id)
    assert result.state == "expired" and isinstance(result.end, Failed) and result.end.code == "expired"
    assert lengths_of(fleet_redis) == 0


async def test_a_start_in_time_keeps_a_queue_deadline(fleet: FleetClient, queue: WorkerQueue, new_heart: Any) -> None:
    await fleet.submit(command_for(queue_ms=2000))
    [claim] = await queue.take(1)
    await queue.hand_back(claim.id, claim.epoch)
    [claim] = await queue.take(1)
    held = new_heart().beat({claim.id: claim.epoch}, WorkerInfo("w1", MODEL, "ready"))
    assert held == {claim.id: Held(HeldState.OK)}


async def test_a_running_request_past_its_deadline_is_reported_to_its_worker(
    fleet: FleetClient, queue: WorkerQueue, new_heart: Any
) -> None:
    await fleet.submit(command_for(total_ms=1000))
    [claim] = await queue.take(1)

    async def expired() -> bool:
        held = new_heart().beat({claim.id: claim.epoch}, WorkerInfo("w1", MODEL, "ready"))
        return held == {claim.id: Held(HeldState.EXPIRED)}

    await until(expired)
    assert await queue.finish(None, Failed(claim.id, 2, claim.epoch, "expired", "late")) is Outcome.OK


# --- memory, consumers, cards, workers


async def test_without_memory_submits_are_refused_but_running_requests_finish(
    fleet: FleetClient, queue: WorkerQueue, fleet_redis: Any
) -> None:
    await fleet.submit(command_for())
    await fleet.submit(command_for())
    [claim] = await queue.take(1)
    fleet_redis.config_set("maxmemory", "1")
    try:
        reply = await _submit_once(fleet, fleet_redis)
        assert isinstance(reply, FleetUnavailable)
        assert await queue.emit([block_of(claim, 0)]) == [Outcome.OK]
        assert await queue.finish(None, end_of(claim, 1)) is Outcome.OK
        [claim] = await queue.take(1)
        assert await queue.hand_back(claim.id, claim.epoch) is Outcome.OK
        assert await fleet.abort(claim.id) == "aborted"
    finally:
        fleet_redis.config_set("maxmemory", "1gb")


async def _submit_once(fleet: FleetClient, fleet_redis: Any) -> object:
    try:
        async with asyncio.timeout(20):
            return await fleet.submit(command_for())
    except FleetUnavailable as error:
        return error


async def test_a_consumer_leaves_when_it_holds_nothing_and_stays_when_it_does(
    fleet: FleetClient, new_queue: NewQueue, redis_url: str, fleet_redis: Any
) -> None:
    busy = WorkerQueue.connect(redis_url, MODEL, "busy", lease_ms=HOUR_MS)
    idle = WorkerQueue.connect(redis_url, MODEL, "idle", lease_ms=HOUR_MS)
    heir = new_queue("heir")
    await busy.publish_card(card_of())
    await busy.take(1)
    await fleet.submit(command_for())
    [claim] = await busy.take(1)
    await idle.take(1)
    await busy.hand_back(claim.id, claim.epoch)
    await busy.close()
    await idle.close()
    lane = Keys.of(claim.id).lane("std")
    assert {consumer["name"] for consumer in fleet_redis.xinfo_consumers(lane, "g")} == {b"busy"}
    assert len(await heir.take(1)) == 1

    async with AsyncExitStack() as stack:
        link = Link.open(redis_url)
        stack.push_async_callback(link.close)
        lanes = [Keys.of(claim.id).lane(lane) for lane in LANES]
        assert await link.run(script("forget_consumers"), lanes, ["g", "", "me", 600_000]) == 0
        assert await link.run(script("forget_consumers"), lanes, ["g", "", "me", 0]) > 0
    assert {consumer["name"] for consumer in fleet_redis.xinfo_consumers(lane, "g")} == {b"heir"}


async def test_a_card_is_written_once_and_read_by_its_digest(
    fleet: FleetClient, queue: WorkerQueue, fleet_redis: Any
) -> None:
    assert await fleet.models() == [MODEL]
    assert await fleet.card(MODEL) == card_of()
    fleet_redis.hset(names.card(MODEL), "stale", "1")
    await queue.publish_card(card_of())
    assert fleet_redis.hexists(names.card(MODEL), "stale")
    await queue.publish_card(card_of(digest="other"))
    assert not fleet_redis.hexists(names.card(MODEL), "stale")


async def test_a_card_knows_since_when_it_is_there(
    fleet: FleetClient, queue: WorkerQueue, new_queue: NewQueue, fleet_redis: Any
) -> None:
    before = fleet_redis.time()[0]
    created = (await fleet.card(MODEL)).created
    assert before - 60 < created <= fleet_redis.time()[0]
    fleet_redis.hset(names.card(MODEL), "created", 5)
    await new_queue("w2").publish_card(card_of())
    assert fleet_redis.hget(names.card(MODEL), "created") == b"5"
    await queue.publish_card(card_of(digest="other"))
    assert int(fleet_redis.hget(names.card(MODEL), "created")) >= created


ADAPTED = replace(card_of(), digest="", files={TARGETS_FILE: b"{}"})


@pytest.mark.parametrize("alone", [True, False])
async def test_a_worker_without_adapters_leaves_the_card_of_others_that_take_them(
    alone: bool, fleet: FleetClient, new_queue: NewQueue, new_heart: Any
) -> None:
    await new_queue("w1").publish_card(ADAPTED)
    # Its own beat is none of another worker, nor is that of one which has ended.
    new_heart("w2").beat({}, WorkerInfo("w2", MODEL, "ready"))
    new_heart("w3").beat({}, WorkerInfo("w3", MODEL, "draining"))
    if not alone:
        new_heart("w1").beat({}, WorkerInfo("w1", MODEL, "ready"))
    published = await new_queue("w2").publish_card(card_of())
    assert published == Published((TARGETS_FILE,), others=0 if alone else 1, kept=not alone, adapters=True)
    assert (await fleet.card(MODEL)).files == ({} if alone else ADAPTED.files)


async def test_who_publishes_another_card_hears_what_is_other_in_it(new_queue: NewQueue, new_heart: Any) -> None:
    queue = new_queue("w2")
    assert await queue.publish_card(card_of()) == Published()
    assert await queue.publish_card(card_of()) == Published()
    new_heart("w1").beat({}, WorkerInfo("w1", MODEL, "ready"))
    assert await queue.publish_card(ADAPTED) == Published((TARGETS_FILE,), others=1)
    changed = replace(ADAPTED, digest="", max_model_len=32, files={"tokenizer.json": b"1"})
    told = ("max_model_len", TARGETS_FILE, "tokenizer.json")
    assert await queue.publish_card(changed) == Published(told, others=1, adapters=True)


async def test_a_card_that_nobody_here_can_read_is_replaced(
    fleet: FleetClient, queue: WorkerQueue, fleet_redis: Any
) -> None:
    fleet_redis.hset(names.card(MODEL), mapping={"v": "99", "digest": "other"})
    assert await queue.publish_card(card_of()) == Published(("version",))
    assert await fleet.card(MODEL) == card_of()


async def test_live_workers_are_listed_with_what_they_say(
    fleet: FleetClient, queue: WorkerQueue, new_heart: Any, fleet_redis: Any
) -> None:
    info = WorkerInfo("w1", MODEL, "ready", slots=8, free=7, steps=12, version="1", device="cpu")
    new_heart().beat({}, info)
    new_heart("gone").beat({}, replace(info, id="gone"))
    fleet_redis.delete(Keys("m.0").worker("gone"))
    [seen] = await fleet.workers(MODEL)
    assert replace(seen, beat_ms=0) == info and seen.beat_ms > 0
    await fleet.submit(command_for())
    await fleet.submit(command_for(lane="bulk"))
    assert await fleet.depth(MODEL) == 2


@pytest.mark.parametrize("name", ["nope", "no such name"])
async def test_what_an_unknown_model_has_is_not_told_as_nothing(
    fleet: FleetClient, queue: WorkerQueue, name: str
) -> None:
    asked = (fleet.workers, fleet.adapters, fleet.queue, fleet.depth, fleet.dead_letters)
    for ask in asked:
        with pytest.raises(UnknownModel, match=f"'{name}' is not served here; known: {MODEL}"):
            await ask(name)
    for ask in (fleet.workers, fleet.adapters):
        assert await ask(MODEL) == []


async def test_previews_are_published_and_never_stored(
    fleet: FleetClient, queue: WorkerQueue, fleet_redis: Any
) -> None:
    command = command_for()
    await fleet.submit(command)
    channel = Keys.of(command.id).channel(command.id)
    with fleet_redis.pubsub() as pubsub:
        pubsub.subscribe(channel)
        assert pubsub.get_message(timeout=5)["type"] == "subscribe"
        await queue.preview([Started(command.id, 1, "w1")])
        assert decode_event(pubsub.get_message(timeout=5)["data"]) == Started(command.id, 1, "w1")
    assert log_of(fleet_redis, command.id) == []


async def test_a_server_that_is_away_is_said_so_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.connection.RETRY_S", 0.2)
    async with FleetClient.connect("redis://127.0.0.1:1/0") as fleet:
        with pytest.raises(FleetUnavailable):
            await fleet.ping()
        with pytest.raises(FleetUnavailable):
            await fleet.models()


async def test_a_card_that_takes_anothers_place_is_told(new_queue: NewQueue) -> None:
    queue = new_queue("w1")
    told = [(await queue.publish_card(card_of(digest=digest))).differs for digest in ("a", "a", "b")]
    assert told == [(), (), ("version",)]
