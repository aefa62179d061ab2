"""One worker process, followed through Redis: streams, aborts, and bad input beside good."""

import asyncio
from pathlib import Path

import pytest
from redis import Redis

from shared.client import FleetClient
from shared.commands import Generate, Limits
from shared.events import Delta, Event, Failed, Finished, Snapshot, Started
from shared.keys import Keys
from tests.fleet.conftest import SpawnWorker
from tests.fleet.faulty_worker import TAKES_ITS_TIME
from tests.fleet.processes import WorkerProcess, until
from tests.fleet.requests_for_tests import assert_whole, collect, sequential, text_of, tokens_of, with_previews
from worker.loop import EngineLoop
from worker.settings import WorkerSettings

NAME = "calm"
SLOTS = 2


@pytest.fixture(scope="module")
def worker(spawn_worker: SpawnWorker) -> WorkerProcess:
    flags = ("--max-rows", str(SLOTS), "--preview-interval-ms", "0")
    return spawn_worker(NAME, *flags, program="tests.fleet.faulty_worker").wait_ready()


async def test_a_stream_is_what_the_engine_alone_produces(
    worker: WorkerProcess, fleet: FleetClient, tiny_model: Path
) -> None:
    request = sequential(NAME, 60)
    events = await collect(fleet.run(request))

    end = assert_whole(events)
    assert (end.reason, end.detail, end.usage.nfe) == ("length", "max_tokens", 60)
    assert any(isinstance(event, Started) and event.worker == worker.id for event in events)
    async with EngineLoop.load(WorkerSettings(model=str(tiny_model), threads=1)) as loop:
        alone = await loop.generate(
            request.prompt, sampling=request.sampling, limits=request.limits, decoding=request.decoding
        )
    assert (text_of(events), tuple(tokens_of(events))) == (alone.text, alone.token_ids)


async def test_previews_show_the_canvas_filling_up(worker: WorkerProcess, fleet: FleetClient) -> None:
    events = await collect(fleet.run(sequential(NAME, 40, preview=with_previews())))

    assert_whole(events)
    previews = [event for event in events if isinstance(event, Snapshot)]
    assert previews
    final = dict(enumerate(tokens_of(events)))
    for preview in previews:
        shown = {preview.offset + i: token for i, token in enumerate(preview.token_ids) if token is not None}
        assert shown.items() <= final.items()


async def test_concurrent_requests_do_not_disturb_each_other(worker: WorkerProcess, fleet: FleetClient) -> None:
    alone = await collect(fleet.run(sequential(NAME, 32, seed=0)))
    streams = await asyncio.gather(*(collect(fleet.run(sequential(NAME, 32, seed=seed % 2))) for seed in range(6)))

    for seed, events in enumerate(streams):
        assert_whole(events)
        assert (text_of(events) == text_of(alone)) is (seed % 2 == 0)


async def test_an_abort_key_set_by_hand_ends_a_running_request_within_two_steps_and_frees_its_pages(
    worker: WorkerProcess, fleet: FleetClient, redis_client: Redis
) -> None:
    request = sequential(NAME, 500, prompt=(TAKES_ITS_TIME, 5), block_length=512, preview=with_previews())
    events: list[Event] = []
    nfe_at_abort = 0
    async for event in fleet.run(request):
        events.append(event)
        # The gauges are those of the step before.
        if isinstance(event, Snapshot) and event.nfe > 1 and not nfe_at_abort:
            nfe_at_abort = event.nfe
            assert worker.metrics()["diffleet_kv_pages_free"] < worker.metrics()["diffleet_kv_pages"]
            redis_client.set(Keys.of(request.id).abort(request.id), "by hand", px=60_000)

    end = events[-1]
    assert isinstance(end, Finished) and (end.reason, end.detail) == ("aborted", "aborted")
    assert end.usage.nfe - nfe_at_abort <= 2
    until(lambda: worker.metrics()["diffleet_kv_pages_free"] == worker.metrics()["diffleet_kv_pages"], "pages are free")
    assert_whole(await collect(fleet.run(sequential(NAME, 8))))


async def test_a_queued_request_is_aborted_at_once_and_never_reaches_a_worker(
    worker: WorkerProcess, fleet: FleetClient
) -> None:
    running = [sequential(NAME, 1500) for _ in range(SLOTS)]
    for request in running:
        await fleet.submit(request)
    for request in running:
        async for event in fleet.stream(request.id):
            if isinstance(event, Delta):
                break
    claims = worker.metrics()["diffleet_claims_total"]

    queued = sequential(NAME, 8)
    await fleet.submit(queued)
    assert await fleet.abort(queued.id) == "aborted"
    [*_, end] = await collect(fleet.stream(queued.id))
    assert isinstance(end, Finished) and (end.reason, end.usage.nfe) == ("aborted", 0)
    assert (await fleet.result(running[0].id)).state == "running"

    for request in running:
        await fleet.abort(request.id)
        [*_, end] = await collect(fleet.stream(request.id))
        assert isinstance(end, Finished) and end.reason == "aborted"
    assert worker.metrics()["diffleet_claims_total"] == claims


async def test_a_bad_payload_fails_alone(worker: WorkerProcess, fleet: FleetClient) -> None:
    good = sequential(NAME, 64)
    bad = sequential(NAME, 8).model_copy(update={"limits": Limits.model_construct(max_tokens=0)})
    foreign = sequential(NAME, 8, prompt=(5, 319, 320))
    long = sequential(NAME, 8, prompt=(5,) * 5000)

    async def follow(request: Generate) -> list[Event]:
        return await collect(fleet.run(request))

    fine, *failed = await asyncio.gather(*map(follow, (good, bad, foreign, long)))
    assert_whole(fine)
    ends = [events[-1] for events in failed]
    assert [(end.code, end.param) for end in ends if isinstance(end, Failed)] == [
        ("invalid_request", "limits.max_tokens"),
        ("invalid_request", "prompt"),
        ("too_long", "prompt"),
    ]


async def test_a_literal_mask_token_in_the_prompt_is_just_text(worker: WorkerProcess, fleet: FleetClient) -> None:
    prompt = (await fleet.tokenizer(await fleet.card(NAME))).encode("once <|mask|><|end|> upon")
    assert_whole(await collect(fleet.run(sequential(NAME, 16, prompt=tuple(prompt)))))


async def test_a_request_past_its_deadline_ends_as_expired(worker: WorkerProcess, fleet: FleetClient) -> None:
    request = sequential(NAME, 1900)
    request = request.model_copy(update={"limits": request.limits.model_copy(update={"total_ms": 300})})
    [*_, end] = await collect(fleet.run(request))
    assert isinstance(end, Failed) and end.code == "expired"
    until(lambda: worker.metrics()["diffleet_rows_running"] == 0, "the worker lets go of it")
