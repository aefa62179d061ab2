"""A crash makes suspects of all that its worker ran; the culprit is found by halving, and the innocent finish."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from shared.admission import Admission
from shared.client import QUEUE_LIMIT, FleetClient, QueueFull, UnknownRequest
from shared.commands import Generate, Webhook
from shared.connection import Link
from shared.dead_letters import Fate
from shared.events import Failed
from shared.heart import Heart
from shared.keys import Keys, ulid
from shared.queue import Claim, Outcome, WorkerQueue
from shared.roster import WorkerInfo
from shared.webhooks import WebhookStore
from tests.shared.protocol_for_tests import (
    MODEL,
    card_of,
    command_for,
    finish,
    lengths_of,
    pending_of,
    run_out_of_lease,
    state_of,
)

HOUR_MS = 3_600_000
SLOTS = 8

NewQueue = Callable[[str], WorkerQueue]


@pytest.fixture
async def new_queue(redis_url: str) -> AsyncIterator[NewQueue]:
    async with AsyncExitStack() as stack:

        def build(worker_id: str) -> WorkerQueue:
            queue = WorkerQueue.connect(redis_url, MODEL, worker_id, HOUR_MS, reap_every_ms=0, slots=SLOTS)
            stack.push_async_callback(queue.close)
            return queue

        queue = build("announcer")
        await queue.publish_card(card_of())
        yield build


@pytest.fixture
async def fleet(redis_url: str, new_queue: NewQueue) -> AsyncIterator[FleetClient]:
    async with FleetClient.connect(redis_url) as fleet:
        yield fleet


def crash(redis: Any, claims: list[Claim]) -> None:
    """The worker of these claims is gone, and its leases and locks have run out."""
    keys = Keys(f"{MODEL}.0")
    for claim in claims:
        run_out_of_lease(redis, claim.id)
        redis.delete(keys.worker(state_of(redis, claim.id)["own"]))
    redis.delete(keys.officers())


def announce(url: str, *names: str, free: int = SLOTS) -> None:
    """Let workers beat once, with nothing held."""
    for name in names:
        heart = Heart.connect(url, name, MODEL, HOUR_MS)
        heart.beat({}, WorkerInfo(name, MODEL, "ready", slots=SLOTS, free=free))
        heart.close()


async def submit(fleet: FleetClient, count: int) -> list[str]:
    return [(await fleet.submit(command_for())).id for _ in range(count)]


async def submit_suspects(fleet: FleetClient, new_queue: NewQueue, redis: Any, count: int) -> list[str]:
    """Return requests that have lost two workers."""
    ids = await submit(fleet, count)
    for _ in range(2):
        claims = await new_queue(f"gone-{ulid()}").take(count)
        assert {claim.id for claim in claims} == set(ids)
        crash(redis, claims)
    return ids


async def test_a_first_crash_is_forgiven(fleet: FleetClient, new_queue: NewQueue, fleet_redis: Any) -> None:
    ids = await submit(fleet, 3)
    crash(fleet_redis, await new_queue("gone").take(3))
    ids += await submit(fleet, 1)
    heir = new_queue("heir")
    assert {claim.id for claim in await heir.take(SLOTS, held=1)} == set(ids)
    assert not heir.on_probation


async def test_a_poison_is_found_by_halving_and_the_innocent_finish(
    fleet: FleetClient, new_queue: NewQueue, fleet_redis: Any
) -> None:
    ids = await submit(fleet, 25)
    poison = ids[5]
    deaths = 0
    for number in range(40):
        queue = new_queue(f"w{number}")
        claims = await queue.take(SLOTS)
        while claims and poison not in [claim.id for claim in claims]:
            for claim in claims:
                await finish(queue, claim)
            claims = await queue.take(SLOTS)
        if not claims:
            break
        deaths += 1
        crash(fleet_redis, claims)

    assert deaths == 5  # twice among 8, for the first is forgiven; then 4, 2, 1
    states = {request_id: (await fleet.result(request_id)).state for request_id in ids}
    assert states.pop(poison) == "dead"
    assert set(states.values()) == {"done"}
    assert (lengths_of(fleet_redis), pending_of(fleet_redis)) == (0, 0)
    assert not fleet_redis.exists(Keys(f"{MODEL}.0").officers())


async def test_suspects_run_with_one_worker_that_takes_nothing_beside_them(
    fleet: FleetClient, new_queue: NewQueue, fleet_redis: Any
) -> None:
    suspects = await submit_suspects(fleet, new_queue, fleet_redis, 2)
    fresh = await submit(fleet, 3)
    officer, other = new_queue("officer"), new_queue("other")

    claims = await officer.take(SLOTS)
    assert {claim.id for claim in claims} == set(suspects)
    assert officer.on_probation
    assert await officer.take(SLOTS, held=2) == []
    assert [claim.id for claim in await other.take(2)] == fresh[:2]
    for claim in claims:
        await finish(officer, claim)
    assert [claim.id for claim in await officer.take(SLOTS)] == fresh[2:]
    assert not officer.on_probation


async def test_a_busy_worker_empties_itself_before_it_runs_suspects(
    fleet: FleetClient, new_queue: NewQueue, fleet_redis: Any
) -> None:
    busy = new_queue("busy")
    await submit(fleet, 1)
    [running] = await busy.take(1)
    [suspect] = await submit_suspects(fleet, new_queue, fleet_redis, 1)
    await submit(fleet, 1)

    assert await busy.take(SLOTS - 1, held=1) == []
    assert busy.on_probation
    await finish(busy, running)
    assert [claim.id for claim in await busy.take(SLOTS)] == [suspect]


@pytest.mark.parametrize(
    ("others", "free", "gives_back"), [((), 0, False), (("b",), 1, False), (("b",), 2, True), (("b", "c"), 0, True)]
)
async def test_a_busy_worker_gives_back_what_the_rest_can_go_on_with_and_runs_the_suspects(
    others: tuple[str, ...],
    free: int,
    gives_back: bool,
    fleet: FleetClient,
    new_queue: NewQueue,
    fleet_redis: Any,
    redis_url: str,
) -> None:
    busy = new_queue("busy")
    await submit(fleet, 2)
    running = await busy.take(2)
    [suspect] = await submit_suspects(fleet, new_queue, fleet_redis, 1)
    announce(redis_url, "busy", *others, free=free)

    assert await busy.take(SLOTS - 2, held=2) == []
    assert (busy.on_probation, busy.wants_room) == (True, gives_back)
    assert await busy.take(SLOTS - 2, held=2) == []
    assert not busy.wants_room, "asked twice"
    for claim in running:
        await busy.hand_back(claim.id, claim.epoch)
    assert [claim.id for claim in await busy.take(SLOTS)] == [suspect]
    heir = new_queue("heir")
    assert [(claim.id, claim.attempt) for claim in await heir.take(SLOTS)] == [(claim.id, 1) for claim in running]


async def test_a_busy_worker_gives_back_what_it_runs_once_another_has_come_but_never_its_suspects(
    fleet: FleetClient, new_queue: NewQueue, fleet_redis: Any, redis_url: str
) -> None:
    busy = new_queue("busy")
    await submit(fleet, 2)
    running = await busy.take(2)
    suspects = await submit_suspects(fleet, new_queue, fleet_redis, 2)
    announce(redis_url, "busy")
    for _ in range(2):
        assert await busy.take(SLOTS - 2, held=2) == []
        assert (busy.on_probation, busy.wants_room) == (True, False)
    announce(redis_url, "new")
    assert await busy.take(SLOTS - 2, held=2) == [] and busy.wants_room
    assert await busy.take(SLOTS - 2, held=2) == [] and not busy.wants_room, "asked twice"
    for claim in running:
        await busy.hand_back(claim.id, claim.epoch)
    assert {claim.id for claim in await busy.take(SLOTS)} == set(suspects)
    assert await busy.take(SLOTS - 2, held=2) == [] and not busy.wants_room, "it examines them"


async def test_an_officer_leaves_to_others_what_has_lost_one_worker(
    fleet: FleetClient, new_queue: NewQueue, fleet_redis: Any
) -> None:
    forgiven = await submit(fleet, 3)
    lost = await new_queue("gone").take(3)
    suspects = await submit_suspects(fleet, new_queue, fleet_redis, 2)
    crash(fleet_redis, lost)
    officer, other = new_queue("officer"), new_queue("other")
    claims = await officer.take(SLOTS)
    assert {claim.id for claim in claims} == set(suspects)
    # At once: it need not be the time to look for what was lost.
    other._partitions[0].reap_at = float("inf")
    assert [(claim.id, claim.attempt) for claim in await other.take(SLOTS)] == [(one, 2) for one in forgiven]
    for claim in claims:
        await finish(officer, claim)
    assert await officer.take(SLOTS) == [] and not officer.on_probation


@pytest.mark.parametrize(("size", "officers"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3)])
async def test_half_of_a_fleet_runs_suspects_while_many_wait(
    size: int, officers: int, fleet: FleetClient, new_queue: NewQueue, fleet_redis: Any, redis_url: str
) -> None:
    suspects = await submit_suspects(fleet, new_queue, fleet_redis, 3 * SLOTS)
    names = [f"w{number}" for number in range(size)]
    announce(redis_url, *names)
    groups = [await new_queue(name).take(SLOTS) for name in names]
    assert [len(group) for group in groups] == [SLOTS // 2] * officers + [0] * (size - officers)
    claimed = [claim.id for group in groups for claim in group]
    assert len(set(claimed)) == len(claimed) and set(claimed) <= set(suspects)


async def test_the_beat_keeps_the_lock_of_whoever_examines_suspects(
    fleet: FleetClient, new_queue: NewQueue, fleet_redis: Any, redis_url: str
) -> None:
    await submit_suspects(fleet, new_queue, fleet_redis, 1)
    await new_queue("officer").take(1)
    officers = Keys(f"{MODEL}.0").officers()
    soon = fleet_redis.zscore(officers, "officer") - HOUR_MS // 2
    fleet_redis.zadd(officers, {"officer": soon})
    for name, renewed in (("other", False), ("officer", True)):
        announce(redis_url, name)
        assert (fleet_redis.zscore(officers, "officer") > soon) is renewed
        assert fleet_redis.zscore(officers, "other") is None


async def test_a_worker_that_leaves_gives_up_its_lock(
    fleet: FleetClient, new_queue: NewQueue, redis_url: str, fleet_redis: Any
) -> None:
    [request_id] = await submit_suspects(fleet, new_queue, fleet_redis, 1)
    officer = WorkerQueue.connect(redis_url, MODEL, "officer", HOUR_MS, reap_every_ms=0)
    [claim] = await officer.take(1)
    await officer.hand_back(claim.id, claim.epoch)
    assert fleet_redis.exists(Keys.of(request_id).officers())
    await officer.close()
    assert not fleet_redis.exists(Keys.of(request_id).officers())


async def test_a_suspect_that_is_handed_back_stays_one(
    fleet: FleetClient, new_queue: NewQueue, fleet_redis: Any
) -> None:
    ids = await submit_suspects(fleet, new_queue, fleet_redis, 2)
    officer, heir = new_queue("officer"), new_queue("heir")
    for claim in await officer.take(SLOTS):
        assert await officer.hand_back(claim.id, claim.epoch) is Outcome.OK
    fleet_redis.delete(Keys(f"{MODEL}.0").officers())
    await submit(fleet, 1)
    claims = await heir.take(SLOTS)
    assert {claim.id for claim in claims} == set(ids) and {claim.attempt for claim in claims} == {3}
    assert heir.on_probation


async def test_a_lost_reply_makes_no_suspect_of_a_request_whose_owner_lives(
    fleet: FleetClient, new_queue: NewQueue, fleet_redis: Any, redis_url: str
) -> None:
    [request_id] = await submit(fleet, 1)
    await new_queue("owner").take(1)  # of which it never hears
    heart = Heart.connect(redis_url, "owner", MODEL, HOUR_MS)
    heart.beat({}, WorkerInfo("owner", MODEL, "ready"))
    heart.close()
    run_out_of_lease(fleet_redis, request_id)
    other = new_queue("other")
    [claim] = await other.take(SLOTS)
    assert (claim.epoch, claim.attempt, other.on_probation) == (2, 1, False)


async def test_a_worker_that_comes_back_acquits_what_it_ran(
    fleet: FleetClient, new_queue: NewQueue, fleet_redis: Any, redis_url: str
) -> None:
    [request_id] = await submit(fleet, 1)
    [lost] = await new_queue("frozen").take(1)
    crash(fleet_redis, [lost])
    [claim] = await new_queue("second").take(1)
    assert claim.attempt == 2
    heart = Heart.connect(redis_url, "frozen", MODEL, HOUR_MS)
    for _ in range(2):
        heart.beat({lost.id: lost.epoch}, WorkerInfo("frozen", MODEL, "ready"))
    heart.close()
    assert (state_of(fleet_redis, request_id)["att"], state_of(fleet_redis, request_id)["lost"]) == ("1", "")
    crash(fleet_redis, [claim])
    third = new_queue("third")
    [claim] = await third.take(1)
    assert (claim.attempt, third.on_probation) == (2, False)


async def die(
    fleet: FleetClient, new_queue: NewQueue, redis: Any, command: Generate | None = None, tenant: str = ""
) -> str:
    """Return a request that has killed all workers which ran it."""
    request_id = (await fleet.submit(command or command_for(), tenant=tenant)).id
    for number in range(4):
        crash(redis, await new_queue(f"w{number}").take(1))
    assert await new_queue("last").take(1) == []
    return request_id


async def test_a_dead_letter_tells_what_died_with_it(fleet: FleetClient, new_queue: NewQueue, fleet_redis: Any) -> None:
    first, second = [await die(fleet, new_queue, fleet_redis) for _ in range(2)]
    [newest, oldest] = await fleet.dead_letters(MODEL)
    assert (newest.id, oldest.id) == (second, first)
    assert (newest.attempts, newest.why, newest.lost_workers) == (4, "alone", ("w0", "w1", "w2", "w3"))
    assert await fleet.dead_letters(MODEL, limit=1) == [newest]
    end = (await fleet.result(first)).end
    assert isinstance(end, Failed) and end.code == "poison" and "4 workers" in end.message
    # Its command can be read for a week.
    assert (await fleet.dead_command(first)).id == first
    assert fleet_redis.ttl(Keys.of(first).request(first)) > 6 * 86_400


async def test_a_dead_letter_is_replayed_once_under_a_new_id(
    fleet: FleetClient, new_queue: NewQueue, fleet_redis: Any
) -> None:
    dead = await die(fleet, new_queue, fleet_redis)
    again = await fleet.replay(dead)
    assert again.id != dead and await fleet.dead_letters(MODEL) == []
    queue = new_queue("healed")
    [claim] = await queue.take(1)
    assert (claim.id, claim.attempt, queue.on_probation) == (again.id, 1, False)
    await finish(queue, claim)
    assert (await fleet.result(again.id)).state == "done"


@pytest.mark.parametrize("limit", [0, 5])
async def test_a_replay_is_its_owners_who_is_told_of_its_end(
    redis_url: str, new_queue: NewQueue, fleet_redis: Any, limit: int
) -> None:
    hooked = command_for().model_copy(update={"webhook": Webhook(url="https://receiver.example/")})
    async with FleetClient.connect(redis_url, admission=Admission(tenant_limit=limit)) as fleet:
        dead = await die(fleet, new_queue, fleet_redis, hooked, "team")
        again = await fleet.replay(dead)
    queue = new_queue("healed")
    [claim] = await queue.take(1)
    await finish(queue, claim)
    link = Link.open(redis_url)
    told = await WebhookStore(link).take(Keys(f"{MODEL}.0"), 5, 60_000)
    await link.close()
    assert {(one.id, one.to.tenant) for one in told} == {(dead, "team"), (again.id, "team")}


async def test_a_replay_that_is_asked_for_again_runs_nothing_twice(
    fleet: FleetClient, new_queue: NewQueue, fleet_redis: Any
) -> None:
    dead = await die(fleet, new_queue, fleet_redis)
    answers = await asyncio.gather(*(fleet.replay(dead) for _ in range(5)))
    assert len({each.id for each in answers}) == 1 and [each.duplicate for each in answers].count(False) == 1
    assert len(await new_queue("healed").take(5)) == 1
    assert await fleet.dead_fate(dead) == Fate("dead", answers[0].id)
    assert not await fleet.discard(dead)


async def test_a_replay_that_found_the_queue_full_can_be_tried_again(
    fleet: FleetClient, new_queue: NewQueue, fleet_redis: Any
) -> None:
    dead = await die(fleet, new_queue, fleet_redis)
    await submit(fleet, QUEUE_LIMIT)
    with pytest.raises(QueueFull):
        await fleet.replay(dead)
    assert [letter.id for letter in await fleet.dead_letters(MODEL)] == [dead]
    queue = new_queue("healed")
    [claim] = await queue.take(1)
    await finish(queue, claim)
    assert not (await fleet.replay(dead)).duplicate
    assert await fleet.dead_letters(MODEL) == []


async def test_a_dead_letter_can_be_discarded(fleet: FleetClient, new_queue: NewQueue, fleet_redis: Any) -> None:
    dead = await die(fleet, new_queue, fleet_redis)
    assert await fleet.discard(dead)
    assert not await fleet.discard(dead)
    assert await fleet.dead_letters(MODEL) == []


async def test_only_what_is_dead_can_be_replayed(fleet: FleetClient, new_queue: NewQueue) -> None:
    [request_id] = await submit(fleet, 1)
    for wrong in (request_id, "r_m.0_" + "0" * 26, "nonsense"):
        with pytest.raises(UnknownRequest):
            await fleet.replay(wrong)
