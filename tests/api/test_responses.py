"""What can be proved of responses without a fleet: numbering is a function of the durable events."""

import itertools
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from api.errors import ApiError
from api.responses.shape import EventWriter, last_number, output_of, response_object
from api.responses.store import Record
from shared.client import Result
from shared.events import Delta, Event, Failed, Finished, Queued, Started, Usage

RECORD = Record("resp_1", "r_m.0_1", "m", 5, 3, True, True, (), (), {})


def told(events: list[Event]) -> list[dict[str, Any]]:
    writer = EventWriter(RECORD)
    return [*writer.begin(), *itertools.chain.from_iterable(writer.of(event) for event in events)]


def durable(texts: list[str], end: Finished | Failed) -> list[Event]:
    deltas = [Delta("r", seq, 1, seq - 2, seq, [seq], text, seq) for seq, text in enumerate(texts, 2)]
    return [Queued("r"), *deltas, end]


ENDS = st.sampled_from(
    [
        Finished("r", 9, 1, "stop", "stop_token", Usage(3, 4, 2, 1)),
        Finished("r", 9, 1, "length", "max_tokens", Usage(3, 4, 2, 1)),
        Finished("r", 9, 1, "aborted", "aborted", Usage(3, 0, 0, 0)),
        Failed("r", 9, 1, "lost", "gone"),
    ]
)


@given(st.lists(st.sampled_from(["", "a", "bc"]), max_size=5), ENDS, st.booleans())
def test_previews_change_no_number(texts: list[str], end: Finished | Failed, seen: bool) -> None:
    events = durable(texts, end)
    with_preview: list[Event] = [events[0], Started("r", 1, "w"), *events[1:]] if seen else events
    assert told(with_preview) == told(events)
    numbers = [event["sequence_number"] for event in told(events)]
    assert numbers == list(range(len(numbers)))


@given(st.lists(st.sampled_from(["", "a", "bc"]), max_size=5), ENDS)
def test_every_stream_ends_with_its_response_once(texts: list[str], end: Finished | Failed) -> None:
    events = told(durable(texts, end))
    last = [
        event for event in events if event["type"] in ("response.completed", "response.incomplete", "response.failed")
    ]
    assert last == [events[-1]]
    response = events[-1]["response"]
    deltas = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    if response["output"]:
        assert response["output"][0]["content"][0]["text"] == deltas
    assert response["status"] in ("completed", "incomplete", "cancelled", "failed")
    assert (response["error"] is None) == isinstance(end, Finished)


@given(st.lists(st.sampled_from(["", "a", "bc"]), max_size=5), ENDS, st.data())
def test_no_event_of_what_has_come_so_far_has_a_higher_number_than_the_last(
    texts: list[str], end: Finished | Failed, data: st.DataObject
) -> None:
    events = durable(texts, end)
    so_far = events[: data.draw(st.integers(1, len(events)))]
    deltas = [event for event in so_far if isinstance(event, Delta)]
    result = Result("r", "running", "m", "", [], end if end in so_far else None, deltas)
    # It may be told that the response is in progress while the log does not say so yet.
    seen = told([so_far[0], Started("r", 1, "w"), *so_far[1:]])
    assert last_number(RECORD, None, result) == seen[-1]["sequence_number"]


@given(st.lists(st.sampled_from(["a", "bc"]), max_size=5), ENDS, st.data())
def test_who_resumes_behind_a_stream_that_broke_off_misses_nothing(
    texts: list[str], end: Finished | Failed, data: st.DataObject
) -> None:
    events = durable(texts, end)
    whole = told(events)
    writer = EventWriter(RECORD)
    seen = [*writer.begin()]
    for event in events[: data.draw(st.integers(0, len(events)))]:
        seen += writer.of(event)
    broken = writer.error(ApiError(503, "server_is_overloaded", "the server shuts down"))
    behind = [event for event in whole if event["sequence_number"] > broken["sequence_number"]]
    assert seen + behind == whole


@given(ENDS, st.integers(0, 2**41), st.integers(0, 2**31))
def test_only_a_completed_response_tells_when_and_never_a_time_before_it_was_created(
    end: Finished | Failed, ended_ms: int, created: int
) -> None:
    record = replace(RECORD, created_at=created)
    stamped = replace(end, ended_ms=ended_ms) if isinstance(end, Finished) else end
    status = output_of(record, None).status(stamped)
    at = response_object(record, status, None, stamped)["completed_at"]
    if status == "completed" and ended_ms:
        assert at == max(created, ended_ms // 1000)
    else:
        assert at is None
