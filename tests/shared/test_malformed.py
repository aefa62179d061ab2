"""What no submit has written must not stop a worker: entries of a lane and request hashes, malformed in every way."""

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from shared.client import FleetClient
from shared.commands import InvalidCommand, UnsupportedCommand, decode_command
from shared.events import Failed
from shared.heart import Heart
from shared.keys import Keys, new_request_id
from shared.queue import WorkerQueue
from shared.roster import WorkerInfo
from tests.shared.protocol_for_tests import (
    MODEL,
    block_of,
    card_of,
    command_for,
    end_of,
    finish,
    lengths_of,
    pending_of,
    run_out_of_lease,
    state_of,
)

KEYS = Keys(f"{MODEL}.0")
INFO = WorkerInfo("w0", MODEL, "ready")
LANE = KEYS.lane("std")
COUNTS = ("ep", "att", "seq", "nb", "nt", "nfe", "pt", "dl", "qd", "t0", "cap", "ret")
FIELDS = (*COUNTS, "st", "eid", "in", "own", "lane", "alone", "lost", "sus", "ten")
JUNK = st.one_of(
    st.sampled_from([b"", b"0", b"-1", b"1.5", b"nan", b"inf", b"0x10", b"1e3", b" 1", b"9" * 15, b"9" * 40, b"abc"]),
    st.sampled_from([b"queued", b"running", b"done", b"std", b"rt", b"\xff\xfe", b"[]", b'{"v":1}']),
    st.binary(max_size=24),
)
ON_A_SERVER = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


async def drain(redis: Any, redis_url: str) -> list[str]:
    """Let one worker take and end whatever is there, twice, the second time with every lease over; return the ids."""
    queue = WorkerQueue.connect(redis_url, MODEL, "w1", lease_ms=3_600_000, reap_every_ms=0)
    served: list[str] = []
    try:
        await queue.publish_card(card_of())
        for _ in range(2):
            while claims := await queue.take(8):
                for claim in claims:
                    await finish(queue, claim)
                    served.append(claim.id)
            while claims := await queue.wait(1):
                for claim in claims:
                    await finish(queue, claim)
                    served.append(claim.id)
            for entry in redis.xpending_range(LANE, "g", "-", "+", 100):
                redis.xclaim(LANE, "g", "lost", 0, [entry["message_id"]], idle=86_400_000, justid=True)
    finally:
        await queue.close()
    return served


def runs(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


@pytest.mark.parametrize("waiting", [False, True])
@pytest.mark.parametrize(
    "entry",
    [
        {"foo": "bar"},
        {"id": "nobody", "v": "1"},
        {"id": b"\xff\xfe", "v": "1"},
        {"id": new_request_id(MODEL), "v": "abc"},
        {"id": new_request_id(MODEL), "v": "1" * 30},
        {"id": new_request_id("other"), "v": "1"},
        {"id": f"r_{MODEL}.0_" + "I" * 26},
    ],
)
async def test_a_malformed_entry_is_removed_and_the_next_one_served(
    fleet_redis: Any, redis_url: str, entry: dict[Any, Any], waiting: bool, caplog: pytest.LogCaptureFixture
) -> None:
    queue = WorkerQueue.connect(redis_url, MODEL, "w1", reap_every_ms=0)
    async with FleetClient.connect(redis_url) as fleet:
        await queue.publish_card(card_of())
        fleet_redis.xgroup_create(LANE, "g", "0", mkstream=True)
        fleet_redis.xadd(LANE, entry)
        if waiting:
            assert await queue.wait(1) == []
        submitted = await fleet.submit(command_for())
        claims = await queue.take(4)
        assert [claim.id for claim in claims] == [submitted.id]
        await finish(queue, claims[0])
    assert (lengths_of(fleet_redis), pending_of(fleet_redis)) == (0, 0)
    assert queue.dropped == 1
    assert [record.getMessage() for record in caplog.records if record.name == "shared.queue"] == [
        "entries dropped that no submit has written: 1"
    ]
    await queue.close()


@ON_A_SERVER
@given(
    entries=st.lists(st.dictionaries(st.sampled_from([b"id", b"v", b"x"]), JUNK, min_size=1), min_size=1, max_size=6)
)
def test_no_entry_of_a_lane_stops_a_worker(fleet_redis: Any, redis_url: str, entries: list[dict[bytes, bytes]]) -> None:
    fleet_redis.flushall()
    for entry in entries:
        fleet_redis.xadd(LANE, entry)
    assert runs(drain(fleet_redis, redis_url)) == []
    # What claims to be of a newer version is left for a newer worker.
    newer = sum(entry.get(b"v", b"").isdigit() and 1 < int(entry[b"v"]) < 10**9 for entry in entries)
    assert lengths_of(fleet_redis) <= newer


@ON_A_SERVER
@given(
    values=st.dictionaries(st.sampled_from(FIELDS), JUNK, max_size=4),
    missing=st.sets(st.sampled_from(FIELDS), max_size=3),
    begun=st.booleans(),
)
@example(values={"ep": b"0", "seq": b"999999999999999"}, missing=set(), begun=False)
@example(values={"ep": b"99999999999999", "seq": b"99999999999999"}, missing=set(), begun=True)
@example(values={"ep": b"9999999999999", "seq": b"9999999999999"}, missing=set(), begun=True)
def test_no_request_hash_stops_a_worker_or_a_follower(
    fleet_redis: Any, redis_url: str, values: dict[str, bytes], missing: set[str], begun: bool
) -> None:
    fleet_redis.flushall()

    async def scenario() -> None:
        queue = WorkerQueue.connect(redis_url, MODEL, "w0", lease_ms=3_600_000)
        async with FleetClient.connect(redis_url) as fleet:
            await queue.publish_card(card_of())
            broken, healthy = command_for(), command_for()
            await fleet.submit(broken)
            if begun:
                (claim,) = await queue.take(1)
                await queue.emit([block_of(claim, 0)])
                run_out_of_lease(fleet_redis, broken.id)
            key = KEYS.request(broken.id)
            if missing:
                fleet_redis.hdel(key, *missing)
            if values:
                fleet_redis.hset(key, mapping=values)
                fleet_redis.pexpire(key, 60_000)
            await fleet.submit(healthy)
            if begun:
                heart = Heart.connect(redis_url, "w0", MODEL)
                await asyncio.to_thread(heart.beat, {claim.id: claim.epoch}, INFO)
                heart.close()
                await queue.emit([block_of(claim, 1)])
                await queue.hand_back(claim.id, claim.epoch)
                await queue.finish(None, end_of(claim, 2))
            assert healthy.id in await drain(fleet_redis, redis_url)
            await fleet.abort(broken.id)
            await queue.close()

    runs(scenario())


async def test_the_follower_of_a_request_with_a_damaged_hash_is_told_that_it_is_lost(
    fleet_redis: Any, redis_url: str
) -> None:
    queue = WorkerQueue.connect(redis_url, MODEL, "w1", reap_every_ms=0)
    async with FleetClient.connect(redis_url) as fleet:
        await queue.publish_card(card_of())
        command = command_for()
        events = fleet.run(command)
        await anext(events)
        fleet_redis.hdel(KEYS.request(command.id), "dl", "in")
        assert await queue.take(4) == []
        last = [event async for event in events][-1]
    await queue.close()
    assert isinstance(last, Failed) and last.code == "lost"
    assert state_of(fleet_redis, command.id) == {}


@given(
    payload=st.one_of(
        JUNK,
        st.sampled_from(
            [
                b'{"v":1,"kind":"generate","must":[[]],"body":{}}',
                b'{"v":1,"kind":"generate","must":3,"body":{}}',
                b'{"v":1,"kind":[],"must":[],"body":[]}',
            ]
        ),
    )
)
def test_a_payload_is_a_command_or_an_error_with_a_name(payload: bytes) -> None:
    with pytest.raises((InvalidCommand, UnsupportedCommand)):
        decode_command(payload)


@pytest.mark.parametrize("lane", ["std", "bulk"])
async def test_a_key_that_has_a_lanes_name_but_is_none_stops_neither_worker_nor_other_lanes(
    redis_url: str, fleet_redis: Any, lane: str
) -> None:
    queue = WorkerQueue.connect(redis_url, MODEL, "w1", lease_ms=3_600_000, reap_every_ms=0)
    heart = Heart.connect(redis_url, "w1", MODEL)
    await queue.publish_card(card_of())
    try:
        async with FleetClient.connect(redis_url) as fleet:
            held, other = command_for(lane=lane), command_for(lane="rt")  # type: ignore[arg-type]
            await fleet.submit(held)
            [claim] = await queue.take(1)
            key = KEYS.lane(lane)  # type: ignore[arg-type]
            fleet_redis.delete(key)
            fleet_redis.set(key, "not a stream", ex=600)
            assert await queue.wait(1) == []
            await fleet.submit(other)
            [second] = await queue.take(2)
            assert second.id == other.id
            heart.beat({claim.id: claim.epoch, second.id: second.epoch}, INFO)
            for ended in (claim, second):
                await finish(queue, ended)
                assert (await fleet.result(ended.id)).state == "done"
    finally:
        fleet_redis.delete(KEYS.lane(lane))  # type: ignore[arg-type]
        heart.close()
        await queue.close()
