"""Rows that decode by themselves: what they accept, how they move on, and the fused twins."""

import pytest
import torch
from torch import Tensor

from kernels.canvas import Field, Layout, Rule, canvas_advance, canvas_query
from shared.decoding import Decoding, LowConfidenceDynamic, LowConfidenceStatic, Sequential, Threshold
from tests.kernels.gpu_cases import DEVICE, generator, integers
from worker.decoding import decide
from worker.decoding.types import BlockView, TokenStats

pytest.importorskip("triton")

import kernels.gpu.canvas

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

FILLERS = torch.tensor([3, 5], device=DEVICE)
MASK = 99


def _decodings(rows: int) -> list[Decoding]:
    kinds: list[Decoding] = [
        Threshold(threshold=0.6),
        LowConfidenceStatic(steps=3, filler_rules=False),
        LowConfidenceDynamic(threshold=0.7, steps=2),
        LowConfidenceDynamic(threshold=0.7, fallback="leftmost"),
        Sequential(steps=4),
        LowConfidenceStatic(),
        Threshold(threshold=1.0, filler_rules=False),
    ]
    return [kinds[row % len(kinds)] for row in range(rows)]


def _rule(decoding: Decoding) -> Rule:
    match decoding:
        case LowConfidenceStatic():
            return Rule.STATIC
        case LowConfidenceDynamic(fallback="leftmost"):
            return Rule.DYNAMIC_LEFTMOST
        case LowConfidenceDynamic():
            return Rule.DYNAMIC
        case Sequential():
            return Rule.SEQUENTIAL
        case _:
            return Rule.THRESHOLD


def _state(rows: int, layout: Layout, seed: int) -> Tensor:
    block = layout.block
    state = torch.zeros(rows, layout.width, dtype=torch.int64)
    for row, decoding in enumerate(_decodings(rows)):
        tau = torch.tensor(getattr(decoding, "threshold", 0.0)).view(torch.int32)
        state[row, Field.RULE] = _rule(decoding)
        state[row, Field.THRESHOLD] = tau.long()
        state[row, Field.STEPS] = getattr(decoding, "steps", None) or 0
        state[row, Field.FILLER_RULES] = decoding.filler_rules
    state[:, Field.LIVE] = 1
    state = state.to(DEVICE)
    state[:, Field.START] = integers(0, 3, (rows,), seed) * block
    state[:, Field.LIMIT] = state[:, Field.START] + integers(1, 3 * block, (rows,), seed + 1)
    state[:, Field.STEP] = integers(0, 3, (rows,), seed + 2)
    state[:, layout.tokens] = integers(0, 9, (rows, block), seed + 3)
    state[:, layout.before] = integers(0, 9, (rows, block), seed + 4)
    masked = integers(0, 2, (rows, block), seed + 5)
    masked[:, 0] |= masked.sum(-1) == 0
    position = state[:, Field.START, None] + torch.arange(block, device=DEVICE)
    state[:, layout.masked] = masked * (position < state[:, Field.LIMIT, None])
    state[:, layout.table] = torch.arange(rows * layout.pages, device=DEVICE).view(rows, -1).flip(0)
    return state


def _proposals(rows: int, block: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    token = integers(0, 9, (rows * block,), seed)
    # Few distinct values: ties have to be broken.
    confidence = (torch.rand(rows * block, generator=generator(seed + 1), device=DEVICE) * 8).round() / 8
    finite = torch.ones(rows * block, dtype=torch.bool, device=DEVICE)
    return token, confidence, finite


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("block", [1, 4, 6, 32])
def test_rows_accept_what_the_strategies_accept(seed, block):
    rows, layout = 14, Layout(block, 8, 4 * block, 1000, paired=True)
    state = _state(rows, layout, 10 * seed)
    token, confidence, finite = _proposals(rows, block, 100 + seed)
    masked = state[:, layout.masked] != 0
    shape = (rows, block)
    still = torch.zeros(shape, device=DEVICE)
    view = BlockView(
        masked=masked,
        step=state[:, Field.STEP].clone(),
        length=torch.full((rows,), block, device=DEVICE),
        seed=torch.zeros(rows, dtype=torch.int64, device=DEVICE),
        start=state[:, Field.START].clone(),
        editable=torch.zeros_like(masked),
        current=torch.zeros(shape, dtype=torch.int64, device=DEVICE),
        undecided_at_first=masked.sum(-1),
    )
    stats = TokenStats(token.view(shape), confidence.view(shape), still, still)
    expected = decide(stats, view, _decodings(rows), None, FILLERS)
    answer = canvas_advance(state, layout, token, confidence, finite, FILLERS, MASK)
    assert torch.equal(answer[:, 0] == 1, expected)


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("block", [1, 4, 6, 32])
def test_the_twins_do_what_the_references_do(paired, block):
    rows, layout = 9, Layout(block, 5, 2 * block, 1000, paired)
    state = _state(rows, layout, 7)
    state[4, Field.LIVE] = 0
    state[5, Field.COMMIT] = 0 if paired else 1
    state[5, Field.START] = block
    state[6, Field.END], state[6, Field.START] = 3 * block + 1, block + 1
    ours = state.clone()
    for step in range(5):
        asked, expected = kernels.gpu.canvas.canvas_query(ours, layout), canvas_query(state, layout)
        for name in ("token_ids", "positions", "slots", "visible_end", "page_table"):
            assert torch.equal(getattr(asked, name), getattr(expected, name)), name
        token, confidence, finite = _proposals(rows, block, 50 + step)
        finite[2 * block] = step != 2
        answer = kernels.gpu.canvas.canvas_advance(ours, layout, token, confidence, finite, FILLERS, MASK)
        assert torch.equal(answer, canvas_advance(state, layout, token, confidence, finite, FILLERS, MASK))
        assert torch.equal(ours, state)


def test_a_finished_block_is_written_before_the_next_one_is_decided():
    layout = Layout(block=2, pages=4, page_size=2, scratch=9, paired=False)
    state = torch.zeros(1, layout.width, dtype=torch.int64, device=DEVICE)
    state[0, Field.LIVE], state[0, Field.START], state[0, Field.LIMIT] = 1, 2, 5
    state[0, layout.masked] = 1
    state[0, layout.tokens] = MASK
    state[0, layout.table] = torch.tensor([3, 1, 0, 9], device=DEVICE)
    token, sure = torch.tensor([7, 8], device=DEVICE), torch.ones(2, device=DEVICE)
    finite = sure > 0
    assert canvas_query(state, layout).positions.tolist() == [2, 3]
    canvas_advance(state, layout, token, sure, finite, FILLERS, MASK)
    assert canvas_query(state, layout).token_ids.tolist() == [7, 8]
    assert canvas_query(state, layout).slots.tolist() == [2, 3]
    answer = canvas_advance(state, layout, token, sure, finite, FILLERS, MASK)
    assert answer[0, 0].tolist() == [0, 0]
    assert canvas_query(state, layout).token_ids.tolist() == [MASK, MASK]
    assert canvas_query(state, layout).slots.tolist() == [0, 1]
    # Only one position is wanted in the last block; then the row is at rest.
    answer = canvas_advance(state, layout, token, sure, finite, FILLERS, MASK)
    assert answer[0, 0].tolist() == [1, 0]
    assert int(state[0, Field.LIVE]) == 0
    assert canvas_query(state, layout).slots.tolist() == [18, 18]
