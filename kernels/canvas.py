"""A batch that decodes by itself: the state of its rows in one tensor, what the next forward asks, and how it moves on.

A row has an active block of which some positions are masked. A step proposes tokens for them, accepts some, and once
none is masked opens the next block. The finished block's keys must be written from its final tokens. That is done
either by the next block's first forward, which then asks for both blocks (`paired`: every step does, and rewrites the
same keys in later ones), or by a pass of its own (`not paired`), which decides nothing. The state is the same for both,
so any step may be the one or the other.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor


class Rule(IntEnum):
    """How a row accepts; see `worker.decoding`."""

    THRESHOLD = 0
    STATIC = 1
    DYNAMIC = 2
    DYNAMIC_LEFTMOST = 3
    SEQUENTIAL = 4


class Field(IntEnum):
    """Columns of the state before its lists. Flags are 0 or 1."""

    LIVE = 0
    """Rows that are not live are padding: they write to the scratch page and decide nothing."""
    START = 1
    """Absolute position of the block's first token, a multiple of the block's length unless `END` is given."""
    LIMIT = 2
    """First position that nobody wants."""
    STEP = 3
    COMMIT = 4
    """The block before is not written yet: a step that is not paired does that, and no more."""
    RULE = 5
    THRESHOLD = 6
    """Bits of a float32."""
    STEPS = 7
    """0: one position a step."""
    FILLER_RULES = 8
    DRAWS = 9
    """Tokens are drawn, by SEED; else the most probable one is proposed."""
    SEED = 10
    TEMPERATURE = 11
    """Bits of a float32; 0 stands for 1."""
    END = 12
    """What the block's positions see ends here; 0: with the block. Such a row asks for its block alone, wherever that
    begins."""


@dataclass(frozen=True, slots=True)
class Layout:
    """State is int64 [rows, width]: the fields, then tokens, masks, the block before, and page numbers."""

    block: int
    pages: int
    page_size: int
    scratch: int
    """Number of the page for writes that nobody reads, also behind a row's last page."""
    paired: bool

    @property
    def width(self) -> int:
        return len(Field) + 3 * self.block + self.pages

    def part(self, number: int) -> slice:
        first = len(Field) + number * self.block
        return slice(first, first + self.block)

    @property
    def tokens(self) -> slice:
        return self.part(0)

    @property
    def masked(self) -> slice:
        return self.part(1)

    @property
    def before(self) -> slice:
        return self.part(2)

    @property
    def table(self) -> slice:
        return slice(len(Field) + 3 * self.block, self.width)

    @property
    def query(self) -> int:
        """Query positions of a row."""
        return 2 * self.block if self.paired else self.block


@dataclass(frozen=True, slots=True)
class Query:
    """What a forward asks for."""

    token_ids: Tensor
    """[rows * query] int64"""
    positions: Tensor
    """[rows * query] int64"""
    slots: Tensor
    """[rows * query] int64"""
    visible_end: Tensor
    """[rows * query] int32"""
    page_table: Tensor
    """[rows, pages] int32"""


def canvas_query(state: Tensor, layout: Layout) -> Query:
    """Return the query positions of every row: its active block, the block before, or both (paired)."""
    rows, block = state.shape[0], layout.block
    start, live = state[:, Field.START], state[:, Field.LIVE] != 0
    position = torch.arange(-block if layout.paired else 0, block, device=state.device) + start[:, None]
    ids = state[:, layout.tokens]
    if layout.paired:
        ids = torch.cat((state[:, layout.before], ids), 1)
    else:
        committing = state[:, Field.COMMIT, None] != 0
        position = torch.where(committing, position - block, position)
        ids = torch.where(committing, state[:, layout.before], ids)
    bound = state[:, Field.END, None]
    real = live[:, None] & (position >= 0) & ((bound == 0) | (position >= start[:, None]))
    position = torch.where(real, position, 0)
    table = state[:, layout.table]
    slots = table.gather(1, position // layout.page_size) * layout.page_size + position % layout.page_size
    ends = torch.where(bound > 0, bound, (position // block + 1) * block)
    ends = torch.where(real, ends, 1)
    return Query(
        token_ids=torch.where(real, ids, 0).reshape(-1),
        positions=position.reshape(-1),
        slots=torch.where(real, slots, layout.scratch * layout.page_size).reshape(-1),
        visible_end=ends.int().view(rows * layout.query),
        page_table=table.int(),
    )


def canvas_advance(
    state: Tensor, layout: Layout, token: Tensor, confidence: Tensor, finite: Tensor, filler_ids: Tensor, mask_id: int
) -> Tensor:
    """Accept, move every row on in place, and return what was decided: [rows, 3, block] int32.

    token, confidence and finite [rows * block] are proposals for the active blocks, filler_ids [n] int64. The answer's
    planes are: 1 for accepted, 2 where the logits were not finite; the tokens; the bits of the confidences. A row that
    is not finite is no longer live.
    """
    rows, block = state.shape[0], layout.block
    token, confidence = token.view(rows, block), confidence.view(rows, block)
    deciding = state[:, Field.LIVE] != 0
    if not layout.paired:
        deciding = deciding & (state[:, Field.COMMIT] == 0)
    masked = (state[:, layout.masked] != 0) & deciding[:, None]
    broken = masked & ~finite.view(rows, block)
    fails = broken.any(-1, keepdim=True)
    accepted = _accept(state, masked, token, confidence, filler_ids) & ~fails
    flags = accepted.int() + 2 * broken.int()
    answer = torch.stack((flags, token.int(), confidence.view(torch.int32)), 1)

    tokens = torch.where(accepted, token, state[:, layout.tokens])
    left = masked & ~accepted
    done = deciding & ~left.any(-1) & ~fails[:, 0]
    start = torch.where(done, state[:, Field.START] + block, state[:, Field.START])
    within = torch.arange(block, device=state.device)
    fresh = start[:, None] + within < state[:, Field.LIMIT, None]
    kept = torch.where(deciding[:, None], left, state[:, layout.masked] != 0)
    state[:, layout.before] = torch.where(done[:, None], tokens, state[:, layout.before])
    state[:, layout.tokens] = torch.where(done[:, None], mask_id, tokens)
    state[:, layout.masked] = torch.where(done[:, None], fresh, kept).long()
    state[:, Field.STEP] = torch.where(done, 0, state[:, Field.STEP] + deciding)
    state[:, Field.COMMIT] = done.long()
    state[:, Field.LIVE] *= (~fails[:, 0] & (start < state[:, Field.LIMIT])).long()
    state[:, Field.START] = start
    return answer


def _accept(state: Tensor, masked: Tensor, token: Tensor, confidence: Tensor, filler_ids: Tensor) -> Tensor:
    block = masked.shape[1]
    rule = state[:, Field.RULE, None]
    ruled = (state[:, Field.FILLER_RULES, None] != 0) & (rule != Rule.SEQUENTIAL)
    others = masked & ~(torch.isin(token, filler_ids) & ruled)
    view = torch.where(others.any(-1, keepdim=True), others, masked)

    steps = state[:, Field.STEPS, None]
    steps = torch.where(steps > 0, steps, block)
    count = (block // steps + (state[:, Field.STEP, None] < block % steps)).clamp(min=1)
    tau = state[:, Field.THRESHOLD].int().view(torch.float32)[:, None]

    place = torch.arange(block, device=state.device)
    mine, theirs = confidence[:, :, None], confidence[:, None, :]
    ahead = (theirs > mine) | ((theirs == mine) & (place[None, :] < place[:, None]))
    rank = (ahead & view[:, None, :]).sum(-1)
    best = view & (rank == 0)
    quota = view & (rank < count)
    leftmost = view & (view.cumsum(-1) <= count)
    first = masked.int().argmax(-1, keepdim=True)
    window = view & (place >= first) & (place < first + count)
    sure = view & (confidence > tau)
    enough = sure.sum(-1, keepdim=True) >= count

    accepted = (view & (confidence >= tau)) | best
    accepted = torch.where(rule == Rule.STATIC, quota, accepted)
    accepted = torch.where(rule == Rule.DYNAMIC, torch.where(enough, sure, quota), accepted)
    accepted = torch.where(rule == Rule.DYNAMIC_LEFTMOST, torch.where(enough, sure, leftmost), accepted)
    accepted = torch.where(rule == Rule.SEQUENTIAL, window, accepted)
    return torch.where(accepted.any(-1, keepdim=True), accepted, best)
