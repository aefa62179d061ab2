"""Workers of one kind go by the same prices of steps, whoever has measured them."""

import json
import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis

from shared.connection import open_sync_client
from shared.keys import step_prices
from tests.worker.test_block_choice import CACHE, LIMITS, SPEC, write
from tests.worker.test_load_aware import Priced
from worker.block_choice import choose_length, lengths_to_choose_from
from worker.device import Placement
from worker.engine.load_aware import StepPrices
from worker.price_book import KEPT_S, Measure, PriceBook, Prices, kind_of
from worker.settings import WorkerSettings

CPU = Placement(torch.device("cpu"), torch.float32, 1)
ONE, OTHER = {4: StepPrices((1, 8), (0.01, 0.02))}, {4: StepPrices((1, 8), (0.01, 0.09))}
points = st.lists(st.tuples(st.integers(1, 4096), st.floats(1e-6, 10)), min_size=1, max_size=12)


def never(lengths: Collection[int]) -> Prices:
    raise AssertionError("it has been measured already")


@given(st.dictionaries(st.integers(1, 64), points.map(StepPrices.of), min_size=1))
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_the_first_worker_measures_is_what_the_others_go_by(fleet_redis: Redis, measured: Prices) -> None:
    fleet_redis.delete(step_prices("m", "kind"))
    assert PriceBook(fleet_redis, "m", "kind").agree(measured, lambda lengths: measured) == measured
    assert PriceBook(fleet_redis, "m", "kind").agree(measured, never) == measured


def test_of_two_that_measure_at_the_same_time_both_go_by_the_first_that_is_ready(fleet_redis: Redis) -> None:
    first, second = (PriceBook(fleet_redis, "m", "kind") for _ in range(2))

    def slow(lengths: Collection[int]) -> Prices:
        assert first.agree(ONE, lambda lengths: ONE) == ONE
        return OTHER

    assert second.agree(ONE, slow) == ONE


def test_other_models_and_kinds_have_prices_of_their_own_which_are_kept_for_days(fleet_redis: Any) -> None:
    assert PriceBook(fleet_redis, "m", "kind").agree(ONE, lambda lengths: ONE) == ONE
    for model, kind in (("m", "other"), ("n", "kind")):
        assert PriceBook(fleet_redis, model, kind).agree(ONE, lambda lengths: OTHER) == OTHER
    name = step_prices("m", "kind")
    fleet_redis.expire(name, 60)
    PriceBook(fleet_redis, "m", "kind").agree(ONE, never)
    assert KEPT_S - 60 < fleet_redis.ttl(name) <= KEPT_S


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        "7",
        '{"positions": [1], "seconds": [0.1]}',
        '{"8": {"positions": [1], "seconds": [0.1]}}',
        '{"4": [1]}',
        '{"4": {"positions": [], "seconds": []}}',
        '{"4": {"positions": [1, 2], "seconds": [0.1]}}',
        '{"4": {"positions": [2, 1], "seconds": [0.1, 0.2]}}',
        '{"4": {"positions": [0], "seconds": [0.1]}}',
        '{"4": {"positions": [1], "seconds": [NaN]}}',
        '{"4": {"positions": [1], "seconds": [0]}}',
        '{"4": {"positions": [1e999], "seconds": [0.1]}}',
        "[" * 100_000,
    ],
)
def test_what_nobody_can_read_is_measured_anew_and_replaced(fleet_redis: Redis, content: str) -> None:
    fleet_redis.set(step_prices("m", "kind"), content, ex=600)
    assert PriceBook(fleet_redis, "m", "kind").agree(ONE, lambda lengths: ONE) == ONE
    assert PriceBook(fleet_redis, "m", "kind").agree(ONE, never) == ONE


@pytest.mark.parametrize("dies", ["before", "meanwhile"])
def test_without_redis_a_worker_goes_by_what_it_measures_once(
    fleet_redis: Redis, dies: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Dying:
        """A client whose server has gone after so many calls."""

        def __init__(self, calls: int) -> None:
            self.calls = calls

        def __getattr__(self, name: str) -> Any:
            self.calls -= 1
            nowhere = open_sync_client(f"unix://{tmp_path}/none.sock")
            return getattr(fleet_redis if self.calls >= 0 else nowhere, name)

    measured: list[Prices] = []

    def measure(lengths: Collection[int]) -> Prices:
        measured.append(ONE)
        return ONE

    client: Any = Dying(0 if dies == "before" else 1)
    with caplog.at_level(logging.WARNING, "worker.price_book"):
        assert PriceBook(client, "m", "kind").agree(ONE, measure) == ONE
    assert measured == [ONE] and "for this worker alone" in caplog.text


def test_a_kind_is_all_that_prices_depend_on(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    def kind(placement: Placement = CPU, **options: Any) -> str:
        return kind_of(WorkerSettings(model=str(tmp_path), **options), placement)

    others = [
        kind(Placement(torch.device("cpu"), torch.bfloat16, 1)),
        kind(Placement(torch.device("cpu"), torch.float32, 2)),
        kind(weights="wide"),
        kind(max_rows=3),
        kind(token_budget=4096),
        kind(step_ahead="on"),
    ]
    same = kind(block_length="auto", redis_url="redis://elsewhere:1/0", model_name="other")
    assert same == kind() and len({kind(), *others}) == 7
    before = kind()
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    assert kind() != before


def test_workers_on_a_busy_and_on_a_free_machine_choose_the_same_lengths(fleet_redis: Redis, tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": str(write(tmp_path)), "block_length": "auto", "max_rows": 8}

    def choices(seconds: float, agree: Any) -> list[int]:
        """Choose by steps whose every position costs something, or nothing."""
        forward, asked = Priced(lambda tokens: 1e-3 + seconds * tokens), WorkerSettings(**options)
        lengths = lengths_to_choose_from(asked, SPEC, CACHE.page_size, LIMITS)
        chooser = choose_length(lengths, asked, SPEC, CACHE, LIMITS, forward, lambda: forward.now, agree)
        assert chooser is not None
        return [chooser(requests) for requests in range(1, 9)]

    def apart(lengths: Collection[int], measure: Measure) -> Prices:
        return measure(lengths)

    assert choices(0.0, apart) != choices(1.0, apart)
    book = PriceBook(fleet_redis, "m", "kind")
    assert choices(0.0, book.agree) == choices(1.0, book.agree) == choices(0.0, apart)
