"""A block length that a worker has chosen by its load goes with the request to whoever takes it over."""

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from shared.block_lengths import FILE
from shared.client import FleetClient
from shared.events import Delta, Event
from tests.fleet.conftest import SpawnWorker
from tests.fleet.models import BLOCK_LENGTH, write_tiny_model
from tests.fleet.requests_for_tests import assert_whole, collect, sequential, text_of, tokens_of
from worker.models import load_model

LENGTH = 400
CHOSEN = 8


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that says it decides so many more tokens a forward by longer blocks that each device takes them."""
    folder = write_tiny_model(tmp_path_factory.mktemp("by-load"))
    decoding = load_model(folder).spec.decoding.model_dump(mode="json")
    rows = [(BLOCK_LENGTH, 1.0), (CHOSEN, 8.0)]
    lengths = [{"block_length": length, "accuracy": 0.9, "tokens_per_forward": tokens} for length, tokens in rows]
    (folder / FILE).write_text(json.dumps({"items": 1, "decoding": decoding, "lengths": lengths}))
    return folder


def lengths_of(events: list[Event]) -> set[int | None]:
    return {event.block_length for event in events if isinstance(event, Delta)}


@pytest.mark.parametrize("ahead", ["off", "on"])
async def test_a_killed_workers_choice_is_kept_by_a_worker_that_chooses_nothing(
    fleet: FleetClient, spawn_worker: SpawnWorker, ahead: str
) -> None:
    """Whether rows are led, with steps for each length, or not."""
    name, led = f"by-load-{ahead}", ("--step-ahead", ahead)
    first = spawn_worker(name, "--block-length", "auto", *led).wait_ready()
    request = sequential(name, LENGTH, seed=11, decoding=None)
    events: list[Event] = []
    async for event in fleet.run(request):
        events.append(event)
        if isinstance(event, Delta) and event.block == 5:
            first.send(signal.SIGKILL)
            spawn_worker(name, *led).wait_ready()
    end = assert_whole(events)
    assert {event.epoch for event in events if isinstance(event, Delta)} == {1, 2}
    assert lengths_of(events) == {CHOSEN} and end.usage.block_length == CHOSEN

    # The same as if it had been asked for, undisturbed; and the second worker by itself takes the model's own.
    named = await collect(fleet.run(sequential(name, LENGTH, seed=11, decoding=None, block_length=CHOSEN)))
    assert (tokens_of(events), text_of(events)) == (tokens_of(named), text_of(named))
    own = await collect(fleet.run(sequential(name, 40, seed=11, decoding=None)))
    assert lengths_of(own) == {None} and assert_whole(own).usage.block_length == BLOCK_LENGTH


def test_workers_of_one_kind_go_by_what_the_first_has_measured(spawn_worker: SpawnWorker, redis_client: Any) -> None:
    said = "as a worker of this kind has measured them"
    first = spawn_worker("agreed", "--block-length", "auto").wait_ready()
    assert said not in first.log.read_text()
    second = spawn_worker("agreed", "--block-length", "auto").wait_ready()
    assert said in second.log.read_text()
    (name,) = redis_client.scan_iter("df:{agreed.0}:prices:*", count=1000)
    assert redis_client.ttl(name) > 0


async def test_a_led_worker_answers_all_lengths_side_by_side_as_one_that_leads_nothing(
    fleet: FleetClient, spawn_worker: SpawnWorker
) -> None:
    spawn_worker("led", "--block-length", "auto", "--step-ahead", "on").wait_ready()
    spawn_worker("plain", "--block-length", "auto", "--step-ahead", "off").wait_ready()

    async def answers(name: str) -> list[tuple[int | None, list[int]]]:
        lengths = [None, BLOCK_LENGTH, CHOSEN, 2 * CHOSEN] * 3
        asked = [
            sequential(name, 60, seed=seed, decoding=None, block_length=length) for seed, length in enumerate(lengths)
        ]
        found = await asyncio.gather(*(collect(fleet.run(request)) for request in asked))
        return [(assert_whole(events).usage.block_length, tokens_of(events)) for events in found]

    led = await answers("led")
    assert led == await answers("plain")
    assert [length for length, _ in led] == [CHOSEN, BLOCK_LENGTH, CHOSEN, 2 * CHOSEN] * 3


async def test_fronts_are_told_which_lengths_a_worker_chooses_from(
    fleet: FleetClient, spawn_worker: SpawnWorker
) -> None:
    spawn_worker("told", "--block-length", "auto").wait_ready()
    spawn_worker("untold").wait_ready()
    cards = [await fleet.card(name) for name in ("told", "untold")]
    assert [card.block_lengths for card in cards] == [(BLOCK_LENGTH, CHOSEN), ()]
