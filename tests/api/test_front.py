"""Headers, probes, documents: what surrounds the endpoints."""

import asyncio
import dataclasses
import inspect
import logging
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest
from fastapi.routing import APIRoute
from prometheus_client.parser import text_string_to_metric_families

from api.app import ROUTERS
from shared.client import FleetUnavailable
from shared.events import Queued, Started
from tests.api.scripted import CARD, Answer, Caller, ScriptedFleet, running, steps


async def test_every_answer_has_a_request_id(caller: Caller) -> None:
    answers = [
        await caller.post("/generate", {"prompt": "x"}),
        await caller.post("/generate", {"prompt": "x", "stream": True}),
        await caller.post("/generate", {}),
        await caller.post("/generate", b"{"),
        await caller.get("/nope"),
        await caller.get("/health"),
    ]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(ids)) == len(ids)
    assert all(answer.headers["openai-processing-ms"].isdecimal() for answer in answers)


@pytest.mark.parametrize(
    ("sent", "kept"),
    [("abc-123", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("a\x7f", False), ("", False)],
)
async def test_a_callers_own_request_id_is_kept_if_it_is_sane(caller: Caller, sent: str, kept: bool) -> None:
    answer = await caller.get("/health", {"x-request-id": sent})
    assert (answer.headers["x-request-id"] == sent) == kept


def test_no_route_and_nothing_that_it_depends_on_runs_in_a_thread() -> None:
    routes = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
    rest, called = [route.dependant for route in routes], list[Callable[..., object]]()
    while rest:
        dependant = rest.pop()
        rest += dependant.dependencies
        called += [] if dependant.call is None else [dependant.call]
    assert len(called) > len(routes) > 20
    assert [call for call in called if not inspect.iscoroutinefunction(call)] == []


async def test_streams_tell_proxies_to_pass_them_on(caller: Caller) -> None:
    headers = (await caller.post("/generate", {"prompt": "x", "stream": True})).headers
    assert headers["x-accel-buffering"] == "no"
    assert "no-cache" in headers["cache-control"]
    assert "content-length" not in headers


async def test_browsers_may_call_and_read_errors(caller: Caller) -> None:
    origin = {"origin": "https://example.org"}
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    answer = await caller.call("OPTIONS", "/generate", b"", origin | preflight)
    assert answer.status == 200
    assert "authorization" in answer.headers["access-control-allow-headers"].lower()
    for body in ({"prompt": "x", "stream": True}, {}):
        answer = await caller.post("/generate", body, origin)
        assert answer.headers["access-control-allow-origin"] == "*"
        assert "x-request-id" in answer.headers["access-control-expose-headers"]


async def test_models_are_listed_and_described_with_slashes_in_their_names(caller: Caller) -> None:
    listed = (await caller.get("/v1/models")).json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert model["id"] == "org/demo" and model["object"] == "model" and isinstance(model["created"], int)
    assert (await caller.get("/v1/models/org/demo")).json() == model
    assert model["served"] is True
    answer = await caller.get("/v1/models/org/other")
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")


async def test_models_tell_whether_somebody_serves_them(caller: Caller, fleet: ScriptedFleet) -> None:
    fleet.cards["former"] = dataclasses.replace(CARD, name="former")
    fleet.departed = {"former"}
    listed = (await caller.get("/v1/models")).json()["data"]
    assert {model["id"]: model["served"] for model in listed} == {"org/demo": True, "former": False}
    for name in ("org/demo", "former"):
        assert (await caller.get(f"/v1/models/{name}")).json()["served"] is (name == "org/demo")


async def test_the_longest_block_that_a_model_is_said_to_take_is_one_that_may_be_asked_for(
    caller: Caller, fleet: ScriptedFleet
) -> None:
    name = CARD.name
    for room in (262_144, 300):
        fleet.cards[name] = dataclasses.replace(CARD, largest_block=room, digest="")
        largest = (await caller.get(f"/v1/models/{name}")).json()["largest_block_length"]
        body = {"model": name, "prompt": "x", "max_tokens": 4}
        assert (await caller.post("/generate", body | {"diffusion": {"block_length": largest}})).status == 200
        assert (await caller.post("/generate", body | {"diffusion": {"block_length": largest + 1}})).status == 400


async def test_readiness_needs_redis_and_a_worker_and_no_drain(caller: Caller, fleet: ScriptedFleet) -> None:
    assert (await caller.get("/health/ready")).json()["workers"] == {"org/demo": 1}
    fleet.live = 0
    assert "no worker" in (await unready(caller))["message"]
    fleet.live, fleet.down = 1, FleetUnavailable("x")
    assert "queue" in (await unready(caller))["message"]
    fleet.down = None
    caller.app.state.services.draining = True
    assert "shutting down" in (await unready(caller))["message"]
    assert (await caller.get("/health/live")).status == 200
    assert (await caller.post("/generate", {"prompt": "x"})).status == 200


async def test_readiness_may_do_without_workers_where_they_scale_to_zero() -> None:
    fleet = ScriptedFleet()
    async with running(fleet, ready_without_workers=True) as caller:
        fleet.live = 0
        assert (await caller.get("/health/ready")).status == 200
        fleet.down = FleetUnavailable("x")
        assert "queue" in (await unready(caller))["message"]


async def test_a_model_that_is_forgotten_meanwhile_hides_no_other() -> None:
    class Forgetful(ScriptedFleet):
        async def models(self) -> Sequence[str]:
            return [*await super().models(), "gone"]

    async with running(Forgetful()) as caller:
        assert (await caller.get("/health/ready")).json()["workers"] == {"org/demo": 1, "gone": 0}
        assert [worker["model"] for worker in (await caller.get("/admin/workers")).json()["data"]] == ["org/demo"]
        for path in ("/metrics", "/admin/loras", "/v1/models"):
            assert (await caller.get(path)).status == 200, path


async def unready(caller: Caller) -> dict[str, str]:
    ready, health = await caller.get("/health/ready"), await caller.get("/health")
    assert ready.status == health.status == 503
    assert ready.headers["retry-after"] == "1"
    return ready.json()["error"]


async def test_a_redis_that_hangs_does_not_hang_the_probe() -> None:
    import asyncio

    class Hanging(ScriptedFleet):
        async def ping(self) -> None:
            await asyncio.sleep(600)

    async with running(Hanging(), health_timeout_s=0.02) as caller:
        assert (await caller.get("/health/ready")).status == 503


async def test_probes_answer_head_requests(caller: Caller) -> None:
    for path in ("/health", "/health/live", "/health/ready"):
        assert (await caller.call("HEAD", path, b"", {})).status == 200


async def test_the_version_is_told(caller: Caller) -> None:
    assert (await caller.get("/version")).json()["version"]


async def test_metrics_count_and_have_no_label_that_callers_invent(caller: Caller) -> None:
    await caller.post("/generate", {"prompt": "x", "user": "someone"})
    await caller.get("/made-up-path")
    await caller.call("BREW", "/generate", b"", {})
    text = (await caller.get("/metrics")).body.decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert all(sample.name.startswith(("diffleet_", "vllm:")) for sample in samples)
    count = {
        (sample.labels["route"], sample.labels["method"], sample.labels["status"]): sample.value
        for sample in samples
        if sample.name == "diffleet_http_requests_total"
    }
    assert count == {
        ("/generate", "POST", "200"): 1,
        ("unmatched", "GET", "404"): 1,
        ("/generate", "other", "405"): 1,
    }
    values = {sample.name: sample.value for sample in samples}
    assert values["diffleet_prompt_tokens_total"] == 1
    assert values["diffleet_completion_tokens_total"] == 11
    assert values["diffleet_denoising_forwards_total"] == 6
    assert "someone" not in text and "made-up" not in text


async def test_the_documents_describe_the_bodies(caller: Caller) -> None:
    assert (await caller.get("/docs")).status == 200
    document = (await caller.get("/openapi.json")).json()
    body = document["paths"]["/generate"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"prompt", "max_nfe", "stream_mode", "diffusion"} <= set(body["properties"])
    assert "$ref" not in str(body)
    assert "messages" in str(document["paths"]["/v1/chat/completions"]["post"]["requestBody"])


async def test_the_log_has_one_line_for_a_request(caller: Caller, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "diffleet.api"):
        await caller.post("/generate", {"prompt": "x"})
        await caller.get("/health")
    (record,) = caplog.records
    assert record.getMessage() == "request finished"
    assert (record.__dict__["route"], record.__dict__["status"]) == ("/generate", 200)


def test_the_front_brings_no_engine_with_it() -> None:
    program = "import sys, api.app, api.process; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    listed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(listed.stdout.split())
    assert "fastapi" in loaded
    assert loaded.isdisjoint({"torch", "transformers", "worker", "kernels", "triton", "safetensors", "numpy"})


async def test_requests_are_counted_as_waiting_until_a_worker_begins(fleet: ScriptedFleet) -> None:
    leave = asyncio.Event()
    async with running(fleet) as caller:

        async def gauges() -> tuple[float, float]:
            text = (await caller.get("/metrics")).body.decode()
            families = text_string_to_metric_families(text)
            values = {sample.name: sample.value for family in families for sample in family.samples}
            return values.get("vllm:num_requests_waiting", 0.0), values.get("vllm:num_requests_running", 0.0)

        body = {"content-type": "application/json"}
        calls: list[asyncio.Task[Answer]] = []
        for script, expected in ((steps(Queued, 600.0), (1, 0)), (steps(Queued, begun, 600.0), (1, 1))):
            fleet.script = script
            calls.append(asyncio.create_task(caller.call("POST", "/generate", b'{"prompt": "x"}', body, leave)))
            await fleet.reached_waits(len(calls))
            assert await gauges() == expected
        leave.set()
        await asyncio.gather(*calls)
        assert await gauges() == (0, 0)


def begun(request_id: str) -> Started:
    return Started(request_id, 1, "w1")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_names_the_fields_that_nothing_here_knows(caller: Caller, stream: bool) -> None:
    body = {"prompt": "x", "stream": stream, "tools": None, "n": None, "diffusion": {"threshold": 0.5}, "nothing": None}
    assert "x-diffleet-ignored" not in (await caller.post("/generate", body)).headers
    told = await caller.post("/generate", body | {"treshold": 0.5, "n\u00e4me\n": 1})
    assert (told.status, told.headers["x-diffleet-ignored"]) == (200, "treshold, n%C3%A4me%0A")
    many = await caller.post("/generate", body | {f"f{number}": 1 for number in range(11)})
    assert many.headers["x-diffleet-ignored"].endswith("f7, and 3 more")


async def test_a_field_whose_effect_is_refused_where_it_is_asked_for_is_not_unknown(caller: Caller) -> None:
    answer = await caller.post(
        "/v1/responses", {"input": "x", "store": False, "truncation": "disabled", "verbosity": "low"}
    )
    assert (answer.status, answer.headers["x-diffleet-ignored"]) == (200, "verbosity")
