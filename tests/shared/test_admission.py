"""What is let in, what is refused, and in which order the lanes are served."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from shared.admission import Admission
from shared.client import FleetClient, QueueFull, TenantFull, UnknownRequest
from shared.commands import LANES, Lane
from shared.connection import NotReplicated
from shared.events import Failed, Started
from shared.keys import Keys
from shared.memory import NO_BULK, NO_WORK
from shared.queue import WorkerQueue
from tests.shared.protocol_for_tests import MODEL, card_of, command_for, finish, lengths_of

HOUR_MS = 3_600_000


@pytest.fixture
async def queue(redis_url: str) -> AsyncIterator[WorkerQueue]:
    queue = WorkerQueue.connect(redis_url, MODEL, "w1", HOUR_MS, reap_every_ms=0)
    await queue.publish_card(card_of())
    yield queue
    await queue.close()


@pytest.fixture
async def fleet(redis_url: str, queue: WorkerQueue) -> AsyncIterator[FleetClient]:
    async with FleetClient.connect(redis_url, admission=Admission(tenant_limit=2)) as fleet:
        yield fleet


# --- tenants


async def test_a_tenant_has_only_so_many_requests_at_a_time(fleet: FleetClient, queue: WorkerQueue) -> None:
    for _ in range(2):
        await fleet.submit(command_for(), tenant="t")
    with pytest.raises(TenantFull) as refused:
        await fleet.submit(command_for(lane="rt"), tenant="t")
    assert 1 <= refused.value.retry_after_s <= 120
    await fleet.submit(command_for(), tenant="u")
    for _ in range(3):
        await fleet.submit(command_for())


@pytest.mark.parametrize("end", ["finished", "aborted", "failed", "expired"])
async def test_however_a_request_ends_its_tenant_may_send_another(
    fleet: FleetClient, queue: WorkerQueue, fleet_redis: Any, end: str
) -> None:
    first = command_for()
    await fleet.submit(first, tenant="t")
    await fleet.submit(command_for(), tenant="t")
    if end == "aborted":
        await fleet.abort(first.id)
    else:
        [claim] = await queue.take(1)
        match end:
            case "finished":
                await finish(queue, claim)
            case "failed":
                await queue.finish(None, Failed(claim.id, 2, 1, "nan", "bad"))
            case _:
                await queue.finish(None, Failed(claim.id, 2, 1, "expired", "late"))
    await fleet.submit(command_for(), tenant="t")
    with pytest.raises(TenantFull):
        await fleet.submit(command_for(), tenant="t")
    assert fleet_redis.zcard(Keys.of(first.id).tenant("t")) == 2


async def test_a_request_past_its_deadline_no_longer_counts(
    fleet: FleetClient, queue: WorkerQueue, fleet_redis: Any
) -> None:
    for _ in range(2):
        await fleet.submit(command_for(), tenant="t")
    key = Keys(f"{MODEL}.0").tenant("t")
    for member in fleet_redis.zrange(key, 0, -1):
        fleet_redis.zadd(key, {member: 1})
    await fleet.submit(command_for(), tenant="t")


# --- idempotency


async def test_an_idempotency_key_whose_request_is_forgotten_runs_anew(
    fleet: FleetClient, queue: WorkerQueue, fleet_redis: Any
) -> None:
    first, second = command_for(), command_for()
    await fleet.submit(first, idempotency_key="k")
    fleet_redis.delete(Keys.of(first.id).request(first.id), Keys.of(first.id).log(first.id))
    assert (await fleet.submit(second, idempotency_key="k")).id == second.id
    assert (await fleet.submit(command_for(), idempotency_key="k")).id == second.id
    with pytest.raises(UnknownRequest):
        await fleet.result(first.id)


# --- memory


async def fill(redis: Any, share: float) -> None:
    """Let `share` of the memory be used."""
    redis.config_set("maxmemory", int(redis.info("memory")["used_memory"] / share))


@pytest.fixture
def roomy(fleet_redis: Any) -> Any:
    yield
    fleet_redis.config_set("maxmemory", "1gb")


@pytest.mark.parametrize(("share", "taken"), [(0.5, {"rt", "std", "bulk"}), (0.85, {"rt", "std"}), (0.95, set())])
async def test_as_memory_fills_bulk_work_is_refused_first_and_then_all(
    redis_url: str, queue: WorkerQueue, fleet_redis: Any, roomy: None, share: float, taken: set[str]
) -> None:
    assert share < NO_BULK or NO_BULK < share < NO_WORK or NO_WORK < share
    await fill(fleet_redis, share)
    accepted: set[str] = set()
    async with FleetClient.connect(redis_url) as fleet:
        for lane in LANES:
            try:
                await fleet.submit(command_for(lane=lane))
                accepted.add(lane)
            except QueueFull as refused:
                assert refused.retry_after_s == 10 and "memory" in str(refused)
    assert accepted == taken


async def test_previews_stop_where_memory_is_short(
    queue: WorkerQueue, redis_url: str, fleet_redis: Any, roomy: None
) -> None:
    command = command_for()
    await fill(fleet_redis, 0.95)
    with fleet_redis.pubsub() as pubsub:
        pubsub.subscribe(Keys.of(command.id).channel(command.id))
        assert pubsub.get_message(timeout=5)["type"] == "subscribe"
        await queue.preview([Started(command.id, 1, "w1")])
        fleet_redis.config_set("maxmemory", "1gb")
        later = WorkerQueue.connect(redis_url, MODEL, "w2", HOUR_MS)
        await later.preview([Started(command.id, 2, "w2")])
        assert b'"epoch":2' in pubsub.get_message(timeout=5)["data"]
        await later.close()


# --- replicas


async def test_without_the_replicas_asked_for_a_submit_is_unavailable_and_safe_to_send_again(
    redis_url: str, queue: WorkerQueue, fleet_redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.connection.RETRY_S", 0.1)
    command = command_for()
    async with FleetClient.connect(redis_url, admission=Admission(replicas=1, replica_wait_ms=10)) as careful:
        with pytest.raises(NotReplicated):
            await careful.submit(command)
    async with FleetClient.connect(redis_url) as fleet:
        assert (await fleet.submit(command)).duplicate
    assert lengths_of(fleet_redis) == 1


# --- lanes


@pytest.mark.parametrize("limit", [1, 3])
async def test_no_lane_starves_however_full_the_others_are(fleet: FleetClient, queue: WorkerQueue, limit: int) -> None:
    lanes: dict[str, Lane] = {}
    for _ in range(24 * limit):
        for lane in LANES:
            command = command_for(lane=lane)
            lanes[(await fleet.submit(command)).id] = lane
    for _ in range(3):
        # Any eight claims in a row serve every lane, and rt most.
        served = [lanes[claim.id] for _ in range(8) for claim in await queue.take(limit)]
        assert {lane: served.count(lane) for lane in LANES} == {"rt": 6 * limit, "std": limit, "bulk": limit}
