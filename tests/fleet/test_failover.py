"""Two workers on the same lanes: kill one, freeze one, drain one; the client's stream must not show it."""

import signal
from collections.abc import Callable

import pytest
from redis import Redis

from shared.client import FleetClient
from shared.commands import Generate
from shared.events import Delta, Event, Started
from shared.keys import Keys
from tests.fleet.conftest import SpawnWorker
from tests.fleet.processes import WorkerProcess, until
from tests.fleet.requests_for_tests import assert_whole, collect, sequential, text_of, tokens_of
from worker.exits import ExitCode

NAME = "pair"
LENGTH = 500
"""Tokens, one a step: seconds of decoding, so that whatever happens to a worker happens in mid-stream."""
SEED = 11


class Pair:
    """Two live workers; whoever is gone is replaced before the next test."""

    def __init__(self, spawn: SpawnWorker, name: str = NAME, *flags: str) -> None:
        self._spawn = spawn
        self._name = name
        self._flags = flags
        self._workers: list[WorkerProcess] = []
        self._calm: list[Event] = []

    def complete(self) -> "Pair":
        self._workers = [worker for worker in self._workers if worker.alive and worker.ready]
        fresh = [self._spawn(self._name, "--drain-s", "0", *self._flags) for _ in range(2 - len(self._workers))]
        self._workers += [worker.wait_ready() for worker in fresh]
        return self

    def owner(self, worker_id: str) -> WorkerProcess:
        return next(worker for worker in self._workers if worker.id == worker_id)

    def other(self, owner: WorkerProcess) -> WorkerProcess:
        return next(worker for worker in self._workers if worker is not owner)

    async def undisturbed(self, fleet: FleetClient) -> list[Event]:
        """Return the events of the same request under another id, in peace."""
        if not self._calm:
            self._calm = await collect(fleet.run(sequential(self._name, LENGTH, seed=SEED)))
            assert_whole(self._calm)
            assert len(owners(self._calm)) == 1
        return self._calm


@pytest.fixture(scope="module")
def module_pair(spawn_worker: SpawnWorker) -> Pair:
    return Pair(spawn_worker)


@pytest.fixture
def pair(module_pair: Pair) -> Pair:
    return module_pair.complete()


async def disturbed(
    fleet: FleetClient, pair: Pair, request: Generate, disturb: Callable[[WorkerProcess], None], after: int = 20
) -> tuple[WorkerProcess, list[Event]]:
    """Follow a request, and do something to its worker once `after` blocks have come."""
    events: list[Event] = []
    victim: WorkerProcess | None = None
    async for event in fleet.run(request):
        events.append(event)
        if isinstance(event, Delta) and event.block == after:
            started = next(event for event in events if isinstance(event, Started))
            victim = pair.owner(started.worker)
            disturb(victim)
    assert victim is not None
    return victim, events


def assert_same(events: list[Event], calm: list[Event]) -> None:
    assert_whole(events)
    assert text_of(events) == text_of(calm)
    assert tokens_of(events) == tokens_of(calm)


def owners(events: list[Event]) -> list[str]:
    return list(dict.fromkeys(event.worker for event in events if isinstance(event, Started)))


def epochs(events: list[Event]) -> list[int]:
    return [event.epoch for event in events if isinstance(event, Delta)]


async def test_a_worker_killed_in_mid_stream_leaves_no_gap_no_repeat_and_no_other_text(
    pair: Pair, fleet: FleetClient
) -> None:
    request = sequential(NAME, LENGTH, seed=SEED)
    victim, events = await disturbed(fleet, pair, request, lambda worker: worker.send(signal.SIGKILL))

    assert victim.wait_exit() == -signal.SIGKILL
    assert len(owners(events)) == 2
    assert set(epochs(events)) == {1, 2} and epochs(events) == sorted(epochs(events))
    assert_same(events, await pair.undisturbed(fleet))


async def test_a_frozen_worker_that_wakes_up_is_refused_and_goes_on_with_new_work(
    pair: Pair, fleet: FleetClient, redis_client: Redis
) -> None:
    request = sequential(NAME, LENGTH, seed=SEED)
    fenced = 0.0

    def freeze(worker: WorkerProcess) -> None:
        nonlocal fenced
        fenced = worker.metrics()["diffleet_fenced_total"]
        worker.send(signal.SIGSTOP)

    zombie, events = await disturbed(fleet, pair, request, freeze)
    log = redis_client.xrange(Keys.of(request.id).log(request.id))
    zombie.send(signal.SIGCONT)

    until(lambda: zombie.metrics()["diffleet_fenced_total"] == fenced + 1, "the zombie meets the fence")
    until(lambda: zombie.metrics()["diffleet_rows_running"] == 0, "the zombie drops the request")
    assert redis_client.xrange(Keys.of(request.id).log(request.id)) == log
    assert zombie.metrics()["diffleet_kv_pages_free"] == zombie.metrics()["diffleet_kv_pages"]
    assert_same(events, await pair.undisturbed(fleet))
    pair.other(zombie).send(signal.SIGTERM)
    assert pair.other(zombie).wait_exit() == ExitCode.CLEAN
    assert_whole(await collect(fleet.run(sequential(NAME, 8))))


async def test_a_drained_worker_hands_back_and_the_next_owner_goes_on(
    pair: Pair, fleet: FleetClient, redis_client: Redis
) -> None:
    request = sequential(NAME, LENGTH, seed=SEED)
    victim, events = await disturbed(fleet, pair, request, lambda worker: worker.send(signal.SIGTERM))

    assert victim.wait_exit() == ExitCode.CLEAN
    assert not victim.ready
    assert len(owners(events)) == 2
    # Not by the lease: a hand-back raises the epoch once more than a claim, and the attempt does not count.
    assert set(epochs(events)) == {1, 3}
    assert redis_client.hget(Keys.of(request.id).request(request.id), "att") == b"1"
    assert_same(events, await pair.undisturbed(fleet))


async def test_an_abort_outlives_the_worker_that_should_have_obeyed_it(
    pair: Pair, fleet: FleetClient, redis_client: Redis
) -> None:
    request = sequential(NAME, LENGTH, seed=SEED)

    def kill_and_abort(worker: WorkerProcess) -> None:
        worker.send(signal.SIGKILL)
        redis_client.set(Keys.of(request.id).abort(request.id), "client left", px=60_000)

    _, events = await disturbed(fleet, pair, request, kill_and_abort)
    assert assert_whole(events).reason == "aborted"
    assert redis_client.xlen(Keys.of(request.id).lane("std")) == 0


async def test_a_second_signal_ends_the_drain_and_the_lease_does_the_rest(
    fleet: FleetClient, spawn_worker: SpawnWorker
) -> None:
    patient = spawn_worker("patient", "--drain-s", "60").wait_ready()
    request = sequential("patient", 1900)
    events: list[Event] = []
    async for event in fleet.run(request):
        events.append(event)
        if isinstance(event, Delta) and event.block == 5:
            patient.send(signal.SIGTERM)
            until(lambda: not patient.ready, "the drain has begun")
            assert patient.alive
            patient.send(signal.SIGTERM)
            assert patient.wait_exit() == ExitCode.INTERRUPTED
            break
    assert (await fleet.result(request.id)).state == "running"
    await fleet.abort(request.id)
