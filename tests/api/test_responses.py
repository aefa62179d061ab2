"""What can be proved of responses without a fleet: numbering is a function of the durable events."""

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from api.responses.shape import EventWriter
from api.responses.store import Record
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
