"""A batch that decodes by itself: the state of its rows in one tensor, what the next forward asks, and how it moves on.

A row has an active block of which some positions are masked. A step proposes tokens for them, accepts some, and once
none is masked opens the next block. The finished block's keys must then be written from its final tokens. That is what
a step's *slots* are for: one more block of positions each, so that the finished block is written and the next one
decided by the same forward. The first rows that need a slot get one. A row that finds none writes its block by its own
positions, and decides nothing in this step.

A step also has *room* for so many masked positions. The first rows whose masked positions find room are decided; the
others stay as they are, but for a finished block, which has been written all the same.
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
    """The block before is not written yet."""
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
    MISSING = 13
    """How many positions are masked."""
    ADAPTER = 14
    """One more than the place of the row's adapter; 0: none."""
    SCALE = 15
    """Bits of a float32: the adapter's."""


@dataclass(frozen=True, slots=True)
class Layout:
    """State is int64 [rows, width]: the fields, then tokens, masks, the block before, and page numbers."""

    block: int
    pages: int
    page_size: int
    scratch: int
    """Number of the page for writes that nobody reads, also behind a row's last page."""

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


@dataclass(frozen=True, slots=True)
class Query:
    """What a forward asks for: a block of positions for each row, and one for each slot.

    A slot that is taken stands before its row's own block, so that one pass over the row's keys serves both. Behind all
    rows come the slots that nobody takes, each by itself.
    """

    token_ids: Tensor
    """[(rows + slots) * block] int64"""
    positions: Tensor
    """[(rows + slots) * block] int64"""
    slots: Tensor
    """[(rows + slots) * block] int64: where keys are written, in pages; nothing to do with a step's slots."""
    visible_end: Tensor
    """[(rows + slots) * block] int32"""
    page_table: Tensor
    """[rows + slots, pages] int32: of the rows, then of the slots that stand by themselves."""
    offsets: Tensor
    """[rows + slots + 1] int32: where the positions of each row begin, and of each slot that stands by itself; others
    have none."""
    own: Tensor
    """[rows * block] int64: where the rows' own blocks stand."""
    decides: Tensor
    """[rows] int32: 1 for rows whose positions are those of their active block."""
    owners: Tensor
    """[rows + slots] int32: the row that each block of positions belongs to, in their order."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The masked positions that a step proposes for, in order of their rows, and how their tokens are drawn."""

    sources: Tensor
    """[room] int64: position among the rows' own, [rows * block]; 0 behind the last."""
    places: Tensor
    """[rows * block] int32: proposal of each position; 0 where there is none."""
    decides: Tensor
    """[rows] int32: 1 for rows that decide and found room."""
    temperature: Tensor
    """[room] float32"""
    draws: Tensor
    """[4, room] int64: whether the token is drawn, seed, absolute position, step."""


def canvas_query(state: Tensor, layout: Layout, slots: int) -> Query:
    """Return the query positions of every row and of every slot. Slots that nobody takes write to the scratch page."""
    rows, block = state.shape[0], layout.block
    live = state[:, Field.LIVE] != 0
    waiting = live & (state[:, Field.COMMIT] != 0)
    order = waiting.cumsum(0)
    alone = waiting & (order > slots)
    taken = waiting & ~alone
    count = taken.cumsum(0)
    used = int(count[-1])
    numbers, unused = torch.arange(rows, device=state.device), torch.arange(used, slots, device=state.device)
    places = numbers + count
    who = torch.zeros(rows + slots, dtype=torch.int64, device=state.device)
    who[places], who[places[taken] - 1] = numbers, numbers[taken]
    behind, real = torch.zeros_like(who, dtype=torch.bool), torch.zeros_like(who, dtype=torch.bool)
    behind[places], behind[places[taken] - 1], behind[rows + unused] = alone, True, True
    real[places], real[places[taken] - 1] = live, True
    behind, real = behind[:, None], real[:, None]
    each = torch.arange(slots + 1, device=state.device).clamp(min=used)
    begins = torch.cat((places - taken.long(), rows + each))

    asked = state[who]
    start, bound = asked[:, Field.START, None], asked[:, Field.END, None]
    position = torch.arange(block, device=state.device) + start - behind * block
    ids = torch.where(behind, asked[:, layout.before], asked[:, layout.tokens])
    real = real & (position >= 0) & ((bound == 0) | (position >= start))
    position = torch.where(real, position, 0)
    table = asked[:, layout.table]
    written = table.gather(1, position // layout.page_size) * layout.page_size + position % layout.page_size
    ends = torch.where(bound > 0, bound, (position // block + 1) * block)
    return Query(
        token_ids=torch.where(real, ids, 0).reshape(-1),
        positions=position.reshape(-1),
        slots=torch.where(real, written, layout.scratch * layout.page_size).reshape(-1),
        visible_end=torch.where(real, ends, 1).int().view(-1),
        page_table=torch.cat((state[:, layout.table], state[:1, layout.table].expand(slots, -1))).int(),
        offsets=(begins * block).int(),
        own=(places[:, None] * block + torch.arange(block, device=state.device)).view(-1),
        decides=(live & ~alone).int(),
        owners=who.int(),
    )


def canvas_wanted(state: Tensor, layout: Layout, decides: Tensor, room: int) -> Wanted:
    """Give room to the masked positions of the first rows that decide; `decides` is that of the step's query."""
    rows, block = state.shape[0], layout.block
    missing = state[:, Field.MISSING] * decides
    ends = missing.cumsum(0)
    served = (decides != 0) & (ends <= room)
    masked = (state[:, layout.masked] != 0) & served[:, None]
    places = torch.where(masked, (ends - missing)[:, None] + masked.cumsum(-1) - 1, 0)
    positions = masked.view(-1).nonzero()[:, 0]
    count = len(positions)
    sources = torch.zeros(room, dtype=torch.int64, device=state.device)
    sources[:count] = positions
    owner, within = positions // block, positions % block
    temperature = torch.ones(room, dtype=torch.float32, device=state.device)
    warmth = state[owner, Field.TEMPERATURE].int().view(torch.float32)
    temperature[:count] = torch.where(warmth == 0, 1.0, warmth)
    draws = torch.zeros((4, room), dtype=torch.int64, device=state.device)
    draws[0, :count] = (state[owner, Field.DRAWS] != 0).long()
    draws[1, :count] = state[owner, Field.SEED]
    draws[2, :count] = state[owner, Field.START] + within
    draws[3, :count] = state[owner, Field.STEP]
    return Wanted(sources, places.int().view(rows * block), served.int(), temperature, draws)


def canvas_advance(
    state: Tensor,
    layout: Layout,
    decides: Tensor,
    places: Tensor,
    token: Tensor,
    confidence: Tensor,
    finite: Tensor,
    filler_ids: Tensor,
    mask_id: int,
) -> Tensor:
    """Accept, move every row on in place, and return what was decided: [rows, 3, block] int32.

    decides [rows] and places [rows * block] int32 are those of `Wanted`, token, confidence and finite [room] the
    proposals, filler_ids [n] int64. The answer's planes are: 1 for accepted, 2 where the logits were not finite; the
    tokens; the bits of the confidences; all are 0 where nothing was proposed. A row that decides accepts a position or
    is not finite, and then no longer live.
    """
    rows, block = state.shape[0], layout.block
    deciding = (state[:, Field.LIVE] != 0) & (decides != 0)
    masked = (state[:, layout.masked] != 0) & deciding[:, None]
    places = places.view(rows, block).long()
    token = torch.where(masked, token[places], 0)
    confidence = torch.where(masked, confidence[places], 0.0)
    broken = masked & ~finite[places]
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
    kept = torch.where(done[:, None], fresh, kept).long()
    state[:, layout.before] = torch.where(done[:, None], tokens, state[:, layout.before])
    state[:, layout.tokens] = torch.where(done[:, None], mask_id, tokens)
    state[:, layout.masked] = kept
    state[:, Field.MISSING] = kept.sum(-1)
    state[:, Field.STEP] = torch.where(done, 0, state[:, Field.STEP] + deciding)
    # A block that was not written before this step is now, by a slot or by the row's own positions.
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
