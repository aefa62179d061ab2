"""What rank 0 tells the others, and how it travels: one JSON array a message, its length before it.

Each message is one call on the device; ranks that do all of them in order stay equal. Nothing in it can run code.
"""

import socket
from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass, fields
from typing import Any, Literal

import orjson

from worker.batch import Batch


@dataclass(frozen=True, slots=True)
class Start:
    """The first message: who the rank is, and what it loads."""

    rank: int
    size: int
    meeting: str
    """File by which the ranks find each other."""
    folder: str
    device: str
    dtype: str
    threads: int
    weights: str
    head: str
    log_level: str
    log_format: Literal["json", "text"]


@dataclass(frozen=True, slots=True)
class MakePages:
    """Make pages; those that were there are gone. Facts of the model that rank 0 may have changed come with it."""

    num_pages: int
    page_size: int
    text_vocab_size: int
    mask_token_id: int
    never_sampled: ReadOnly[int]
    filler_ids: ReadOnly[int]
    in_8_bits: bool


@dataclass(frozen=True, slots=True)
class Join:
    """Give the logits of hidden states of the last batch."""

    places: ReadOnly[int]


@dataclass(frozen=True, slots=True)
class Propose:
    """Take part in the statistics of the last batch's hidden states [first, end)."""

    first: int
    end: int
    entropy: bool
    margin: bool
    temperature: ReadOnly[float] | None
    ranking: ReadOnly[float] | None
    forbidden: tuple[ReadOnly[int], ReadOnly[int]] | None
    noise: tuple[ReadOnly[int] | None, ReadOnly[int], ReadOnly[int], ReadOnly[int]] | None
    """Rows (None: all), seeds, positions, steps."""


@dataclass(frozen=True, slots=True)
class Graphs:
    """Make captured steps over the pages."""

    number: int
    """0: those that were there are gone; else how many there are, of other block lengths."""
    layout: dict[str, Any]
    """Fields of `kernels.canvas.Layout`."""
    max_rows: int


@dataclass(frozen=True, slots=True)
class OnGraphs:
    """Call a method of captured steps."""

    number: int
    """Of which."""
    method: str
    arguments: ReadOnly[Any]


@dataclass(frozen=True, slots=True)
class Least:
    """Take part in finding the least of a number that each rank has."""

    what: str


@dataclass(frozen=True, slots=True)
class End:
    """Leave; nothing follows."""


Message = Start | MakePages | Batch | Join | Propose | Graphs | OnGraphs | Least | End
_KINDS: dict[str, type[Message]] = {
    kind.__name__: kind for kind in (Start, MakePages, Batch, Join, Propose, Graphs, OnGraphs, Least, End)
}


class BrokenMessage(Exception):
    """What came is no message."""


def encode(message: Message) -> bytes:
    return orjson.dumps([type(message).__name__, *(getattr(message, column.name) for column in fields(message))])


def decode(content: bytes) -> Message:
    """Raises `BrokenMessage`."""
    try:
        name, *values = orjson.loads(content)
        return _KINDS[name](*values)
    except (ValueError, KeyError, TypeError) as error:
        raise BrokenMessage(f"{len(content)} bytes are no message of rank 0") from error


class Channel:
    """One end of a stream of messages."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._stream = end.makefile("rb")

    def send(self, message: Message) -> None:
        """Raises `OSError` if nobody is at the other end."""
        content = encode(message)
        self.socket.sendall(len(content).to_bytes(4, "little") + content)

    def receive(self) -> Message | None:
        """Return the next message; None if the other end is closed. Raises `BrokenMessage`."""
        head = self._stream.read(4)
        if len(head) < 4:
            return None
        size = int.from_bytes(head, "little")
        content = self._stream.read(size)
        return decode(content) if len(content) == size else None

    def close(self) -> None:
        self._stream.close()
        self.socket.close()
