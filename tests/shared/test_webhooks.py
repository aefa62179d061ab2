"""The record of a webhook is there exactly when its request has ended, whoever ended it."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from shared.client import FleetClient
from shared.commands import Generate, Webhook, decode_command, encode_command
from shared.connection import Link
from shared.events import Failed, Finished, decode_event
from shared.keys import OTHER_HOOKS, Keys, new_request_id
from shared.queue import Outcome, WorkerQueue
from shared.sweep import sweep_lanes
from shared.webhooks import Recipient, Taken, WebhookStore, hook_keys
from tests.shared.protocol_for_tests import MODEL, block_of, card_of, command_for, end_of, finish, run_out_of_lease

PART = Keys(f"{MODEL}.0")
HOOK = Webhook(url="https://receiver.example/", metadata={"order": "7"})


def hooked(command: Generate | None = None) -> Generate:
    return (command or command_for()).model_copy(update={"webhook": HOOK})


@pytest.fixture
async def queue(redis_url: str) -> AsyncIterator[WorkerQueue]:
    queue = WorkerQueue.connect(redis_url, MODEL, "w1", reap_every_ms=0)
    await queue.publish_card(card_of())
    yield queue
    await queue.close()


@pytest.fixture
async def fleet(redis_url: str, queue: WorkerQueue) -> AsyncIterator[FleetClient]:
    async with FleetClient.connect(redis_url) as fleet:
        yield fleet


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[WebhookStore]:
    link = Link.open(redis_url)
    yield WebhookStore(link)
    await link.close()


async def due(store: WebhookStore) -> int:
    return (await store.census([PART])).due


@pytest.mark.parametrize("asked", [None, f"{MODEL}:fox"])
async def test_results_and_messages_tell_the_model_by_the_name_that_was_asked_for(
    fleet: FleetClient, queue: WorkerQueue, store: WebhookStore, asked: str | None
) -> None:
    command = hooked(command_for().model_copy(update={"asked": asked}))
    await fleet.submit(command)
    assert (await fleet.result(command.id)).model == (asked or MODEL)
    (claim,) = await queue.take(1)
    await finish(queue, claim)
    assert (await fleet.result(command.id)).model == (asked or MODEL)
    (taken,) = await store.take(PART, 1, 60_000)
    assert (taken.to.model, taken.to.url) == (asked, HOOK.url)


async def test_an_end_and_its_message_are_one(fleet: FleetClient, queue: WorkerQueue, store: WebhookStore) -> None:
    await fleet.submit(hooked(), tenant="team")
    (claim,) = await queue.take(1)
    await queue.emit([block_of(claim, 0)])
    assert await due(store) == 0
    assert await queue.finish(None, end_of(claim, 1)) is Outcome.OK
    assert await queue.finish(None, end_of(claim, 1)) is Outcome.DUPLICATE
    (taken,) = await store.take(PART, 10, 60_000)
    assert (taken.id, taken.attempt) == (claim.id, 1)
    assert taken.to == Recipient(url=HOOK.url, tenant="team", metadata=HOOK.metadata)
    assert decode_event(taken.end) == end_of(claim, 1)
    # Read again, for nobody has said what became of it: not before its lease is over.
    assert await store.take(PART, 10, 60_000) == []


async def test_a_worker_that_was_killed_leaves_the_message_to_the_next(
    fleet: FleetClient, queue: WorkerQueue, store: WebhookStore, redis_url: str, fleet_redis: Any
) -> None:
    command = hooked()
    await fleet.submit(command)
    (claim,) = await queue.take(1)
    await queue.emit([block_of(claim, 0)])
    run_out_of_lease(fleet_redis, command.id)
    other = WorkerQueue.connect(redis_url, MODEL, "w2", reap_every_ms=0)
    (again,) = await other.take(1)
    assert await queue.finish(None, end_of(claim, 1)) is Outcome.FENCED
    assert await due(store) == 0, "a worker that has lost its request tells nobody"
    await finish(other, again, 2)
    await other.close()
    assert await due(store) == 1


async def test_every_way_to_end_has_its_message(
    fleet: FleetClient, queue: WorkerQueue, store: WebhookStore, redis_url: str
) -> None:
    aborted, born_aborted, late, failed = (
        hooked(),
        hooked(),
        hooked(command_for(queue_ms=1)),
        hooked(command_for(lane="rt")),
    )
    await fleet.submit(aborted)
    await fleet.abort(aborted.id, "cancelled")
    await fleet.abort(born_aborted.id, "cancelled")
    await fleet.submit(born_aborted)
    await fleet.submit(late)
    await asyncio.sleep(0.02)
    link = Link.open(redis_url)
    await sweep_lanes(link, MODEL, 1)
    await link.close()
    await fleet.submit(failed)
    (claim,) = await queue.take(1)
    await queue.finish(None, Failed(claim.id, 2, claim.epoch, "nan", "no number"))
    ends = {taken.id: decode_event(taken.end) for taken in await store.take(PART, 10, 60_000)}
    assert {command.id for command in (aborted, born_aborted, late, failed)} == ends.keys()
    for command in (aborted, born_aborted):
        end = ends[command.id]
        assert isinstance(end, Finished) and end.reason == "aborted"
    for command, code in ((late, "expired"), (failed, "nan")):
        end = ends[command.id]
        assert isinstance(end, Failed) and end.code == code


async def test_a_request_without_a_webhook_leaves_nothing(
    fleet: FleetClient, queue: WorkerQueue, store: WebhookStore, fleet_redis: Any
) -> None:
    await fleet.submit(command_for())
    (claim,) = await queue.take(1)
    await finish(queue, claim)
    assert await due(store) == 0 and not [key for key in fleet_redis.scan_iter() if b"hook" in key]


async def test_somebody_elses_key_costs_the_message_and_not_the_end(
    fleet: FleetClient, queue: WorkerQueue, fleet_redis: Any
) -> None:
    fleet_redis.set(PART.hooks(), "not ours", ex=60)
    command = hooked()
    await fleet.submit(command)
    (claim,) = await queue.take(1)
    await finish(queue, claim)
    assert (await fleet.result(command.id)).state == "done"


async def test_who_comes_late_cannot_say_what_became_of_anothers_try(
    fleet: FleetClient, queue: WorkerQueue, store: WebhookStore, fleet_redis: Any
) -> None:
    command = hooked()
    await fleet.submit(command)
    await finish(queue, (await queue.take(1))[0])
    (slow,) = await store.take(PART, 10, 60_000)
    fleet_redis.zadd(PART.hooks(), {command.id: 0})
    (fast,) = await store.take(PART, 10, 60_000)
    assert (slow.attempt, fast.attempt) == (1, 2)
    for outcome in ("told", "again", "later", "dead"):
        assert not await store.settle(slow, outcome)  # pyright: ignore[reportArgumentType]
    assert await due(store) == 1
    assert await store.settle(fast, "told") and await due(store) == 0


async def test_what_was_not_tried_does_not_count_as_a_try(
    fleet: FleetClient, queue: WorkerQueue, store: WebhookStore
) -> None:
    await fleet.submit(hooked())
    await finish(queue, (await queue.take(1))[0])
    for _ in range(3):
        (taken,) = await store.take(PART, 10, 60_000)
        assert taken.attempt == 1 and await store.settle(taken, "later")
    assert (await store.census([PART])).ends == {}


async def test_entries_that_nobody_of_ours_has_written_are_dropped_or_given_up(
    store: WebhookStore, fleet_redis: Any
) -> None:
    stray, broken = new_request_id(MODEL), new_request_id(MODEL)
    fleet_redis.zadd(PART.hooks(), {stray: 0, broken: 0})
    fleet_redis.expire(PART.hooks(), 60)
    fleet_redis.hset(PART.hook(broken), mapping={"to": "{}", "end": "{}", "t": 1, "n": 0})
    fleet_redis.expire(PART.hook(broken), 60)
    assert await store.take(PART, 10, 60_000) == []
    census = await store.census([PART])
    assert (census.due, census.dead) == (0, 1)


async def test_a_batch_is_told_of_once_however_often_it_is_put_down(store: WebhookStore) -> None:
    to = Recipient(url=HOOK.url, kind="batch", name="batch_1")
    for _ in range(3):
        await store.add("batch_1", to, b'{"status": "completed"}')
    (taken,) = await store.take(OTHER_HOOKS, 10, 60_000)
    assert taken == Taken("batch_1", to, b'{"status": "completed"}', taken.ended_ms, 1)
    assert hook_keys("batch_1") == OTHER_HOOKS and hook_keys(new_request_id(MODEL)) == PART


async def test_a_webhook_travels_with_its_command_and_an_old_worker_passes_over_it() -> None:
    payload, must = encode_command(hooked()), orjson.loads(encode_command(command_for()))["must"]
    assert decode_command(payload).webhook == HOOK and orjson.loads(payload)["must"] == must
    assert b"webhook" not in encode_command(command_for())


async def test_the_same_call_with_another_name_for_its_subject_is_the_same_call(
    fleet: FleetClient, queue: WorkerQueue
) -> None:
    first, second = hooked(), hooked()
    ids = [
        (
            await fleet.submit(
                one.model_copy(update={"webhook": HOOK.model_copy(update={"name": name})}), idempotency_key="k"
            )
        ).id
        for one, name in ((first, "resp_1"), (second, "resp_2"))
    ]
    assert ids == [first.id, first.id]


@pytest.fixture
def users(redis_url: str, fleet_redis: Any) -> Iterator[dict[str, str]]:
    """The chart's users, each with a password; yields the URL of each."""
    roles = ("api", "jobs", "worker")
    lines = (Path(__file__).parents[2] / "helm" / "diffleet" / "files" / "users.acl").read_text().splitlines()
    for line in lines:
        words = line.split()
        if words[:1] == ["user"] and words[1] in roles:
            fleet_redis.execute_command("ACL", "SETUSER", *words[1:], ">secret")
    yield {role: redis_url.replace("unix://", f"unix://{role}:secret@") for role in roles}
    fleet_redis.execute_command("ACL", "DELUSER", *roles)


async def test_the_charts_users_may_do_their_part(users: dict[str, str], fleet_redis: Any) -> None:
    worker = WorkerQueue.connect(users["worker"], MODEL, "w1", reap_every_ms=0)
    await worker.publish_card(card_of())
    async with FleetClient.connect(users["api"]) as fleet:
        first, second = hooked(), hooked()
        for command in (first, second):
            await fleet.submit(command)
        for claim in await worker.take(2):
            await finish(worker, claim)
    await worker.close()
    jobs, api = Link.open(users["jobs"]), Link.open(users["api"])
    store = WebhookStore(jobs)
    taken = {message.id: message for message in await store.take(PART, 10, 60_000)}
    assert await store.settle(taken[first.id], "again", 0, "http_500")
    (again,) = await store.take(PART, 10, 60_000)
    assert await store.settle(again, "dead", 0, "http_410")
    await store.close(again.to)
    assert await store.closed(again.to)
    assert await store.settle(taken[second.id], "told")
    await store.add("batch_1", Recipient(url=HOOK.url, kind="batch"), b"{}")
    operators = WebhookStore(api)
    assert [one.id for one in await operators.list_dead([PART], 5)] == [first.id]
    assert await operators.replay(first.id) and not await operators.closed(again.to)
    assert [one.id for one in await operators.list_due([PART, OTHER_HOOKS], 5)] != []
    assert (await operators.census([PART, OTHER_HOOKS])).due == 2
    assert not await operators.discard(first.id)
    for link in (jobs, api):
        await link.close()
