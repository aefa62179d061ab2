"""C34 to C39: files, batches, responses, tokens, metrics."""

import json
import math
import re
import signal
import time
from collections.abc import Sequence
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types import Batch
from openai.types.responses import Response
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel
from redis import Redis

from tests.conformance.conftest import IDLE, client_of
from tests.conformance.fleet import MODEL, LiveFleet
from tests.fleet.processes import until

ASK: Any = [{"role": "user", "content": "What is 12 + 30?"}]
ENDED = ("completed", "failed", "expired", "cancelled")


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def line(custom_id: str, content: str = "What is 1 + 2?", **body: Any) -> dict[str, Any]:
    given = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 12} | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": given}


def submit(client: OpenAI, rows: Sequence[object], endpoint: Any = "/v1/chat/completions", **options: Any) -> Batch:
    content = b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows)
    file = client.files.create(file=("lines.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **options)


def end_of(client: OpenAI, batch: Batch) -> Batch:
    def look() -> Batch | None:
        now = client.batches.retrieve(batch.id)
        return now if now.status in ENDED else None

    found = until(look, "the batch has ended")
    assert found is not None
    return found


def rows_of(client: OpenAI, file_id: str | None) -> list[Any]:
    return [] if file_id is None else [json.loads(row) for row in client.files.content(file_id).text.splitlines()]


def test_c34_files_are_stored_listed_read_and_deleted(client: OpenAI, http: httpx.Client, fleet: LiveFleet) -> None:
    content = bytes(range(256)) * 8192
    first = client.files.create(file=("a b.bin", content), purpose="user_data")
    second = client.files.create(
        file=("b.jsonl", b"{}"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert (first.bytes, first.filename, first.status) == (len(content), "a b.bin", "processed")
    assert second.expires_at == second.created_at + 3600
    with client_of(fleet.other.url) as other:
        assert other.files.content(first.id).read() == content
    listed = [file.id for file in client.files.list(limit=1)]
    assert {first.id, second.id} <= set(listed) and listed.index(second.id) < listed.index(first.id)
    assert http.get("/v1/files", params={"limit": 1}).json()["has_more"] is True
    assert {file.purpose for file in client.files.list(purpose="batch")} == {"batch"}
    assert client.files.delete(first.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(first.id)
    wrong: list[tuple[dict[str, str], str]] = [
        ({"purpose": "fun"}, "purpose"),
        ({}, "purpose"),
        ({"purpose": "batch", "expires_after[anchor]": "created_at"}, "expires_after.seconds"),
        (
            {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "5"},
            "expires_after.seconds",
        ),
    ]
    for form, param in wrong:
        response = http.post("/v1/files", data=form, files={"file": ("x", b"x")})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert http.post("/v1/files", data={"purpose": "batch"}, files={"other": ("x", b"x")}).status_code == 400
    # The limit of this server is 32 MiB, unless it is told otherwise.
    too_long = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("x", b"x" * (32 * 2**20 + 1))})
    assert (too_long.status_code, too_long.json()["error"]["code"]) == (413, "file_too_large")


def test_c35_a_batch_runs_to_its_end_beside_bad_lines(client: OpenAI) -> None:
    rows = [line(f"good-{number}") for number in range(12)]
    rows += [line("bad-model", model="nope"), line("bad-value", temperature=-1), line("streamed", stream=True)]
    batch = submit(client, rows, metadata={"who": "me"})
    assert (batch.status, batch.metadata) == ("validating", {"who": "me"})
    ended = end_of(client, batch)
    assert ended.status == "completed" and ended.completed_at and ended.request_counts
    counts = ended.request_counts
    assert (counts.total, counts.completed, counts.failed) == (15, 12, 3)
    good, bad = rows_of(client, ended.output_file_id), rows_of(client, ended.error_file_id)
    assert [row["custom_id"] for row in good] == [f"good-{number}" for number in range(12)]
    assert all(row["response"]["body"]["choices"][0]["message"]["content"] for row in good)
    assert {row["custom_id"]: row["response"]["status_code"] for row in bad} == {
        "bad-model": 404,
        "bad-value": 400,
        "streamed": 400,
    }
    # openai 1 has no type for this.
    usage: Any = ended.to_dict()["usage"]
    assert usage["output_tokens"] == sum(row["response"]["body"]["usage"]["completion_tokens"] for row in good)
    assert batch.id in {listed.id for listed in client.batches.list(limit=2)}
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


def test_c35_a_batch_of_embeddings_has_the_vectors_of_single_calls(client: OpenAI) -> None:
    inputs: list[Any] = ["What is 1 + 2?", ["One", "Two", "Three"], [5, 6, 7], ["more"] * 40]
    rows: list[Any] = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/embeddings", "body": {"model": MODEL, "input": given}}
        for number, given in enumerate(inputs)
    ]
    rows[0]["body"] |= {"encoding_format": "base64", "dimensions": 8}
    rows.append({"custom_id": "bad", "method": "POST", "url": "/v1/embeddings", "body": {"model": MODEL, "input": []}})
    ended = end_of(client, submit(client, rows, "/v1/embeddings"))
    assert ended.status == "completed" and ended.request_counts
    assert (ended.request_counts.completed, ended.request_counts.failed) == (4, 1)
    good = [row["response"]["body"] for row in rows_of(client, ended.output_file_id)]
    (bad,) = rows_of(client, ended.error_file_id)
    assert bad["response"]["body"]["error"]["param"] == "input"
    assert [len(body["data"]) for body in good] == [1, 3, 1, 40]
    for body, given in zip(good[1:], inputs[1:], strict=True):
        single = client.embeddings.create(model=MODEL, input=given, encoding_format="float")
        for item, other in zip(body["data"], single.data, strict=True):
            assert item["embedding"] == pytest.approx(other.embedding, abs=1e-5)
    packed = client.embeddings.create(model=MODEL, input=inputs[0], dimensions=8).data[0].embedding
    assert len(packed) == 8 and isinstance(good[0]["data"][0]["embedding"], str)
    usage: Any = ended.to_dict()["usage"]
    assert usage["output_tokens"] == 0
    assert usage["input_tokens"] == sum(body["usage"]["prompt_tokens"] for body in good) > 0


def test_c35_a_batch_of_responses_says_what_single_calls_say(client: OpenAI) -> None:
    given: list[Any] = [{"input": "What is 1 + 2?"}, {"input": [{"role": "user", "content": "What is 12 + 30?"}]}]
    given += [{"input": "x", "background": True}, {"input": "x", "previous_response_id": "resp_1"}]
    rows = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/responses",
            "body": {"model": MODEL, "max_output_tokens": 12, "temperature": 0} | body,
        }
        for number, body in enumerate(given)
    ]
    ended = end_of(client, submit(client, rows, "/v1/responses"))
    assert ended.status == "completed"
    good = [row["response"]["body"] for row in rows_of(client, ended.output_file_id)]
    assert [body["object"] for body in good] == ["response", "response"]
    for body, asked in zip(good, given, strict=False):
        single = client.responses.create(model=MODEL, max_output_tokens=12, temperature=0, **asked)
        assert body["output"][0]["content"][0]["text"] == single.output_text != ""
        assert body["status"] == single.status and body["store"] is False
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(body["id"])
    bad = [row["response"]["body"]["error"]["param"] for row in rows_of(client, ended.error_file_id)]
    assert bad == ["background", "previous_response_id"]
    usage: Any = ended.to_dict()["usage"]
    assert usage["input_tokens"] == sum(body["usage"]["input_tokens"] for body in good) > 0
    assert usage["output_tokens"] == sum(body["usage"]["output_tokens"] for body in good) > 0


def test_c35_a_file_that_is_no_batch_fails_with_the_lines_at_fault(client: OpenAI) -> None:
    rows = [line("a"), b"{nonsense", line("a"), line("b") | {"url": "/v1/other"}, {"custom_id": "c", "method": "POST"}]
    ended = end_of(client, submit(client, rows))
    assert ended.status == "failed" and ended.errors and ended.errors.data
    assert [(error.line, error.code) for error in ended.errors.data] == [
        (2, "invalid_json_line"),
        (3, "duplicate_custom_id"),
        (4, "mismatched_url"),
        (5, "missing_required_parameter"),
    ]
    file = client.files.create(file=("x", b"x"), purpose="user_data")
    for wrong in (file.id, "file-nope"):
        with pytest.raises(openai.APIStatusError) as caught:
            client.batches.create(input_file_id=wrong, endpoint="/v1/chat/completions", completion_window="24h")
        assert caught.value.status_code in (400, 404)


def test_c35_a_cancelled_batch_keeps_what_it_has(client: OpenAI, redis: Redis) -> None:
    batch = submit(client, [line("done"), line("waits", model=IDLE)])
    until(lambda: (counts := client.batches.retrieve(batch.id).request_counts) and counts.completed == 1, "one is done")
    assert client.batches.cancel(batch.id).status == "cancelling"
    ended = end_of(client, batch)
    assert ended.status == "cancelled" and ended.cancelled_at and ended.request_counts
    assert (ended.request_counts.total, ended.request_counts.completed, ended.request_counts.failed) == (2, 1, 0)
    assert [row["custom_id"] for row in rows_of(client, ended.output_file_id)] == ["done"]
    assert [row["error"]["code"] for row in rows_of(client, ended.error_file_id)] == ["batch_cancelled"]
    until(lambda: redis.xlen(f"df:{{{IDLE}.0}}:q:bulk") == 0, "its request has left the queue")


def test_c35_a_batch_that_is_cancelled_before_anything_ran_tells_every_line(client: OpenAI, fleet: LiveFleet) -> None:
    fleet.jobs.send(signal.SIGKILL)
    batch = submit(client, [line("a"), line("b")])
    assert client.batches.cancel(batch.id).status == "cancelling"
    fleet.start_jobs()
    ended = end_of(client, batch)
    assert ended.status == "cancelled" and ended.output_file_id is None and ended.request_counts
    assert (ended.request_counts.total, ended.request_counts.completed, ended.request_counts.failed) == (2, 0, 0)
    told = {row["custom_id"]: row["error"]["code"] for row in rows_of(client, ended.error_file_id)}
    assert told == {"a": "batch_cancelled", "b": "batch_cancelled"}


def test_c35_a_batch_goes_on_after_a_restart_of_the_jobs_and_submits_nothing_twice(
    client: OpenAI, fleet: LiveFleet, redis: Redis
) -> None:
    fleet.jobs.send(signal.SIGKILL)
    fleet.start_jobs("--batch-concurrency", "2")
    slow: Any = {"max_tokens": 120, "ignore_eos": True, "diffusion": {"strategy": "sequential"}}
    total = 12
    batch = submit(client, [line(str(number), **slow) for number in range(total)])
    until(
        lambda: (counts := client.batches.retrieve(batch.id).request_counts) and counts.completed > 1, "it is under way"
    )
    fleet.jobs.send(signal.SIGKILL)
    interrupted = client.batches.retrieve(batch.id)
    assert interrupted.status == "in_progress"
    fleet.start_jobs()
    ended = end_of(client, batch)
    assert ended.status == "completed" and ended.request_counts and ended.request_counts.completed == total
    rows = rows_of(client, ended.output_file_id)
    assert [row["custom_id"] for row in rows] == [str(number) for number in range(total)]
    bodies = [row["response"]["body"] for row in rows]
    assert len({body["id"] for body in bodies}) == total
    assert all(body["usage"]["completion_tokens"] == 120 for body in bodies)
    attempts = [
        redis.hget(f"df:{{{MODEL}.0}}:r:r_{MODEL}.0_{body['id'].removeprefix('chatcmpl-')}", "att") for body in bodies
    ]
    assert attempts == [b"1"] * total


def test_c36_a_response_has_its_events_in_order(client: OpenAI) -> None:
    options: Any = {"model": MODEL, "input": "What is 12 + 30?", "extra_body": {"seed": 1}}
    whole = client.responses.create(**options)
    assert whole.status == "completed" and whole.usage
    Response.model_validate(whole.model_dump())
    events = list(client.responses.create(stream=True, **options))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:5] == [
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert set(kinds[5:-4]) == {"response.output_text.delta"}
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    with client.responses.stream(**options) as helper:
        assert helper.get_final_response().output_text == whole.output_text
    cut = client.responses.create(model=MODEL, input="Tell me a story.", max_output_tokens=16)
    assert cut.status == "incomplete" and cut.incomplete_details
    assert cut.incomplete_details.reason == "max_output_tokens"


def test_c36_a_background_response_is_resumed_at_every_number_through_any_front(
    client: OpenAI, fleet: LiveFleet
) -> None:
    begun = client.responses.create(model=MODEL, input="Tell me a story.", background=True)
    assert begun.status == "queued"
    with client_of(fleet.other.url) as other:
        done = ("completed", "incomplete")
        until(lambda: other.responses.retrieve(begun.id).status in done, "the response has ended")
        ended = other.responses.retrieve(begun.id)
        assert ended.output_text
        whole = list(other.responses.retrieve(begun.id, stream=True))
        for number in range(-1, len(whole)):
            rest = list(client.responses.retrieve(begun.id, stream=True, starting_after=number))
            assert rest == whole[number + 1 :]
        # The helper replays from the start and passes over what was seen.
        with other.responses.stream(response_id=begun.id, starting_after=4) as helper:
            assert next(iter(helper)).sequence_number == 5
            assert helper.get_final_response().output_text == ended.output_text


class Sum(BaseModel):
    total: int


def test_c36_a_response_follows_a_schema(client: OpenAI, http: httpx.Client) -> None:
    options: Any = {"model": MODEL, "input": "What is 12 + 30?", "max_output_tokens": 32}
    parsed = client.responses.parse(text_format=Sum, **options)
    assert parsed.status == "completed" and isinstance(parsed.output_parsed, Sum)
    assert parsed.text and parsed.text.format and parsed.text.format.type == "json_schema"
    with client.responses.stream(text_format=Sum, **options) as helper:
        assert isinstance(helper.get_final_response().output_parsed, Sum)
    body = {"model": MODEL, "input": "x", "text": {"format": {"type": "json_schema", "schema": {"type": "objekt"}}}}
    response = http.post("/v1/responses", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "text.format.schema")


FROG = "A frog sat on a leaf. " * 4
LEAP: Any = {
    "type": "function",
    "name": "leap",
    "description": "Leap so far.",
    "parameters": {
        "type": "object",
        "properties": {"far": {"type": "integer"}, "from": {"const": FROG}},
        "required": ["far", "from"],
        "additionalProperties": False,
    },
    "strict": True,
}


def test_c36_a_response_calls_functions_and_is_told_their_results(client: OpenAI) -> None:
    options: Any = {"model": MODEL, "input": "Leap!", "tools": [LEAP], "tool_choice": "required", "temperature": 0}
    whole = client.responses.create(**options)
    Response.model_validate(whole.model_dump())
    assert whole.status == "completed"
    calls = [item for item in whole.output if item.type == "function_call"]
    assert calls == whole.output and all(call.name == "leap" for call in calls)
    assert len({call.call_id for call in calls}) == len(calls)
    with client.responses.stream(**options) as helper:
        events = list(helper)
        final = helper.get_final_response()
    pieces: dict[int, str] = {}
    for event in events:
        if event.type == "response.function_call_arguments.delta":
            pieces[event.output_index] = pieces.get(event.output_index, "") + event.delta
    arguments = [call.arguments for call in calls]
    assert list(pieces.values()) == [item.arguments for item in final.output if item.type == "function_call"]
    assert list(pieces.values()) == arguments
    assert all(json.loads(text)["from"] == FROG for text in arguments)
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [event.arguments for event in done] == arguments
    # The results go back either with everything before them, or behind the response that wanted them.
    results: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "3 m"} for call in calls]
    told: Any = [
        {"role": "user", "content": "Leap!"},
        *[call.model_dump(exclude_none=True) for call in calls],
        *results,
    ]
    short = {"model": MODEL, "tools": [LEAP], "max_output_tokens": 32}
    again = client.responses.create(input=told, **short)
    behind = client.responses.create(input=results, previous_response_id=whole.id, **short)
    assert again.usage and behind.usage and again.usage.input_tokens == behind.usage.input_tokens
    items = client.responses.input_items.list(behind.id).data
    assert [item.type for item in items] == ["function_call_output"] * len(calls) and all(item.id for item in items)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(input=results, **short)
    assert refused.value.param == "input[0].call_id"


def test_c36_calls_of_a_background_response_are_resumed_at_every_number_through_any_front(
    client: OpenAI, fleet: LiveFleet
) -> None:
    options: Any = {"model": MODEL, "input": "Leap!", "tools": [LEAP], "tool_choice": "required", "background": True}
    begun = client.responses.create(**options)
    with client_of(fleet.other.url) as other:
        # Followed while it runs, and told again when it has ended.
        live = list(other.responses.retrieve(begun.id, stream=True))
        ended = other.responses.retrieve(begun.id)
        assert ended.status == "completed" and ended.output[0].type == "function_call"
        whole = list(other.responses.retrieve(begun.id, stream=True))
        assert live == whole
        assert sum(event.type == "response.function_call_arguments.delta" for event in whole) > 1
        for number in range(-1, len(whole)):
            rest = list(client.responses.retrieve(begun.id, stream=True, starting_after=number))
            assert rest == whole[number + 1 :]
        with other.responses.stream(response_id=begun.id, starting_after=4) as helper:
            assert next(iter(helper)).sequence_number == 5
            assert helper.get_final_response().output[0].to_dict().items() >= ended.output[0].to_dict().items()


def test_c36_a_response_tells_logprobs_whole_streamed_and_later_through_another_front(
    client: OpenAI, fleet: LiveFleet
) -> None:
    options: Any = {"model": MODEL, "input": "What is 12 + 30?", "temperature": 0, "top_logprobs": 2}
    whole = client.responses.create(include=["message.output_text.logprobs"], **options)
    Response.model_validate(whole.model_dump())
    (message,) = whole.output
    assert message.type == "message" and message.content[0].type == "output_text"
    logprobs = message.content[0].logprobs or []
    assert b"".join(bytes(entry.bytes) for entry in logprobs).decode() == whole.output_text
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in logprobs)
    with client_of(fleet.other.url) as other:
        assert other.responses.retrieve(whole.id).output == whole.output
        events = list(other.responses.retrieve(whole.id, stream=True))
    streamed = [
        entry.token for event in events if event.type == "response.output_text.delta" for entry in event.logprobs
    ]
    assert streamed == [entry.token for entry in logprobs]


def test_c36_a_background_stream_goes_on_without_its_reader(client: OpenAI, fleet: LiveFleet) -> None:
    stream = client.responses.create(
        model=MODEL, input="Tell me a story.", background=True, stream=True, extra_body={"ignore_eos": True}
    )
    first = next(iter(stream))
    assert first.type == "response.created"
    stream.close()
    with client_of(fleet.other.url) as other:
        rest = list(other.responses.retrieve(first.response.id, stream=True, starting_after=0))
    assert rest[0].sequence_number == 1 and rest[-1].type == "response.incomplete"


def test_c36_a_number_that_no_event_has_had_is_refused_and_behind_the_last_one_nothing_comes(
    client: OpenAI, fleet: LiveFleet
) -> None:
    waiting = client.responses.create(model=IDLE, input="x", background=True)
    ended = client.responses.create(model=MODEL, input="What is 12 + 30?", max_output_tokens=12)
    last = list(client.responses.retrieve(ended.id, stream=True))[-1].sequence_number
    with client_of(fleet.other.url) as other:
        for response, highest in ((waiting, 2), (ended, last)):
            with pytest.raises(openai.BadRequestError, match=f"at most {highest}") as refused:
                other.responses.retrieve(response.id, stream=True, starting_after=highest + 1)
            assert refused.value.param == "starting_after"
        rest = other.responses.with_raw_response.retrieve(
            ended.id, extra_query={"stream": "true", "starting_after": str(last)}
        )
        assert (rest.status_code, rest.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert rest.content == b""
    client.responses.cancel(waiting.id)


def test_c36_a_response_tells_when_it_was_completed_however_it_is_read(client: OpenAI, fleet: LiveFleet) -> None:
    before = int(time.time())
    ended = client.responses.create(model=MODEL, input="What is 12 + 30?")
    assert ended.status == "completed"
    at: Any = ended.to_dict()["completed_at"]
    assert before <= ended.created_at <= at <= time.time()
    with client_of(fleet.other.url) as other:
        assert other.responses.retrieve(ended.id).to_dict()["completed_at"] == at
        events: list[Any] = list(other.responses.retrieve(ended.id, stream=True))
    assert events[-1].response.to_dict()["completed_at"] == at
    assert events[0].response.to_dict()["completed_at"] is None
    cut = client.responses.create(model=MODEL, input="Tell me a story.", max_output_tokens=2)
    assert (cut.status, cut.to_dict()["completed_at"]) == ("incomplete", None)


def test_c36_responses_are_cancelled_continued_listed_and_deleted(client: OpenAI, http: httpx.Client) -> None:
    waiting = client.responses.create(model=IDLE, input="hi", background=True)
    assert client.responses.cancel(waiting.id).status == "cancelled"
    assert client.responses.retrieve(waiting.id).status == "cancelled"
    first = client.responses.create(model=MODEL, input="My name is Ann.", instructions="Be brief.")
    second = client.responses.create(model=MODEL, input="What is my name?", previous_response_id=first.id)
    assert first.usage and second.usage and second.previous_response_id == first.id
    asked: Any = {"model": MODEL, "input": "What is my name?", "previous_response_id": first.id}
    if hasattr(client.responses, "input_tokens"):
        count = client.responses.input_tokens.count(**asked).input_tokens
    else:  # openai 1
        counted: Any = client.post("/responses/input_tokens", body=asked, cast_to=object)
        count = counted["input_tokens"]
    assert count == second.usage.input_tokens
    (item,) = client.responses.input_items.list(second.id)
    assert item.type == "message" and item.id
    client.responses.delete(first.id)
    for gone in (first.id, "resp_nope"):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone)
    unstored = client.responses.create(model=MODEL, input="hi", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)
    for wrong, param in (
        ({"background": True, "store": False}, "store"),
        ({"input": []}, "input"),
        ({"input": [{"type": "function_call_output"}]}, "input[0].call_id"),
        ({"previous_response_id": "resp_nope"}, "previous_response_id"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"truncation": "later"}, "truncation"),
        ({"truncation": "auto", "input": "hi " * 5000}, "input"),
    ):
        error = http.post("/v1/responses", json={"model": MODEL, "input": "hi"} | wrong).json()["error"]
        assert error["param"] == param


def test_c37_embeddings_are_unit_vectors_equal_in_both_encodings(client: OpenAI, http: httpx.Client) -> None:
    texts = ["What is 12 + 30?", "What is 13 + 30?", "The frog sat on a leaf."]
    # The client asks for base64 unless told otherwise.
    packed = client.embeddings.create(model=MODEL, input=texts)
    plain = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    ids = [http.post("/tokenize", json={"model": MODEL, "prompt": text}).json()["tokens"] for text in texts]
    by_ids = client.embeddings.create(model=MODEL, input=ids)
    vectors = [item.embedding for item in packed.data]
    assert [item.index for item in packed.data] == [0, 1, 2]
    for item, other, third in zip(packed.data, plain.data, by_ids.data, strict=True):
        assert item.embedding == pytest.approx(other.embedding, abs=1e-6)
        assert item.embedding == pytest.approx(third.embedding, abs=1e-5)
        assert _dot(item.embedding, item.embedding) == pytest.approx(1.0, abs=1e-5)
    assert packed.usage.prompt_tokens == packed.usage.total_tokens == sum(map(len, ids))
    # Two sums are more alike than a sum and a story.
    assert _dot(vectors[0], vectors[1]) > _dot(vectors[0], vectors[2])

    short = client.embeddings.create(model=MODEL, input=texts[0], dimensions=8).data[0].embedding
    length = math.sqrt(_dot(vectors[0][:8], vectors[0][:8]))
    assert short == pytest.approx([value / length for value in vectors[0][:8]], abs=1e-5)


def test_c37_what_embeddings_cannot_do_is_named(http: httpx.Client) -> None:
    for wrong, param in (
        ({"input": []}, "input"),
        ({"input": [""]}, "input"),
        ({"input": ["a", []]}, "input"),
        ({"input": "a", "dimensions": 100_000}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": [[1, 10**9], [1]]}, "input[0][1]"),
        ({"input": "a " * 5000}, "input"),
        ({"input": "a", "model": "nobody"}, "model"),
    ):
        answer = http.post("/v1/embeddings", json={"model": MODEL} | wrong)
        assert answer.status_code == (404 if param == "model" else 400), answer.text
        assert answer.json()["error"]["param"] == param


def test_c38_tokens_go_there_and_back_and_count_as_usage(client: OpenAI, http: httpx.Client) -> None:
    for text in ("What is 12 + 30?", "🎉 漢字\n\ttabs", "<|im_start|>"):
        ids = http.post("/tokenize", json={"model": MODEL, "prompt": text}).json()
        assert ids["count"] == len(ids["tokens"])
        assert http.post("/detokenize", json={"model": MODEL, "tokens": ids["tokens"]}).json()["prompt"] == text
        usage = client.completions.create(model=MODEL, prompt=text, max_tokens=1).usage
        assert usage and usage.prompt_tokens == ids["count"]
    chat = http.post("/tokenize", json={"model": MODEL, "messages": ASK}).json()["count"]
    usage = client.chat.completions.create(model=MODEL, messages=ASK).usage
    assert usage and usage.prompt_tokens == chat
    wrong = http.post("/detokenize", json={"model": MODEL, "tokens": [10**9]})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tokens[0]")


def test_c39_metrics_count_a_known_load(fleet: LiveFleet) -> None:
    known = {"route", "method", "status", "model", "model_name", "lane", "detail", "code", "le", "finished_reason"}
    known |= {"outcome"}

    def read(http: httpx.Client) -> dict[str, float]:
        families = text_string_to_metric_families(http.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples]
        assert all(set(sample.labels) <= known for sample in samples)
        totals: dict[str, float] = {}
        for sample in samples:
            totals[sample.name] = totals.get(sample.name, 0) + sample.value
        return totals

    front = fleet.start_front().wait_live()
    with httpx.Client(base_url=front.url, timeout=60) as http:
        usages = [
            http.post(
                "/generate", json={"model": MODEL, "prompt": "x", "max_tokens": 20, "ignore_eos": True, "user": "eve"}
            ).json()["usage"]
            for _ in range(5)
        ]
        totals = read(http)
    for name, field in (
        ("vllm:prompt_tokens_total", "prompt_tokens"),
        ("vllm:generation_tokens_total", "completion_tokens"),
        ("vllm:diffusion_num_committed_tokens_total", "completion_tokens"),
        ("vllm:diffusion_num_denoising_steps_total", "nfe"),
        ("diffleet_denoising_forwards_total", "nfe"),
        ("diffleet_completion_tokens_total", "completion_tokens"),
    ):
        assert totals[name] == sum(usage[field] for usage in usages)
    assert totals["vllm:diffusion_num_canvas_positions_total"] == 16 * sum(usage["blocks"] for usage in usages)
    assert totals["vllm:request_success_total"] == totals["vllm:e2e_request_latency_seconds_count"] == 5
    front.end()


TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/generate", {"prompt": "Once"}),
        ("/v1/completions", {"prompt": "Once", "n": 2}),
        ("/v1/chat/completions", {"messages": ASK}),
        ("/v1/chat/completions", {"messages": ASK, "tools": [TOOL], "tool_choice": "required", "max_tokens": 64}),
        ("/v1/responses", {"input": "What is 12 + 30?", "max_output_tokens": 16}),
        ("/v1/responses", {"input": "What is 12 + 30?", "max_output_tokens": 16, "store": False}),
    ],
)
def test_a_call_that_is_repeated_under_its_key_has_the_same_ids(
    http: httpx.Client, path: str, fields: dict[str, Any], stream: bool
) -> None:
    key = {"Idempotency-Key": f"{path} {stream} {sorted(fields)}".replace(" ", "-")}
    body = {"model": MODEL, "max_tokens": 16, "temperature": 1.5, "stream": stream} | fields
    first, second = (http.post(path, json=body, headers=key) for _ in range(2))
    assert (first.status_code, second.status_code) == (200, 200), second.text
    ids = [re.findall(r'"(?:id|call_id|response_id)":"([^"]+)"', answer.text) for answer in (first, second)]
    assert set(ids[0]) == set(ids[1]) and ids[0]
    # What they name is there.
    for name in set(ids[1]):
        if name.startswith("r_"):
            assert http.get(f"/generate/{name}").json()["state"] == "done"
        if name.startswith("resp_"):
            found = http.get(f"/v1/responses/{name}")
            assert found.status_code == (404 if fields.get("store") is False else 200)
            assert found.status_code == 404 or found.json()["status"] in ("completed", "incomplete")


def test_a_background_response_that_is_asked_for_again_under_its_key_is_the_same(http: httpx.Client) -> None:
    body = {"model": MODEL, "input": "Tell me a story.", "max_output_tokens": 24, "background": True}
    first, second = (
        http.post("/v1/responses", json=body, headers={"Idempotency-Key": "background-1"}).json() for _ in range(2)
    )
    assert first["id"] == second["id"] and first["created_at"] == second["created_at"]

    def ended() -> bool:
        return http.get(f"/v1/responses/{first['id']}").json()["status"] in ("completed", "incomplete")

    until(ended, "the response has ended")
