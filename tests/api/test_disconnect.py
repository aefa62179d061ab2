import asyncio

import orjson
import pytest

from shared.client import FleetUnavailable
from shared.events import Delta, Finished, Queued, Usage
from tests.api.scripted import ScriptedFleet, running, steps

JSON = {"content-type": "application/json"}
PATHS = ["/generate", "/v1/chat/completions"]


def body(streamed: bool) -> bytes:
    return orjson.dumps({"prompt": "x", "messages": [{"role": "user", "content": "x"}], "stream": streamed})


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("with_delta", [False, True])
async def test_a_caller_who_leaves_aborts_the_request(path: str, streamed: bool, with_delta: bool) -> None:
    leave = asyncio.Event()
    delta = [Delta("r", 2, 1, 0, 0, [75], "h", 1)] if with_delta else []
    fleet = ScriptedFleet(steps(Queued, *delta, 600.0))
    async with running(fleet) as caller:
        call = asyncio.create_task(caller.call("POST", path, body(streamed), JSON, leave))
        await fleet.reached_waits(1)
        assert fleet.aborts == []
        leave.set()
        answer = await asyncio.wait_for(call, 5)

    assert fleet.aborts == [(fleet.commands[0].id, "disconnected")]
    assert fleet.closed == 1
    assert answer.status == (200 if streamed and with_delta else 499)
    assert b"[DONE]" not in answer.body


async def test_a_cancelled_handler_aborts_the_request() -> None:
    fleet = ScriptedFleet(steps(Queued, Delta("r", 2, 1, 0, 0, [75], "h", 1), 600.0))
    async with running(fleet) as caller:
        for number, streamed in enumerate((False, True), 1):
            call = asyncio.create_task(caller.call("POST", "/generate", body(streamed), JSON))
            await fleet.reached_waits(number)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
    assert [reason for _, reason in fleet.aborts] == ["disconnected", "disconnected"]
    assert fleet.closed == 2


async def test_an_abort_that_fails_does_no_harm() -> None:
    class Deaf(ScriptedFleet):
        async def abort(self, request_id: str, reason: str = "") -> str:
            raise FleetUnavailable

    leave = asyncio.Event()
    leave.set()
    async with running(Deaf(steps(Queued, 600.0))) as caller:
        assert (await caller.call("POST", "/generate", body(False), JSON, leave)).status == 499


async def test_one_who_leaves_while_sending_the_body_is_not_an_error(caplog: pytest.LogCaptureFixture) -> None:
    fleet = ScriptedFleet()
    leave = asyncio.Event()
    leave.set()
    async with running(fleet) as caller:
        answer = await caller.call("POST", "/generate", [], JSON, leave)
    assert answer.status == 499
    assert fleet.commands == []
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_open_requests_are_counted_down_again() -> None:
    fleet = ScriptedFleet()
    async with running(fleet) as caller:
        for streamed in (False, True):
            await caller.call("POST", "/generate", body(streamed), JSON)
        assert 'diffleet_open_requests{model="org/demo"} 0.0' in (await caller.get("/metrics")).body.decode()


async def test_a_shutdown_ends_open_streams_with_an_error_and_done() -> None:
    fleet = ScriptedFleet(steps(Queued, Delta("r", 2, 1, 0, 0, [75], "h", 1), 600.0))
    async with running(fleet) as caller:
        streamed, whole = (
            asyncio.create_task(caller.call("POST", "/generate", body(streamed), JSON)) for streamed in (True, False)
        )
        await fleet.reached_waits(2)
        caller.app.state.services.relay.interrupt()
        assert (await streamed).events[-1]["error"]["code"] == "server_is_overloaded"
        assert (await whole).status == 503
    assert [reason for _, reason in fleet.aborts] == ["shutdown", "shutdown"]


async def test_silence_is_bridged_by_comments() -> None:
    finished = Finished("r", 2, 1, "stop", "stop_token", Usage())
    fleet = ScriptedFleet(steps(Queued, 0.5, finished))
    async with running(fleet, keepalive_s=0.02) as caller:
        answer = await caller.call("POST", "/generate", body(True), JSON)
        assert answer.body.startswith(b": keep-alive\n\n")
        assert [event["event"] for event in answer.events] == ["final"]

        fleet.script = steps(Queued, 0.08, finished)
        assert (await caller.call("POST", "/generate", body(False), JSON)).json()["finish_reason"] == "stop"
