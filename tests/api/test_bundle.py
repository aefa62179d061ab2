"""One call, several requests."""

import asyncio
from collections.abc import Iterator

import orjson
import pytest

from shared.client import IdempotencyConflict, QueueFull
from shared.commands import Generate
from shared.events import Delta, Failed, Queued
from tests.api.scripted import Caller, ScriptedFleet, Step, answer, running, steps

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
JSON = {"content-type": "application/json"}


def by_turn(*scripts: "list[Step]") -> object:
    """Play another script for each request, in their order."""
    turns = iter(scripts)

    def play(command: Generate) -> Iterator[Step]:
        for step in next(turns):
            yield step(command.id) if callable(step) else step

    return play


async def test_choices_are_commands_with_seeds_of_their_own(caller: Caller, fleet: ScriptedFleet) -> None:
    content = (await caller.post(CHAT, {"messages": HI, "n": 3, "seed": 7})).json()
    seeds = [command.sampling.seed for command in fleet.commands]
    assert seeds[0] == 7 and len(set(seeds)) == 3
    assert [choice["index"] for choice in content["choices"]] == [0, 1, 2]
    assert content["usage"]["prompt_tokens"] == len(fleet.commands[0].prompt)
    assert content["usage"]["completion_tokens"] == 3 * 11
    again = [command.sampling.seed for command in fleet.commands]
    await caller.post(CHAT, {"messages": HI, "n": 3, "seed": 7})
    assert [command.sampling.seed for command in fleet.commands[3:]] == again


async def test_prompts_of_a_list_have_the_same_seed_and_indexes_by_prompt(caller: Caller, fleet: ScriptedFleet) -> None:
    body = {"prompt": ["a", "bb"], "n": 2, "seed": 1}
    content = (await caller.post("/v1/completions", body)).json()
    assert [list(command.prompt) for command in fleet.commands] == [
        list(fleet.commands[0].prompt)] * 2 + [list(fleet.commands[2].prompt)] * 2  # fmt: skip
    assert fleet.commands[0].sampling.seed == fleet.commands[2].sampling.seed == 1
    assert [choice["index"] for choice in content["choices"]] == [0, 1, 2, 3]
    assert content["usage"]["prompt_tokens"] == sum(len(fleet.commands[index].prompt) for index in (0, 2))


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_full_queue_in_the_middle_leaves_nothing_behind(
    caller: Caller, fleet: ScriptedFleet, streamed: bool
) -> None:
    fleet.script = by_turn([Queued, 600.0], [QueueFull(3)], [Queued, 600.0])  # pyright: ignore
    response = await caller.post(CHAT, {"messages": HI, "n": 3, "stream": streamed})
    assert (response.status, response.error["code"]) == (503, "server_is_overloaded")
    assert response.headers["retry-after"] == "3"
    assert {request_id for request_id, _ in fleet.aborts} == {fleet.commands[0].id, fleet.commands[2].id}
    assert fleet.closed == 3


async def test_one_that_fails_in_mid_stream_ends_them_all_with_an_error(caller: Caller, fleet: ScriptedFleet) -> None:
    said = Delta("r", 2, 1, 0, 0, [75], "h", 1)
    fleet.script = by_turn([Queued, said, 600.0], [Queued, said, Failed("r", 3, 1, "lost", "gone")])  # pyright: ignore
    events = (await caller.post(CHAT, {"messages": HI, "n": 2, "stream": True})).events
    assert events[-1]["error"]["code"] == "worker_lost"
    assert [request_id for request_id, _ in fleet.aborts] == [fleet.commands[0].id]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_caller_who_leaves_aborts_them_all_even_if_the_first_has_ended(streamed: bool) -> None:
    def play(command: Generate) -> Iterator[Step]:
        if len(fleet.commands) == 1:
            yield from answer()(command)
        else:
            yield Queued(command.id)
            yield 600.0

    leave = asyncio.Event()
    fleet = ScriptedFleet(play)
    async with running(fleet) as caller:
        body = orjson.dumps({"messages": HI, "n": 3, "stream": streamed})
        call = asyncio.create_task(caller.call("POST", CHAT, body, JSON, leave))
        await fleet.reached_waits(2)
        leave.set()
        got = await asyncio.wait_for(call, 5)
    assert b"[DONE]" not in got.body
    assert {request_id for request_id, _ in fleet.aborts} == {command.id for command in fleet.commands[1:]}


async def test_an_idempotency_key_makes_one_command_and_outlives_its_caller() -> None:
    leave = asyncio.Event()
    fleet = ScriptedFleet(steps(Queued, 600.0))
    headers = JSON | {"idempotency-key": "k1"}
    async with running(fleet) as caller:
        for number in (1, 2):
            call = asyncio.create_task(caller.call("POST", CHAT, orjson.dumps({"messages": HI}), headers, leave))
            await fleet.reached_waits(number)
        leave.set()
        await asyncio.wait_for(call, 5)
        fleet.script = steps(IdempotencyConflict("r_x"))
        refused = await caller.post(CHAT, {"messages": HI}, {"idempotency-key": "k1"})
        wrong = await caller.post(CHAT, {"messages": HI}, {"idempotency-key": "has space"})
    assert fleet.idempotency_keys[0] is not None
    assert fleet.idempotency_keys[0] == fleet.idempotency_keys[1]
    first, second = fleet.commands[:2]
    assert first.model_copy(update={"id": "", "trace": {}}) == second.model_copy(update={"id": "", "trace": {}})
    assert fleet.aborts == []
    assert (refused.status, refused.error["code"]) == (409, "idempotency_conflict")
    assert (wrong.status, wrong.error["param"]) == (400, "Idempotency-Key")


async def test_priorities_are_lanes_and_traces_travel(caller: Caller, fleet: ScriptedFleet) -> None:
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    for extra in ({}, {"priority": -1}, {"priority": 5}, {"service_tier": "flex"}, {"service_tier": "priority"}):
        await caller.post(CHAT, {"messages": HI} | extra, {"traceparent": parent})
    assert [command.lane for command in fleet.commands] == ["std", "rt", "bulk", "bulk", "rt"]
    assert all(command.trace == {"traceparent": parent} for command in fleet.commands)
    await caller.post(CHAT, {"messages": HI}, {"traceparent": "nonsense"})
    assert fleet.commands[-1].trace["traceparent"] != "nonsense"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"preset": "balanced"}, None),
        ({"preset": "fast"}, {"strategy": "threshold", "threshold": 0.7}),
        ({"preset": "fast", "threshold": 0.95}, {"strategy": "threshold", "threshold": 0.95}),
        ({"preset": "quality"}, {"strategy": "low_confidence_static"}),
        ({"early_stop": False}, {"strategy": "threshold", "filler_rules": False}),
    ],
)
async def test_presets_stand_for_options_and_what_is_set_wins(
    caller: Caller, fleet: ScriptedFleet, options: dict[str, object], expected: dict[str, object] | None
) -> None:
    await caller.post(CHAT, {"messages": HI, "diffusion": options})
    decoding = fleet.commands[0].decoding
    if expected is None:
        assert decoding is None
    else:
        assert decoding is not None and expected.items() <= decoding.model_dump().items()


async def test_unserved_routes_say_so_and_slashes_are_forgiven(caller: Caller) -> None:
    for path in ("/v1/images/generations", "/v1/edit/completions", "/v1/audio/speech"):
        response = await caller.post(path, {"input": "x"})
        assert (response.status, response.error["code"]) == (404, "unsupported_endpoint")
    assert (await caller.post(CHAT + "/", {"messages": HI})).status == 200
    assert (await caller.get("/v1/models/")).status == 200
