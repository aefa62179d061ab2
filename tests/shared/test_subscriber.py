"""Followers see every event once and in order, whatever happens to the subscription."""

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from redis import exceptions

from shared import subscriber as subscriber_module
from shared.client import Fleet, FleetClient, UnknownRequest
from shared.commands import Generate
from shared.connection import FleetUnavailable, Link, open_sync_client, translate
from shared.embedded import EmbeddedServer
from shared.events import Delta, Event, Failed, Finished, Queued, Snapshot, Started
from shared.keys import Keys, new_request_id
from shared.pubsub import Endpoint
from shared.queue import Claim, Outcome, WorkerQueue
from shared.subscriber import RING, Mailbox, Subscriber
from tests.shared.protocol_for_tests import MODEL, block_of, card_of, command_for, end_of, finish


@pytest.fixture
async def subscriber(redis_url: str, link: Link, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Subscriber]:
    # The audit would make good, seconds later, what the mechanism under test should have done: it runs when called.
    monkeypatch.setattr(subscriber_module, "AUDIT_S", 3600.0)
    async with Subscriber(redis_url, link) as subscriber:
        yield subscriber


@pytest.fixture
async def fleet(subscriber: Subscriber, link: Link) -> FleetClient:
    return FleetClient(link, subscriber)


async def _queue_at(url: str) -> AsyncGenerator[WorkerQueue]:
    queue = WorkerQueue.connect(url, MODEL, "w1", lease_ms=3_600_000)
    try:
        await queue.publish_card(card_of())
        yield queue
    finally:
        await queue.close()


@pytest.fixture
async def queue(redis_url: str) -> AsyncIterator[WorkerQueue]:
    async for queue in _queue_at(redis_url):
        yield queue


def expected(claim: Claim, blocks: int) -> list[Event]:
    return [Queued(claim.id), *[block_of(claim, number) for number in range(blocks)], end_of(claim, blocks)]


async def start(fleet: FleetClient, queue: WorkerQueue, command: Generate | None = None) -> Claim:
    await fleet.submit(command or command_for())
    [claim] = await queue.take(1)
    return claim


async def collect(fleet: FleetClient, request_id: str, after: int = 0, previews: bool = False) -> list[Event]:
    async with asyncio.timeout(30):
        return [event async for event in fleet.stream(request_id, after, previews)]


async def following(subscriber: Subscriber, replays: int) -> None:
    """Wait until followers have read the log so often: then they are live."""
    async with asyncio.timeout(30):
        while subscriber.replays < replays:
            await asyncio.sleep(0.002)


async def test_a_late_follower_sees_everything_from_the_first_event(fleet: FleetClient, queue: WorkerQueue) -> None:
    claim = await start(fleet, queue)
    await queue.emit([block_of(claim, number) for number in range(3)])
    follower = asyncio.create_task(collect(fleet, claim.id))
    await finish(queue, claim, 4)
    assert await follower == expected(claim, 4)
    assert await collect(fleet, claim.id) == expected(claim, 4)


async def test_a_follower_resumes_behind_any_event(fleet: FleetClient, queue: WorkerQueue) -> None:
    claim = await start(fleet, queue)
    await finish(queue, claim, 3)
    for after in range(6):
        assert await collect(fleet, claim.id, after) == expected(claim, 3)[after:]


async def test_a_log_longer_than_a_page_is_read_to_its_end(fleet: FleetClient, queue: WorkerQueue) -> None:
    blocks = 2 * RING + 3
    command = command_for()
    command = command.model_copy(update={"limits": command.limits.model_copy(update={"max_tokens": 2 * blocks})})
    claim = await start(fleet, queue, command)
    await finish(queue, claim, blocks)
    assert await collect(fleet, claim.id) == expected(claim, blocks)


async def test_live_events_come_without_reading_the_log_again(
    fleet: FleetClient, queue: WorkerQueue, subscriber: Subscriber
) -> None:
    claim = await start(fleet, queue)
    follower = asyncio.create_task(collect(fleet, claim.id, previews=True))
    await following(subscriber, 1)
    snapshot = Snapshot(claim.id, 2, 1, 1, 2, 0, 1, [None, 5])
    await queue.preview([Started(claim.id, 1, "w1")])
    await asyncio.sleep(0.05)
    await queue.emit([block_of(claim, 0)])
    await queue.preview([snapshot])
    await asyncio.sleep(0.05)
    await finish(queue, claim, 2)
    first, *rest = expected(claim, 2)
    assert await follower == [first, Started(claim.id, 1, "w1"), rest[0], snapshot, *rest[1:]]
    assert subscriber.replays == 1


async def test_a_stale_preview_is_dropped(fleet: FleetClient, queue: WorkerQueue, subscriber: Subscriber) -> None:
    claim = await start(fleet, queue)
    await queue.emit([block_of(claim, 0)])
    follower = asyncio.create_task(collect(fleet, claim.id, previews=True))
    await following(subscriber, 1)
    await queue.preview([Snapshot(claim.id, 1, 1, 0, 0, 3, 1, [None])])
    await finish(queue, claim, 2)
    assert await follower == expected(claim, 2)


async def test_run_delivers_from_the_first_event_and_ends(fleet: FleetClient, queue: WorkerQueue) -> None:
    command = command_for()

    async def serve() -> Claim:
        claims: list[Claim] = []
        while not claims:
            claims = await queue.take(1) or await queue.wait(100)
        await finish(queue, claims[0], 2)
        return claims[0]

    serving = asyncio.create_task(serve())
    async with asyncio.timeout(30):
        events = [event async for event in fleet.run(command)]
    assert events == expected(await serving, 2)
    async with asyncio.timeout(30):
        again = [event async for event in fleet.run(command, previews=False)]
    assert again == events


async def test_a_second_submit_under_one_idempotency_key_follows_the_first(
    fleet: FleetClient, queue: WorkerQueue
) -> None:
    command = command_for()
    await fleet.submit(command, idempotency_key="k")
    [claim] = await queue.take(1)
    await finish(queue, claim, 1)
    async with asyncio.timeout(30):
        events = [event async for event in fleet.run(command_for(), idempotency_key="k")]
    assert events == expected(claim, 1)


async def test_killed_subscriptions_cost_no_event(
    fleet: FleetClient, queue: WorkerQueue, subscriber: Subscriber, fleet_redis: Any
) -> None:
    claim = await start(fleet, queue)
    followers = [asyncio.create_task(collect(fleet, claim.id)) for _ in range(3)]
    await following(subscriber, 3)
    for number in range(10):
        if number % 3 == 1:
            assert fleet_redis.client_kill_filter(_type="pubsub") >= 0
        await queue.emit([block_of(claim, number)])
        await asyncio.sleep(0.01)
    await finish(queue, claim, 10)
    for follower in followers:
        assert await follower == expected(claim, 10)
    assert subscriber.reconnects > 0


async def test_a_server_that_dies_and_comes_back_costs_a_stream_nothing() -> None:
    folder = Path(tempfile.mkdtemp(prefix="df-"))
    server = EmbeddedServer(folder)
    server.start()
    with open_sync_client(server.url) as redis:
        redis.config_set("appendfsync", "always")
    try:
        async with FleetClient.connect(server.url) as fleet, aclosing(_queue_at(server.url)) as queues:
            queue = await anext(queues)
            claim = await start(fleet, queue)
            follower = asyncio.create_task(collect(fleet, claim.id))
            await queue.emit([block_of(claim, 0)])
            assert server.pid is not None
            os.kill(server.pid, signal.SIGKILL)
            writing = asyncio.create_task(queue.emit([block_of(claim, 1)]))
            await asyncio.to_thread(server.start)
            assert await writing == [Outcome.OK]
            await queue.finish(block_of(claim, 2), end_of(claim, 3))
            assert await follower == expected(claim, 3)
    finally:
        server.stop()
        shutil.rmtree(folder)


async def test_a_silent_subscription_is_replaced(
    monkeypatch: pytest.MonkeyPatch, redis_url: str, link: Link, queue: WorkerQueue
) -> None:
    """A connection whose other end has gone away hears nothing, and no error either."""
    monkeypatch.setattr(subscriber_module, "WATCH_S", 0.02)
    async with Subscriber(redis_url, link) as subscriber:
        fleet = FleetClient(link, subscriber)
        claim = await start(fleet, queue)
        follower = asyncio.create_task(collect(fleet, claim.id))
        await following(subscriber, 1)
        connection = subscriber._connection  # pyright: ignore[reportPrivateUsage]
        assert connection is not None
        monkeypatch.setattr(connection, "data_received", lambda data: None)  # the network swallows everything
        connection._transport.pause_reading()  # type: ignore[union-attr]  # pyright: ignore
        await finish(queue, claim, 2)
        assert await follower == expected(claim, 2)
        assert subscriber.reconnects == 1


async def test_a_gap_in_the_live_events_is_filled_from_the_log(
    fleet: FleetClient, queue: WorkerQueue, subscriber: Subscriber
) -> None:
    claim = await start(fleet, queue)
    follower = asyncio.create_task(collect(fleet, claim.id))
    await following(subscriber, 1)
    connection = subscriber._connection  # pyright: ignore[reportPrivateUsage]
    assert connection is not None
    hear = connection._on_message  # pyright: ignore[reportPrivateUsage]

    def lose_the_second_block(channel: bytes, payload: bytes) -> None:
        if b'"seq":3,' not in payload:
            hear(channel, payload)

    connection._on_message = lose_the_second_block  # pyright: ignore[reportPrivateUsage]
    await finish(queue, claim, 4)
    assert await follower == expected(claim, 4)
    assert subscriber.replays == 2


async def test_a_message_that_got_lost_is_found_by_the_audit(
    fleet: FleetClient, queue: WorkerQueue, subscriber: Subscriber
) -> None:
    claim = await start(fleet, queue)
    follower = asyncio.create_task(collect(fleet, claim.id))
    await following(subscriber, 1)
    connection = subscriber._connection  # pyright: ignore[reportPrivateUsage]
    assert connection is not None
    connection._on_message = lambda channel, payload: None  # pyright: ignore[reportPrivateUsage]
    await finish(queue, claim, 2)
    await asyncio.sleep(0.05)
    assert not follower.done()
    await subscriber.audit()
    assert await follower == expected(claim, 2)


async def test_a_slow_follower_costs_bounded_memory_and_still_sees_everything(
    fleet: FleetClient, queue: WorkerQueue
) -> None:
    blocks = 3 * RING
    command = command_for()
    command = command.model_copy(update={"limits": command.limits.model_copy(update={"max_tokens": 2 * blocks})})
    claim = await start(fleet, queue, command)
    seen: list[Event] = []
    async with aclosing(fleet.stream(claim.id, previews=False)) as events:
        seen.append(await anext(events))
        await finish(queue, claim, blocks)
        await asyncio.sleep(0.05)  # the reader hears all of it, nobody takes it
        seen += [event async for event in events]
    assert seen == expected(claim, blocks)


def test_a_mailbox_holds_a_ring_of_events_and_one_preview() -> None:
    mailbox = Mailbox("r", 0, previews=True, behind=False)
    for number in range(3):
        mailbox.put(b'{"t":"snapshot","n":%d}' % number)
    for number in range(RING):
        mailbox.put(b'{"t":"delta","n":%d}' % number)
    assert not mailbox.behind
    mailbox.put(b'{"t":"delta"}')
    assert mailbox.behind and mailbox.empty
    mailbox.put(b'{"t":"delta"}')
    assert mailbox.empty
    assert mailbox.pop() == b'{"t":"snapshot","n":2}' and mailbox.pop() is None


async def test_an_unknown_request_is_said_to_be_unknown(fleet: FleetClient, queue: WorkerQueue) -> None:
    for request_id in (new_request_id(MODEL), "nonsense", ""):
        with pytest.raises(UnknownRequest):
            await collect(fleet, request_id)
        with pytest.raises(UnknownRequest):
            await fleet.result(request_id)
    with pytest.raises(UnknownRequest):
        await fleet.abort("nonsense")


async def test_a_request_that_the_server_lost_ends_as_lost(
    fleet: FleetClient, queue: WorkerQueue, subscriber: Subscriber, fleet_redis: Any
) -> None:
    claim = await start(fleet, queue)
    follower = asyncio.create_task(collect(fleet, claim.id))
    await following(subscriber, 1)
    fleet_redis.flushall()
    await subscriber.audit()
    assert [type(event) for event in await follower] == [Queued, Failed]
    assert follower.result()[-1] == Failed(claim.id, 2, 0, "lost", "the queue has lost this request")


async def test_a_request_expires_for_its_followers_although_no_worker_is_there(
    fleet: FleetClient, queue: WorkerQueue, subscriber: Subscriber
) -> None:
    command = command_for(queue_ms=30)
    await fleet.submit(command)
    follower = asyncio.create_task(collect(fleet, command.id))
    while not follower.done():
        await subscriber.audit()
        await asyncio.sleep(0.01)
    assert isinstance(follower.result()[-1], Failed) and follower.result()[-1].code == "expired"  # type: ignore[union-attr]


async def test_a_running_request_whose_fleet_has_gone_expires_after_a_grace(
    fleet: FleetClient, queue: WorkerQueue, subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriber_module, "EXPIRY_GRACE_MS", 1)
    claim = await start(fleet, queue, command_for(total_ms=100))
    await queue.emit([block_of(claim, 0)])
    follower = asyncio.create_task(collect(fleet, claim.id))
    while not follower.done():
        await subscriber.audit()
        await asyncio.sleep(0.01)
    end = follower.result()[-1]
    assert isinstance(end, Failed) and (end.code, end.seq, end.epoch) == ("expired", 3, 2)
    assert (await queue.emit([block_of(claim, 1)]))[0].name == "FENCED"


async def test_an_event_of_a_newer_worker_is_passed_over(
    fleet: FleetClient, queue: WorkerQueue, link: Link, fleet_redis: Any
) -> None:
    claim = await start(fleet, queue)
    keys = Keys.of(claim.id)
    fleet_redis.xadd(keys.log(claim.id), {"t": "later", "d": b'{"t":"later","seq":2}', "ep": 1}, id="2-0")
    fleet_redis.hset(keys.request(claim.id), "seq", 2)
    end = end_of(claim, 1)
    await queue.finish(None, end)
    assert await collect(fleet, claim.id) == [Queued(claim.id), end]


async def test_a_subscription_that_is_not_confirmed_is_an_error_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriber_module, "SUBSCRIBE_TIMEOUT_S", 0.05)
    async with FleetClient.connect("redis://127.0.0.1:1/0") as fleet:
        with pytest.raises(FleetUnavailable):
            await collect(fleet, new_request_id(MODEL))


async def test_a_cancellation_that_is_swallowed_does_not_keep_it_from_closing(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.subscriber.AUDIT_S", 0.0)
    swallowed = asyncio.Event()
    auditing = asyncio.Event()

    async def audit(self: object) -> None:
        auditing.set()
        try:
            await asyncio.sleep(3600 if not swallowed.is_set() else 0.01)
        except asyncio.CancelledError:
            if swallowed.is_set():
                raise
            swallowed.set()

    monkeypatch.setattr("shared.subscriber.Subscriber.audit", audit)
    async with asyncio.timeout(30):
        async with FleetClient.connect(redis_url):
            await auditing.wait()
    assert swallowed.is_set()


async def test_many_open_streams_share_one_connection(
    fleet: FleetClient, queue: WorkerQueue, subscriber: Subscriber, fleet_redis: Any
) -> None:
    commands = [command_for() for _ in range(200)]
    for command in commands:
        await fleet.submit(command)
    claims = {claim.id: claim for claim in await queue.take(200)}
    followers = {request_id: asyncio.create_task(collect(fleet, request_id)) for request_id in claims}
    await following(subscriber, 200)
    assert len([client for client in fleet_redis.client_list() if int(client["sub"])]) == 1
    await queue.emit([block_of(claim, number) for number in range(3) for claim in claims.values()])
    await asyncio.gather(*[queue.finish(None, end_of(claim, 3)) for claim in claims.values()])
    for request_id, follower in followers.items():
        assert await follower == expected(claims[request_id], 3)
    assert subscriber.replays == 200
    assert fleet_redis.pubsub_channels("df:{*") == []


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("redis://h:7/1", Endpoint("h", 7, None, None, ())),
        ("redis://user:p%40ss@h", Endpoint("h", 6379, None, None, ("user", "p@ss"))),
        ("redis://:secret@h", Endpoint("h", 6379, None, None, ("secret",))),
        ("unix:///run/valkey.sock?db=2", Endpoint("localhost", 6379, "/run/valkey.sock", None, ())),
    ],
)
def test_a_url_says_where_to_subscribe(url: str, endpoint: Endpoint) -> None:
    assert Endpoint.from_url(url) == endpoint


def test_a_url_with_tls_checks_certificates_unless_told_not_to() -> None:
    strict, lax = Endpoint.from_url("rediss://h").tls, Endpoint.from_url("rediss://h?ssl_cert_reqs=none").tls
    assert strict is not None and strict.check_hostname
    assert lax is not None and not lax.check_hostname
    with pytest.raises(ValueError, match="schemes"):
        Endpoint.from_url("http://h")


async def test_the_subscription_authenticates(redis_url: str, fleet_redis: Any, queue: WorkerQueue) -> None:
    fleet_redis.acl_setuser(
        "reader", enabled=True, passwords=["+secret"], commands=["+@all"], keys=["*"], channels=["*"]
    )
    claim_url = redis_url.replace("unix://", "unix://reader:secret@")
    async with FleetClient.connect(claim_url) as fleet:
        claim = await start(fleet, queue)
        await finish(queue, claim, 1)
        assert await collect(fleet, claim.id) == expected(claim, 1)
        assert {client["user"] for client in fleet_redis.client_list() if int(client["sub"])} == {"reader"}
    fleet_redis.acl_deluser("reader")


@pytest.mark.parametrize(
    "error", [exceptions.AuthenticationError("WRONGPASS"), exceptions.ResponseError("DB index is out of range")]
)
async def test_a_front_that_is_turned_away_for_a_while_watches_its_connection_afterwards(
    redis_url: str, link: Link, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Redis may come back before its users do."""

    published = asyncio.Event()

    async def refuse(*_: object) -> None:
        raise translate(error)

    async def publish(*_: object) -> None:
        published.set()

    monkeypatch.setattr(subscriber_module, "WATCH_S", 0.01)
    async with Subscriber(redis_url, link):
        monkeypatch.setattr(link, "command", refuse)
        await asyncio.sleep(0.3)
        assert sum("turned away" in record.message for record in caplog.records) == 1
        monkeypatch.setattr(link, "command", publish)
        async with asyncio.timeout(10):
            await published.wait()


async def test_a_program_without_asyncio_submits_follows_and_reads(redis_url: str, queue: WorkerQueue) -> None:
    def program() -> tuple[list[Event], str, str]:
        with Fleet(redis_url) as fleet:
            events = list(fleet.generate(MODEL, [1, 2, 3], seed=7))
            return events, fleet.result(events[0].id).text, fleet.abort(events[0].id)

    running = asyncio.create_task(asyncio.to_thread(program))
    claims: list[Claim] = []
    while not claims:
        claims = await queue.take(1) or await queue.wait(100)
    await finish(queue, claims[0], 2)
    events, text, state = await running
    assert events == expected(claims[0], 2)
    assert (text, state) == ("<0><1>", "done")
    assert [event.text for event in events if isinstance(event, Delta)] == ["<0>", "<1>"]
    assert isinstance(events[-1], Finished)
