"""The span of a claim in the worker."""

from shared.commands import Generate
from shared.events import Finished
from shared.tracing import Untraced
from tests.tracing_for_tests import Spans, traceparent
from tests.worker.queue_for_tests import QueueForTests
from tests.worker.test_bridge import delta, finished, generate, running, until

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def traced_request() -> Generate:
    return generate().model_copy(update={"trace": {"traceparent": PARENT}})


def test_a_claim_is_a_span_below_the_front_s_with_an_event_for_each_block() -> None:
    queue, spans, request = QueueForTests(), Spans(), traced_request()
    queue.submit(request)
    with running(queue, tracing=spans.tracing) as desk:
        desk.arrivals(1)
        desk.say(delta(request.id, 0), delta(request.id, 1), finished(request.id, 4))
        until(lambda: len(spans.ended) == 1)
    (span,) = spans.ended
    assert span.kind.name == "SERVER"
    assert span.parent is not None and f"{span.parent.span_id:016x}" in PARENT
    assert traceparent(span).split("-")[1] in PARENT
    assert [event.name for event in span.events] == ["block", "block"]
    found = dict(span.attributes or {})
    assert found["diffleet.worker"] == "w1" and found["diffleet.epoch"] == 1
    assert found["gen_ai.response.finish_reasons"] == ("stop",)
    assert span.status.status_code.name == "UNSET"


def test_a_request_that_was_lost_or_handed_back_ends_its_span_too() -> None:
    queue, spans = QueueForTests(), Spans()
    lost, back = traced_request(), traced_request()
    for request in (lost, back):
        queue.submit(request)
    with running(queue, tracing=spans.tracing) as desk:
        desk.arrivals(2)
        queue.requests[lost.id].epoch = 2
        desk.say(delta(lost.id, 0), handed_back=(back.id,))
        until(lambda: len(spans.ended) == 2)
    by_id = {dict(span.attributes or {})["gen_ai.response.id"]: span for span in spans.ended}
    assert dict(by_id[lost.id].attributes or {})["error.type"] == "fenced"
    assert [event.name for event in by_id[back.id].events] == ["handed_back"]


def test_without_tracing_nothing_is_made_of_it() -> None:
    queue, request = QueueForTests(), traced_request()
    queue.submit(request)
    with running(queue, tracing=Untraced()) as desk:
        desk.arrivals(1)
        desk.say(finished(request.id, 2))
        until(lambda: isinstance(queue.requests[request.id].terminal, Finished))
