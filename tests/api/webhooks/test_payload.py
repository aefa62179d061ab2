import json
from typing import Any

import orjson
import pytest

from api.responses.output import Output
from api.webhooks.cuts import was_cut
from api.webhooks.payload import Unreadable, message_id, render
from shared.client import Result, UnknownRequest
from shared.events import Delta, Failed, Finished, Usage, encode_event
from shared.keys import model_of, new_request_id
from shared.webhooks import Recipient, Taken

ID = new_request_id("org/demo")
USAGE = Usage(10, 20, 5, 2, cached_tokens=4)
URL = "https://a.example/"


def said(end: bytes, **to: Any) -> Any:
    recipient = Recipient(url=URL, **to)
    subject: str = to["name"] if to.get("kind") == "batch" else ID
    message = Taken(subject, recipient, end, 1_700_000_000_123, 1)
    assert render(message) == render(message)
    return json.loads(render(message))


@pytest.mark.parametrize(
    ("end", "kind", "status"),
    [
        (Finished(ID, 3, 1, "stop", "stop_token", USAGE), "request", "completed"),
        (Finished(ID, 3, 1, "length", "max_tokens", USAGE), "request", "completed"),
        (Finished(ID, 3, 1, "aborted", "aborted", USAGE), "request", "cancelled"),
        (Failed(ID, 3, 1, "expired", "the deadline passed"), "request", "failed"),
        (Finished(ID, 3, 1, "stop", "stop_token", USAGE), "response", "completed"),
        (Finished(ID, 3, 1, "length", "max_tokens", USAGE), "response", "incomplete"),
        (Finished(ID, 3, 1, "aborted", "aborted", USAGE), "response", "cancelled"),
        (Failed(ID, 3, 1, "poison", "gave up"), "response", "failed"),
    ],
)
def test_every_end_has_a_type_and_says_what_it_cost(end: Finished | Failed, kind: Any, status: str) -> None:
    event = said(encode_event(end), kind=kind, name="resp_1" if kind == "response" else None, choice=2)
    assert event["type"] == f"{kind}.{status}" and event["object"] == "event"
    assert event["timestamp"] == "2023-11-14T22:13:20.123Z" and event["created_at"] == 1_700_000_000
    data = event["data"]
    assert data["id"] == ("resp_1" if kind == "response" else ID) and data["request_id"] == ID
    assert (data["model"], data["status"], data["choice"]) == ("org/demo", status, 2)
    if isinstance(end, Failed):
        assert data["error"] == {"code": end.code, "message": end.message, "param": None}
    else:
        assert data["error"] is None and data["usage"]["total_tokens"] == 30


@pytest.mark.parametrize("kind", ["request", "response"])
def test_the_model_is_told_by_the_name_that_was_asked_for(kind: str) -> None:
    end = encode_event(Finished(ID, 3, 1, "stop", "stop_token", USAGE))
    told = [said(end, kind=kind, model=model)["data"]["model"] for model in (None, "org/demo:fox")]
    assert told == ["org/demo", "org/demo:fox"]


def test_a_batch_tells_its_counts_and_files() -> None:
    facts = {"status": "completed", "request_counts": {"total": 2, "completed": 2, "failed": 0}}
    event = said(orjson.dumps(facts), kind="batch", name="batch_01ARZ3NDEKTSV4RRFFQ69G5FAV")
    assert event["type"] == "batch.completed" and event["id"] == "evt_01ARZ3NDEKTSV4RRFFQ69G5FAV"
    assert event["data"]["request_counts"]["total"] == 2


def test_an_embedding_is_an_answer_and_is_not_told() -> None:
    end = Finished(ID, 3, 1, "stop", "embedded", USAGE, embedding="AAAA")
    assert "AAAA" not in json.dumps(said(encode_event(end)))


@pytest.mark.parametrize("end", [b"", b"{}", encode_event(Delta(ID, 2, 1, 0, 0, [1], "secret", 1))])
def test_what_is_no_end_is_not_told(end: bytes) -> None:
    with pytest.raises(Unreadable):
        render(Taken(ID, Recipient(url=URL), end, 0, 1))


def test_an_id_has_no_full_stop_which_parts_what_is_signed() -> None:
    assert "." not in message_id(new_request_id("a.b/c-1.5"))


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "calls", "status"),
    [
        (CALL, True, "completed"),
        (CALL[: CALL.index(": 1")], True, "incomplete"),
        (CALL[:20], True, "incomplete"),
        (CALL[:20], False, "completed"),
        (None, True, "completed"),
    ],
)
async def test_a_response_that_ended_within_a_call_is_told_as_its_reader_sees_it(
    text: str | None, calls: bool, status: str
) -> None:
    end = Finished(ID, 3, 1, "stop", "stop_string", USAGE)

    async def look(request_id: str) -> Result:
        if text is None:
            raise UnknownRequest(request_id)
        return Result(request_id, "done", model_of(request_id), text, [], end)

    message = Taken(ID, Recipient(url=URL, kind="response", name="resp_1", calls=calls), encode_event(end), 1, 1)
    told = json.loads(render(message, await was_cut(message, look)))
    assert (told["type"], told["data"]["status"]) == (f"response.{status}", status)
    if text is not None:
        output = Output("x", calls, None)
        list(output.push(Delta(ID, 2, 1, 0, 0, [], text, 1)))
        list(output.end(end))
        assert output.status(end) == status
