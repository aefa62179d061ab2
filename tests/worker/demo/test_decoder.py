"""The reference decoder's rules, on scripted networks."""

import torch
from torch import Tensor

from worker.demo.chatml import FILLER_ID, MASK_ID, STOP_ID
from worker.demo.model import SHAPES, DemoModel
from worker.demo.reference_decoder import ReferenceDecoder, Settings, choose


def test_every_row_with_open_positions_moves_and_decided_ones_stay() -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        tokens = torch.randint(0, 6, (5, 16), generator=generator)
        confidence, open_ = torch.rand(5, 16, generator=generator), torch.rand(5, 16, generator=generator) < 0.5
        for threshold in (None, 0.9):
            accept = choose(tokens, confidence, open_, threshold)
            assert not (accept & ~open_).any()
            assert (accept.any(1) == open_.any(1)).all()
        assert (choose(tokens, confidence, open_, None).sum(1) <= 1).all()


def test_filler_takes_no_turn_while_anything_else_may() -> None:
    tokens = torch.tensor([[FILLER_ID, 9, FILLER_ID]])
    confidence = torch.tensor([[0.99, 0.2, 0.95]])
    accept = choose(tokens, confidence, torch.ones(1, 3, dtype=torch.bool), 0.9)
    assert accept.tolist() == [[False, True, False]]


class _Scripted(DemoModel):
    """Says a fixed token at each position, whatever it sees, with certainty."""

    def __init__(self, script: list[int]) -> None:
        super().__init__(SHAPES["nano"])
        self.script = torch.tensor(script)

    def forward(self, ids: Tensor, positions: Tensor, attend: object) -> Tensor:
        return self.script[positions][..., None].expand(*ids.shape, 2)

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(hidden[..., 0], 4096) * 50.0


def test_a_closed_answer_ends_without_forwards_for_the_fill() -> None:
    script = [5, 6, 7, 8, 9, STOP_ID, *[FILLER_ID] * 1018]
    decoder = ReferenceDecoder(_Scripted(script))
    assert decoder.generate([[5, 6]], Settings()) == [([7, 8, 9, STOP_ID], 1)]
    assert decoder.generate([[5, 6]], Settings(threshold=None)) == [([7, 8, 9, STOP_ID], 4)]


def test_answers_cross_blocks_and_batches_keep_their_order() -> None:
    script = [*range(10, 50), STOP_ID, *[FILLER_ID] * 983]
    decoder = ReferenceDecoder(_Scripted(script))
    prompts = [list(range(10, 10 + n)) for n in (3, 20, 17, 16, 1)]
    for prompt, (ids, forwards) in zip(prompts, decoder.generate(prompts, Settings(block=8)), strict=True):
        assert ids == [*range(10 + len(prompt), 50), STOP_ID]
        assert forwards == 41 // 8 + 1 - len(prompt) // 8


def test_an_answer_that_never_closes_stops_at_its_limit() -> None:
    decoder = ReferenceDecoder(_Scripted([7] * 1024))
    ((ids, _),) = decoder.generate([[7] * 5], Settings(max_tokens=20))
    assert ids == [7] * 27
    assert STOP_ID not in ids
    assert MASK_ID not in ids
