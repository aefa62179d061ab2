"""The span of a request in the front."""

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator

import pytest

import api.assembly
from shared.events import Failed
from shared.telemetry import JsonLines
from shared.tracing import Untraced, open_tracing
from tests.api.scripted import Caller, ScriptedFleet, answer, running, steps
from tests.tracing_for_tests import Spans, traceparent

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Spans:
    spans = Spans()
    monkeypatch.setattr(api.assembly, "open_tracing", lambda *_: spans.tracing)
    return spans


@pytest.fixture
async def traced(spans: Spans, fleet: ScriptedFleet) -> AsyncIterator[Caller]:
    async with running(fleet) as caller:
        yield caller


@pytest.fixture
def fleet() -> Iterator[ScriptedFleet]:
    yield ScriptedFleet(answer("A secret answer"))


async def test_a_request_is_a_span_below_its_caller_s_and_above_its_worker_s(
    traced: Caller, fleet: ScriptedFleet, spans: Spans
) -> None:
    body = {"prompt": "a secret prompt", "max_tokens": 32, "temperature": 0.5, "seed": 7}
    assert (await traced.post("/generate", body, {"traceparent": CALLER, "tracestate": "a=b"})).status == 200
    (span,) = spans.ended
    assert span.parent is not None and f"{span.parent.span_id:016x}" in CALLER
    assert f"{span.parent.trace_id:032x}" in CALLER
    assert fleet.commands[0].trace == {"traceparent": traceparent(span), "tracestate": "a=b"}


async def test_the_attributes_are_those_of_the_conventions_and_hold_no_text(
    traced: Caller, fleet: ScriptedFleet, spans: Spans
) -> None:
    body = {"prompt": "a secret prompt", "max_tokens": 32, "temperature": 0.5, "seed": 7, "stop": ["a secret stop"]}
    await traced.post("/generate", body)
    (span,) = spans.ended
    assert span.name == f"generate_content {fleet.commands[0].model}"
    assert span.kind.name == "CLIENT"
    found = dict(span.attributes or {})
    assert found["gen_ai.operation.name"] == "generate_content"
    assert found["gen_ai.provider.name"] == "diffleet"
    assert found["gen_ai.request.model"] == fleet.commands[0].model
    assert found["gen_ai.response.id"] == fleet.commands[0].id
    assert (found["gen_ai.request.max_tokens"], found["gen_ai.request.temperature"]) == (32, 0.5)
    assert found["gen_ai.request.seed"] == 7
    assert found["gen_ai.response.finish_reasons"] == ("stop",)
    assert found["gen_ai.usage.output_tokens"] == 12
    assert found["diffleet.forwards"] == 6
    assert isinstance(found["diffleet.time_to_first_block_s"], float)
    assert "secret" not in repr(found)


async def test_a_trace_that_begins_here_has_no_parent_and_the_id_of_the_log_lines(
    traced: Caller, spans: Spans, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.handler.setFormatter(JsonLines())
    with caplog.at_level(logging.INFO, "diffleet.api"):
        await traced.post("/generate", {"prompt": "x"})
    (span,) = spans.ended
    assert span.parent is None
    assert json.loads(caplog.text)["trace_id"] == traceparent(span).split("-")[1]


async def test_a_failure_is_an_error_of_its_code(traced: Caller, fleet: ScriptedFleet, spans: Spans) -> None:
    fleet.script = steps(lambda request_id: Failed(request_id, 2, 1, "out_of_memory", "no memory"))
    await traced.post("/generate", {"prompt": "x"})
    (span,) = spans.ended
    assert span.status.status_code.name == "ERROR"
    assert dict(span.attributes or {})["error.type"] == "out_of_memory"


async def test_the_span_ends_when_the_caller_leaves(traced: Caller, fleet: ScriptedFleet, spans: Spans) -> None:
    fleet.script = steps(3600.0)
    leave = asyncio.Event()
    call = asyncio.create_task(
        traced.call("POST", "/generate", b'{"prompt": "x"}', {"content-type": "application/json"}, leave)
    )
    await fleet.reached_waits(1)
    assert spans.ended == []
    leave.set()
    await call
    assert len(spans.ended) == 1


async def test_a_caller_that_keeps_no_trace_gets_none(traced: Caller, fleet: ScriptedFleet, spans: Spans) -> None:
    await traced.post("/generate", {"prompt": "x"}, {"traceparent": CALLER[:-1] + "0"})
    assert spans.ended == []
    assert fleet.commands[0].trace["traceparent"].startswith(CALLER[:36])


async def test_without_an_endpoint_the_context_goes_through_as_it_is(fleet: ScriptedFleet) -> None:
    assert isinstance(open_tracing("x", None, 1.0), Untraced)
    async with running(fleet) as caller:
        await caller.post("/generate", {"prompt": "x"}, {"traceparent": CALLER})
    assert fleet.commands[0].trace == {"traceparent": CALLER}


@pytest.mark.parametrize("module", ["api", "worker"])
def test_a_process_that_is_to_trace_without_the_extra_says_so_and_does_not_start(module: str) -> None:
    program = f"""
import sys
sys.modules["opentelemetry.sdk"] = None
from {module}.process import main
sys.exit(main(["--otlp-endpoint", "http://127.0.0.1:4318"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "diffleet[otel]" in done.stderr and "Traceback" not in done.stderr


def test_without_an_endpoint_nothing_of_the_extra_is_loaded() -> None:
    program = (
        "import sys, api.app, worker.bridge; from shared.tracing import open_tracing; open_tracing('x', None, 1.0)"
    )
    program += "; print('opentelemetry.sdk' in sys.modules, 'shared.opentelemetry' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["False", "False"]
