"""One step's work as plain data: rows, their query ranges, and how far each query position sees.

One rule serves every attention family: a row has a query range, and each query position has a *visible end*: it attends
to all positions before that end. The keys and values of the query range are written to pages first, then attended.
"""

from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass
from typing import Protocol

from shared.commands import Sampling
from shared.decoding import Decoding
from worker.models.spec import Attention

Edit = tuple[int, float, float]
"""(token id, divisor, shift): its logit z becomes z / divisor where positive, z * divisor elsewhere, plus the shift."""

UNDECIDED = -1


class Scores(Protocol):
    """What the model says of the undecided positions of one canvas, for whoever fills it by other rules.

    Positions are indexes of the canvas; only wanted ones have scores.
    """

    def best(self, index: int) -> int:
        """Return the token that the model proposes without any rule."""
        ...

    def best_of(self, index: int, allowed: bytes) -> tuple[int, float] | None:
        """Return the token that it proposes among the allowed, and that token's share of their probability.

        allowed has a byte for each token id, 0 for those that may not come; None if there is none that may.
        """
        ...

    def share(self, index: int, token_id: int, allowed: bytes) -> float:
        """Return the token's share of the probability of the allowed ones."""
        ...

    def probability(self, index: int, token_id: int) -> float:
        """Return the model's own probability of the token."""
        ...


@dataclass(slots=True)
class Fill:
    """Proposals that may be accepted together, in any selection: there is a valid text that holds all of them."""

    tokens: list[int]
    """[block]"""
    confidence: list[float]
    """[block]"""
    open: list[bool]
    """[block]: wanted positions that may be accepted."""
    end: int | None = None
    """Where the text ends by a stop token; it may be accepted if nothing before it is left undecided."""
    forced: ReadOnly[bool] = ()
    """[block]: what stands before it in the text leaves no other choice; empty: nowhere."""


class Guard(Protocol):
    """Keeps one request's text to its constraint; see `worker.constraints`."""

    @property
    def accepts(self) -> bool:
        """The text so far is whole: it may end here."""
        ...

    @property
    def finished(self) -> bool:
        """The text is whole, and nothing may follow it."""
        ...

    def push(self, token_id: int) -> None:
        """The next position is decided."""
        ...

    def fill(self, canvas: "Guarded", wanted: ReadOnly[bool], scores: Scores) -> Fill:
        """Propose tokens for the wanted positions of a block; raises `DeadEnd`."""
        ...


class DeadEnd(Exception):
    """No token of the vocabulary can follow, or the grammar costs more than it may."""


@dataclass(frozen=True, slots=True)
class Guarded:
    """What a guard must know of a canvas."""

    guard: Guard
    frontier: int
    """Index of the first position that has not been pushed."""
    tokens: tuple[int, ...]
    """[block length]: `UNDECIDED` where masked."""
    room: int
    """Positions that the request may still produce, from the frontier on."""
    may_stop: bool
    """False while the request's least number of tokens is not reached; a whole text ends all the same."""


@dataclass(frozen=True, slots=True)
class Canvas:
    """The part of a row that is decided this step.

    `masked[i]` tells whether the i-th position from `start` is undecided and wanted. Positions at or behind the
    request's limit are masked in the input but not listed here: nobody waits for them.
    """

    start: int
    """Absolute position of the block's first token."""
    masked: tuple[bool, ...]
    """[block length]"""
    step: int
    """Denoise steps already spent in this block."""
    last: bool
    """Fill everything now: the request's budget of forwards ends with this step."""
    sampling: Sampling
    decoding: Decoding
    stop_token_ids: tuple[int, ...]
    """Empty if the request ignores them."""
    shift: int = 0
    """Position p is proposed by the row's position p - shift; the first of a window has none before it: by its own."""
    seed: bool = False
    """The row commits the block before `start`, and its last position proposes the first token: the one that is masked
    here is taken as it comes."""
    editable: tuple[bool, ...] = ()
    """[block length] or empty: decided positions whose token may be revised (token editing)."""
    undecided_at_first: int = 0
    """How many positions were masked when the block was opened: what schedules divide."""
    forbidden: tuple[int, ...] = ()
    """Token ids that may not be produced in this step, beyond the model's own."""
    limit: int = 0
    """First position that the request does not want, in this block or a later one."""
    block_length: int = 0
    """Where blocks end on a canvas of several; 0: it is one."""
    before: tuple[int, ...] = ()
    """Tokens of the block before; empty where there is none."""
    tests_draft: bool = False
    """What is masked is proposed only to see whether it is what the request's draft has there."""
    edits: tuple[Edit, ...] = ()
    logprobs: int | None = None
    """Report log-probabilities, and so many most probable tokens beside."""
    guarded: Guarded | None = None
    """Proposals come from the request's guard."""


@dataclass(frozen=True, slots=True)
class Guide:
    """The row's query range once more with the prompt masked, on pages of its own: classifier-free guidance.

    Logits become guide + (scale + 1) * (row - guide) (LLaDA, arXiv 2502.09992, appendix).
    """

    token_ids: tuple[int, ...]
    pages: tuple[int, ...]
    scale: float


@dataclass(frozen=True, slots=True)
class Row:
    """One request's share of a step: query positions [start, start + len(token_ids)), in the order of storage."""

    request_id: str
    start: int
    token_ids: tuple[int, ...]
    """Input ids of the query range; the mask id where undecided."""
    visible_end: tuple[int, ...]
    """For each query position: it sees positions [0, visible_end)."""
    pages: tuple[int, ...]
    """Page numbers of positions 0.. in order; they cover every visible position."""
    canvas: Canvas | None
    """None: the row only writes KV (a chunk of a long prompt)."""
    positions: tuple[int, ...] | None = None
    """For each query the position that its token has in the text, where that is not its place of storage."""
    near: tuple[tuple[int, int], ...] | None = None
    """For each query the positions [start, end) that layers with a sliding window see."""
    guide: Guide | None = None
    pooled: bool = False
    """The sum over the query positions' hidden states is wanted."""
    lora: tuple[tuple[str, float], ...] = ()
    """(digest, scale) of the adapters that all its positions run under."""

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Plan:
    rows: tuple[Row, ...]
    running: frozenset[str] = frozenset()
    """Ids of all requests that are under way, also of those that sit this step out."""

    @property
    def tokens(self) -> int:
        """Query tokens of the whole step."""
        return sum(len(row.token_ids) * (1 if row.guide is None else 2) for row in self.rows)


def visible_end(attention: Attention, position: int, block_length: int, canvas_end: int, origin: int = 0) -> int:
    """Return the first position that the query at `position` does not see.

    Blocks begin at `origin`; what lies before it counts as one block.
    """
    match attention:
        case Attention.CAUSAL:
            return position + 1
        case Attention.BLOCK_CAUSAL:
            if position < origin:
                return origin
            return origin + ((position - origin) // block_length + 1) * block_length
        case Attention.BIDIRECTIONAL:
            return canvas_end


def visible_ends(
    attention: Attention, start: int, end: int, block_length: int, canvas_end: int, origin: int = 0
) -> tuple[int, ...]:
    """Return `visible_end` for each position of [start, end)."""
    return tuple(visible_end(attention, position, block_length, canvas_end, origin) for position in range(start, end))


def near_view(attention: Attention, position: int, window: int, block_start: int, canvas_end: int) -> tuple[int, int]:
    """Return the positions [start, end) that the query at `position` sees in a layer with a sliding window.

    Causally the last `window` positions, its own included. A canvas sees all of itself, and the `window` - 1 positions
    before it (DiffusionGemma). With the whole text in view, `window` // 2 positions on either side (ModernBERT).
    """
    match attention:
        case Attention.CAUSAL:
            return max(0, position + 1 - window), position + 1
        case Attention.BLOCK_CAUSAL:
            return max(0, block_start + 1 - window), canvas_end
        case Attention.BIDIRECTIONAL:
            return max(0, position - window // 2), min(canvas_end, position + window // 2 + 1)


def chunk_end(start: int, end: int, block_length: int, budget: int) -> int:
    """Return how far a query range [start, end) may reach within `budget` tokens.

    A cut falls on a block boundary, so that a block's keys are written by one forward (block-causal positions see the
    whole of their block). Returns `start` if not even one block fits.
    """
    if end - start <= budget:
        return end
    return max(start, (start + budget) // block_length * block_length)


def count_masked(masked: ReadOnly[bool]) -> int:
    return sum(masked)
