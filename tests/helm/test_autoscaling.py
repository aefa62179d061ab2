"""Check 42: the rendered ScaledObject, obeyed on a clock of the test's own, serves bursts and strands nothing."""

import copy
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from shared.client import FleetClient
from tests.helm.autoscaler import Autoscaler
from tests.helm.chart import Object, merged, render
from tests.helm.simulation import Simulation, turns

MODEL = "m"
START_S = 120.0
Simulate = Callable[..., Awaitable[Simulation]]


def scaled_object(**scaling: object) -> Object:
    """Return what the chart renders for a pool that may rest at zero and whose workers hold eight requests."""
    pool = {
        "model": {"name": MODEL},
        "maxRows": 8,
        "startup": {"budgetSeconds": 300},
        "scaling": merged(
            {"enabled": True, "min": 0, "max": 6, "cooldownPeriod": 600, "initialCooldownPeriod": 600}, scaling
        ),
    }
    (scaled,) = render({"redis": {"host": "redis"}, "pools": {"p": pool}}).of("ScaledObject")
    return scaled


def by_lag(scaled: Object) -> Object:
    """Return the same with the trigger that most people write."""
    changed = copy.deepcopy(scaled)
    for trigger in changed["spec"]["triggers"]:
        del trigger["metadata"]["streamLength"]
        trigger["metadata"] |= {"consumerGroup": "g", "lagCount": "6"}
    return changed


@pytest.fixture
async def simulate(redis_url: str, fleet_redis: Any) -> AsyncIterator[Simulate]:
    made: list[Simulation] = []
    async with FleetClient.connect(redis_url) as fleet:

        async def make(scaled: Object, **options: Any) -> Simulation:
            made.append(Simulation(redis_url, fleet_redis, fleet, scaled, MODEL, start_s=START_S, **options))
            await made[-1].serve_once()
            return made[-1]

        yield make
        for one in made:
            await one.close()


async def test_42_one_request_wakes_a_pool_at_zero_and_the_pool_goes_back_to_rest(simulate: Simulate) -> None:
    simulation = await simulate(scaled_object())
    await simulation.run(60)
    assert {sample.replicas for sample in simulation.samples} == {0}
    (request_id,) = await simulation.submit(1, takes_s=30)
    await simulation.run(300)
    job = simulation.jobs[request_id]
    assert job.claimed is not None and job.claimed - job.submitted <= 15 + START_S + 5
    assert max(sample.replicas for sample in simulation.samples) == 1
    await simulation.run(900)
    assert simulation.samples[-1].replicas == 0 and not simulation.unfinished


async def test_42_a_burst_gets_all_the_workers_within_minutes_and_they_leave_one_by_one(simulate: Simulate) -> None:
    simulation = await simulate(scaled_object())
    await simulation.submit(120, takes_s=60)
    await simulation.run(400)
    reached = next(sample.now for sample in simulation.samples if sample.replicas == 6)
    assert reached <= 120
    await simulation.run(3600)
    assert not simulation.unfinished and simulation.states() == {"done"}
    assert max(sample.replicas for sample in simulation.samples) == 6
    assert turns(simulation.samples) == 1
    assert simulation.samples[-1].replicas == 0


async def test_42_bursts_that_follow_each_other_make_no_flapping(simulate: Simulate) -> None:
    simulation = await simulate(scaled_object(min=1))
    for _ in range(5):
        await simulation.submit(30, takes_s=40)
        await simulation.run(300)
    # The window of ten minutes spans the gaps: up once, and down only after the last burst.
    assert turns(simulation.samples) == 0
    await simulation.run(2400)
    assert turns(simulation.samples) == 1 and simulation.samples[-1].replicas == 1
    assert not simulation.unfinished


async def test_42_work_that_runs_longer_than_the_cooldown_is_not_taken_for_idleness(simulate: Simulate) -> None:
    simulation = await simulate(scaled_object())
    await simulation.submit(3, takes_s=1500, lane="bulk")
    await simulation.run(3000)
    assert not simulation.unfinished
    assert all(sample.replicas > 0 for sample in simulation.samples if sample.running)
    claimed = [job.claimed for job in simulation.jobs.values()]
    assert all(at is not None and at <= 15 + START_S + 5 for at in claimed), "nothing was handed back on the way"


async def test_42_a_trigger_on_lag_alone_takes_the_worker_away_in_the_middle_and_strands_its_work(
    simulate: Simulate,
) -> None:
    simulation = await simulate(by_lag(scaled_object()))
    await simulation.submit(3, takes_s=1500, lane="bulk")
    await simulation.run(3000)
    assert len(simulation.unfinished) == 3
    assert simulation.samples[-1].replicas == 0 and simulation.samples[-1].running == 3


async def test_42_what_a_lost_node_held_is_done_by_the_worker_that_comes_after_it(simulate: Simulate) -> None:
    simulation = await simulate(scaled_object())
    await simulation.submit(4, takes_s=100)
    await simulation.run(200)
    (worker,) = simulation.workers
    assert len(worker.held) == 4
    # Longer than the cooldown: whoever looks at unread entries only has let the pool go by then.
    simulation.no_room_until = simulation.now + 900
    simulation.crash(worker)
    await simulation.run(1500)
    assert not simulation.unfinished and simulation.states() == {"done"}


async def test_42_a_trigger_on_lag_alone_forgets_what_a_lost_node_held(simulate: Simulate) -> None:
    simulation = await simulate(by_lag(scaled_object()))
    await simulation.submit(4, takes_s=100)
    await simulation.run(200)
    (worker,) = simulation.workers
    simulation.no_room_until = simulation.now + 900
    simulation.crash(worker)
    await simulation.run(3000)
    assert len(simulation.unfinished) == 4 and simulation.samples[-1].replicas == 0


async def test_42_a_storm_of_aborts_strands_nothing_and_lets_the_pool_rest(simulate: Simulate) -> None:
    simulation = await simulate(scaled_object())
    ids = await simulation.submit(60, takes_s=30)
    await simulation.run(60)
    await simulation.abort(ids[5:])
    await simulation.run(600)
    assert not simulation.unfinished and simulation.states() == {"done", "aborted"}
    await simulation.run(1500)
    assert simulation.samples[-1].replicas == 0 and simulation.samples[-1].queued == 0


async def test_42_an_outage_of_redis_changes_nothing(simulate: Simulate) -> None:
    class Away:
        def execute_command(self, *words: str) -> object:
            raise RedisConnectionError("away")

    simulation = await simulate(scaled_object())
    await simulation.submit(30, takes_s=400)
    await simulation.run(300)
    before = simulation.autoscaler.replicas
    assert before == 5
    simulation.autoscaler.redis, present = Away(), simulation.autoscaler.redis  # pyright: ignore[reportAttributeAccessIssue]
    await simulation.run(900)
    assert {sample.replicas for sample in simulation.samples[-170:]} == {before}
    simulation.autoscaler.redis = present
    await simulation.run(600)
    assert not simulation.unfinished


async def test_42_lanes_are_added_not_compared(simulate: Simulate) -> None:
    simulation = await simulate(scaled_object())
    for lane in ("rt", "std", "bulk"):
        await simulation.submit(6, takes_s=600, lane=lane)
    await simulation.run(200)
    assert simulation.samples[-1].replicas == 3


async def test_42_waiting_requests_ask_for_workers_beside_the_length(fleet_redis: Redis) -> None:
    prometheus = {"enabled": True, "serverAddress": "http://prometheus", "target": 2}
    late = Autoscaler(scaled_object(prometheus=prometheus), fleet_redis, 1, measure=lambda query: 7.0)
    late.step(0.0)
    assert late.replicas == 4
