"""The engine's boundary: what goes in and out of a step, and what it needs from the rest.

The engine knows no Redis, no clock, no thread: it takes an `Inbox`, runs one forward through `Forward`, and returns an
`Outbox`. Who owns the engine decides how these travel.
"""

from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass, field
from typing import Protocol, Self

from shared.commands import Generate
from shared.events import Event, TokenLogprob
from worker.engine.plan import Plan


@dataclass(frozen=True, slots=True)
class Resume:
    """What is already committed and published of a request that another worker began."""

    token_ids: tuple[int, ...] = ()
    """Produced tokens of the committed blocks."""
    text_length: int = 0
    """Characters of text already published."""
    seq: int = 1
    """The last durable sequence number; 1 is the `queued` event of the submit."""
    block: int = 0
    """Committed blocks."""
    nfe: int = 0
    block_length: int | None = None
    """What a worker has chosen for it; None: nothing was chosen."""


@dataclass(frozen=True, slots=True)
class Arrival:
    request: Generate
    epoch: int
    resume: Resume = Resume()


@dataclass(slots=True)
class Inbox:
    """Commands since the last step."""

    arrivals: list[Arrival] = field(default_factory=list[Arrival])
    aborts: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """(request id, reason): the request ends with a terminal event."""
    drops: list[str] = field(default_factory=list[str])
    """Requests that this worker no longer owns (fenced): they leave without an event."""
    hurries: list[str] = field(default_factory=list[str])
    """Requests whose time is up: what is left of their block is filled by one more forward, and they end."""
    returns: list[str] = field(default_factory=list[str])
    """Requests to give back at their next block boundary; the others stay."""
    flush: bool = False
    """Forget the texts whose pages others could share."""
    hand_back: bool = False
    """Stop admitting, and give back every request at its next block boundary."""


@dataclass(slots=True)
class Outbox:
    """What one step produced, in order."""

    events: list[Event] = field(default_factory=list[Event])
    handed_back: list[str] = field(default_factory=list[str])
    """Requests given back: their committed blocks are in the log, their pages are free."""


@dataclass(frozen=True, slots=True)
class Load:
    """A look at the engine, for admission, metrics and tests."""

    running: int
    waiting: int
    free_pages: int
    total_pages: int
    steps: int
    preemptions: int = 0
    cached_tokens: int = 0
    """Tokens so far that were not prefilled because their keys were there."""


@dataclass(frozen=True, slots=True)
class RowDecision:
    """What a step decided of one row; [block] each."""

    accepted: ReadOnly[bool]
    tokens: ReadOnly[int]
    confidence: ReadOnly[float]
    logprobs: ReadOnly[TokenLogprob | None] = ()
    """Empty for a row that asks for none."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What a step decided, on the host: plain lists, one entry for each row of the plan."""

    accepted: list[list[bool]]
    """[rows][block]: positions that get their token now."""
    tokens: list[list[int]]
    """[rows][block]: the proposals."""
    confidence: list[list[float]]
    """[rows][block]"""
    failed: list[str | None]
    """[rows]: why a row cannot be decided (NaN in its logits), or None."""
    pooled: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    """[hidden] for each pooled row of the plan."""
    dead_ends: dict[int, str] = field(default_factory=dict[int, str])
    """Rows whose constraint leaves no token, with the reason."""
    postponed: dict[int, int | None] = field(default_factory=dict[int, int | None])
    """Rows with a canvas that are not decided by this step and have to be asked for again, each with the position up to
    which its keys have been written; None: nothing has been run for it."""
    logprobs: dict[int, list[TokenLogprob | None]] = field(default_factory=dict[int, list[TokenLogprob | None]])
    """Row to [block]: of the proposals, for rows that ask for them."""

    @classmethod
    def open(cls, rows: int) -> Self:
        """Return one in which nothing is decided yet."""
        return cls([[]] * rows, [[]] * rows, [[]] * rows, [None] * rows)

    def of_row(self, row: int) -> RowDecision:
        return RowDecision(self.accepted[row], self.tokens[row], self.confidence[row], self.logprobs.get(row, ()))


class DeviceFull(Exception):
    """The device has no memory for this plan; a smaller one may fit. Nothing was decided."""


class Forward(Protocol):
    """Run one plan and decide: the injected owner of the tensors. Raises `DeviceFull`."""

    def __call__(self, plan: Plan) -> Decision:
        """Write KV for every row's query range, then decide the rows that want logits, unless they are postponed.

        Row i of the decision belongs to row i of the plan; rows without logits are all False.
        """
        ...


class TextDecoder(Protocol):
    """Turn produced token ids into text that never has to be taken back."""

    def push(self, token_ids: ReadOnly[int]) -> str:
        """Feed tokens; return the text that became certain."""
        ...

    def flush(self) -> str:
        """Return what was held back; the stream has ended."""
        ...

    @property
    def stopped(self) -> bool:
        """True once a stop string was seen; `push` returns nothing after it."""
        ...
