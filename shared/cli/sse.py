"""Server-sent events as the api sends them: the data of each event, from raw bytes."""

from collections.abc import AsyncIterable, AsyncIterator


async def sse_data(chunks: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """Yield the data of each event, its lines joined by a newline; comments and other fields are passed over.

    Lines end with LF, CR LF or CR (HTML standard, section 9.2.6), and with nothing else: a text may hold U+2028.
    An event that the stream's end cuts off is not delivered.
    """
    pending = b""
    lines: list[bytes] = []
    async for chunk in chunks:
        pending += chunk
        complete, pending = _split_lines(pending)
        for line in complete:
            if line.startswith(b"data:"):
                lines.append(line[5:].removeprefix(b" "))
            elif not line and lines:
                yield b"\n".join(lines)
                lines = []
    if pending == b"\r" and lines:
        yield b"\n".join(lines)


def _split_lines(text: bytes) -> tuple[list[bytes], bytes]:
    """Return the complete lines and the rest; a CR at the end stays in the rest, since an LF may follow."""
    held = b""
    if text.endswith(b"\r"):
        text, held = text[:-1], b"\r"
    lines = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    return lines[:-1], lines[-1] + held
