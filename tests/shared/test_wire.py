"""What travels: commands, events and workers' announcements survive the wire, and old readers meet new writers."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.commands import (
    Generate,
    InvalidCommand,
    Limits,
    Preview,
    Sampling,
    UnsupportedCommand,
    decode_command,
    encode_command,
)
from shared.decoding import EntropyBounded, LowConfidenceStatic, RandomOrder, Threshold
from shared.events import (
    Delta,
    Event,
    Failed,
    Finished,
    InvalidEvent,
    Queued,
    Snapshot,
    Started,
    Usage,
    decode_event,
    encode_event,
)
from shared.keys import Keys, model_of, new_request_id, partition_of, ulid
from shared.lora import ADAPTER_NAME
from shared.roster import WorkerInfo, pack_worker, unpack_worker
from shared.subscriber import is_preview

text = st.text(st.characters(exclude_categories=["Cs"]))
count = st.integers(0, 2**53)
tokens = st.lists(st.integers(0, 200_000), max_size=8)
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,95}", fullmatch=True)

events: st.SearchStrategy[Event] = st.one_of(
    st.builds(Queued, text),
    st.builds(Started, text, count, text),
    st.builds(Delta, text, count, count, count, count, tokens, text, count),
    st.builds(
        Snapshot,
        text,
        *[count] * 6,
        st.lists(st.none() | st.integers(0, 200_000), max_size=8),
        st.lists(st.floats(0, 1), max_size=8),
    ),
    st.builds(
        Finished,
        text,
        count,
        count,
        st.sampled_from(["stop", "length", "aborted"]),
        st.sampled_from(["stop_token", "max_tokens", "aborted"]),
        st.builds(Usage, count, count, count, count),
    ),
    st.builds(Failed, text, count, count, st.sampled_from(["nan", "internal", "poison"]), text, st.none() | text),
)

commands = st.builds(
    Generate,
    id=text,
    model=text,
    prompt=st.lists(st.integers(0, 200_000), min_size=1, max_size=8).map(tuple),
    sampling=st.builds(Sampling, temperature=st.floats(0, 5), seed=st.integers(0, 2**63 - 1)),
    limits=st.builds(
        Limits, max_tokens=st.integers(1, 10_000), stop=st.lists(text.filter(bool), max_size=3).map(tuple)
    ),
    decoding=st.none()
    | st.builds(Threshold, threshold=st.floats(0, 1))
    | st.builds(LowConfidenceStatic, steps=st.integers(1, 9))
    | st.builds(RandomOrder)
    | st.builds(EntropyBounded),
    preview=st.none() | st.builds(Preview, interval_ms=st.integers(0, 10_000)),
    lane=st.sampled_from(["rt", "std", "bulk"]),
    user=st.none() | text.filter(lambda user: len(user) <= 256),
    trace=st.dictionaries(text, text, max_size=2),
)


@given(events)
def test_an_event_survives_the_wire(event: Event) -> None:
    assert decode_event(encode_event(event)) == event


@given(events)
def test_a_preview_is_told_from_its_bytes_whatever_the_text_says(event: Event) -> None:
    assert is_preview(encode_event(event)) == isinstance(event, Started | Snapshot)


def test_text_that_quotes_a_preview_is_none() -> None:
    assert not is_preview(encode_event(Delta("r", 2, 1, 0, 0, [1], '"t":"snapshot"', 1)))


@given(events)
def test_fields_of_newer_writers_are_ignored(event: Event) -> None:
    newer = orjson.loads(encode_event(event)) | {"later": {"a": [1]}}
    assert decode_event(orjson.dumps(newer)) == event


@pytest.mark.parametrize("payload", [b"", b"{", b"[]", b'{"t":"later"}', b'{"t":"delta","id":"r"}'])
def test_what_is_no_event_is_refused(payload: bytes) -> None:
    with pytest.raises(InvalidEvent):
        decode_event(payload)


@given(commands)
def test_a_command_survives_the_wire(command: Generate) -> None:
    assert decode_command(encode_command(command)) == command


@given(commands)
def test_unknown_fields_of_a_command_are_ignored_unless_they_must_be_understood(command: Generate) -> None:
    envelope = orjson.loads(encode_command(command))
    envelope["body"]["later"] = 1
    assert decode_command(orjson.dumps(envelope)) == command
    envelope["must"] = ["prompt"]
    assert decode_command(orjson.dumps(envelope)) == command
    envelope["must"] = ["prompt", "later"]
    with pytest.raises(UnsupportedCommand, match="later"):
        decode_command(orjson.dumps(envelope))


@pytest.mark.parametrize("change", [{"v": 2}, {"kind": "embed"}])
def test_an_envelope_of_a_newer_kind_is_left_for_newer_workers(change: dict[str, object]) -> None:
    command = Generate(id="r", model="m", prompt=(1,))
    with pytest.raises(UnsupportedCommand):
        decode_command(orjson.dumps(orjson.loads(encode_command(command)) | change))


@pytest.mark.parametrize("payload", [b"", b"7", b"{}", b'{"v":1,"kind":"generate","must":[],"body":{"prompt":[]}}'])
def test_what_is_no_command_is_refused(payload: bytes) -> None:
    with pytest.raises(InvalidCommand):
        decode_command(payload)


@given(names, st.integers(0, 9999))
def test_an_id_carries_its_model_and_partition(model: str, number: int) -> None:
    request_id = new_request_id(model, number)
    assert model_of(request_id) == model
    assert partition_of(request_id) == f"{model}.{number}"
    assert Keys.of(request_id).request(request_id) == f"df:{{{model}.{number}}}:r:{request_id}"


@given(st.integers(0, 2**48 - 2))
def test_ids_sort_by_their_time(now_ms: int) -> None:
    assert ulid(now_ms) < ulid(now_ms + 1)


@given(
    st.builds(
        WorkerInfo,
        *[text] * 2,
        st.sampled_from(["loading", "ready", "draining"]),
        *[count] * 8,
        text,
        text,
        adapters=st.lists(st.from_regex(ADAPTER_NAME, fullmatch=True), max_size=3).map(tuple),
        adapter_digests=st.lists(st.from_regex(r"[0-9a-f]{64}", fullmatch=True), max_size=3).map(tuple),
    )
)
def test_an_announcement_survives_the_wire(info: WorkerInfo) -> None:
    fields = {name.encode(): str(value).encode() for name, value in pack_worker(info).items()}
    assert unpack_worker(fields) == info


def test_a_worker_that_has_gone_is_none() -> None:
    assert unpack_worker({}) is None
