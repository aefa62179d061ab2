"""What the worker counts of steps and of aborts."""

from prometheus_client.parser import text_string_to_metric_families

from shared.events import Finished, Usage
from worker.engine.plan import Plan
from worker.engine.ports import Decision, Load, Outbox
from worker.metered import Metered
from worker.metrics import Metrics


def samples(metrics: Metrics) -> dict[tuple[str, str], float]:
    return {
        (sample.name, sample.labels.get("phase", "")): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def load(cached_tokens: int = 0) -> Load:
    return Load(1, 0, 3, 4, 1, cached_tokens=cached_tokens)


def test_aborts_are_told_apart_by_how_far_the_request_had_come() -> None:
    metrics = Metrics("m")
    costs = [Usage(3), Usage(3, 0, 2, 0), Usage(3, 0, 5, 0), Usage(3, 8, 6, 1)]
    events = [Finished(str(number), 2, 1, "aborted", "aborted", usage) for number, usage in enumerate(costs)]
    metrics.count_step(Outbox([*events, Finished("x", 2, 1, "stop", "stop_token", Usage(3))]), load(), 0.1)
    found = samples(metrics)
    phases = {phase: found["diffleet_aborts_total", phase] for phase in ("waiting", "first_block", "streaming")}
    assert phases == {"waiting": 1, "first_block": 2, "streaming": 1}


def test_prefix_hits_and_the_time_of_forwards_grow_by_what_was_added() -> None:
    metrics, spent = Metrics("m"), iter((0.25, 0.75))
    metrics.watch(lambda: 5.0, lambda: 0.5, lambda: next(spent))
    metrics.count_step(Outbox(), load(cached_tokens=32), 1.0)
    metrics.count_step(Outbox(), load(cached_tokens=96), 1.0)
    found = samples(metrics)
    assert found["diffleet_prefix_hit_tokens_total", ""] == 96
    assert found["diffleet_forward_seconds_total", ""] == 0.75
    assert found["diffleet_step_seconds_sum", ""] == 2.0
    assert (found["diffleet_slots_free", ""], found["diffleet_beat_age_seconds", ""]) == (5.0, 0.5)


def test_a_metered_forward_keeps_the_time_also_of_one_that_fails() -> None:
    class Full(Exception):
        pass

    def fail(plan: Plan) -> Decision:
        raise Full

    metered = Metered(fail)
    try:
        metered(Plan(()))
    except Full:
        pass
    assert metered.seconds > 0
