"""Server-sent events read back as they were written, however the network cuts them."""

from collections.abc import AsyncIterator

from hypothesis import given
from hypothesis import strategies as st

from shared.cli.sse import sse_data


async def read(stream: bytes, cuts: list[int] | None = None) -> list[bytes]:
    async def chunks() -> AsyncIterator[bytes]:
        edges = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts or [])})
        for start, end in zip(edges, edges[1:], strict=False):
            yield stream[start:end]

    return [data async for data in sse_data(chunks())]


async def test_comments_and_other_fields_are_passed_over() -> None:
    assert await read(b": keepalive\n\nevent: x\nid: 3\ndata: one\n\ndata:two\n\n") == [b"one", b"two"]


async def test_data_lines_of_one_event_are_joined() -> None:
    assert await read(b"data: a\ndata:  b\n\n") == [b"a\n b"]


async def test_an_event_that_was_cut_off_is_not_delivered() -> None:
    assert await read(b"data: whole\n\ndata: half") == [b"whole"]


payload = st.text(st.characters(blacklist_characters="\r\n", blacklist_categories=["Cs"])).map(str.encode)


@given(
    payloads=st.lists(payload, max_size=6),
    cuts=st.lists(st.integers(0, 500), max_size=12),
    end=st.sampled_from([b"\n", b"\r\n", b"\r"]),
)
async def test_what_was_sent_arrives_whatever_the_cuts_and_the_line_ends(
    payloads: list[bytes], cuts: list[int], end: bytes
) -> None:
    stream = b"".join(b"data: " + item + end + end for item in payloads)
    assert await read(stream, cuts) == payloads
