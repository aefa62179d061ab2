"""Log-probabilities of proposals, against the definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import top_logprobs as module
from kernels.top_logprobs import top_logprobs


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(2, 40), st.integers(0, 45), st.integers(0, 2**20), st.booleans())
def test_logprobs_are_those_of_a_softmax_and_the_list_is_its_largest(
    rows: int, vocab: int, count: int, seed: int, half: bool
) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn((rows, vocab), generator=draw) * 5
    logits = logits.bfloat16() if half else logits
    token = torch.randint(0, vocab, (rows,), generator=draw)

    found = top_logprobs(logits, token, count)

    expected = logits.double().log_softmax(-1)
    assert torch.allclose(found.logprob.double(), expected[torch.arange(rows), token], atol=1e-4)
    for row in range(rows):
        order = sorted(range(vocab), key=lambda token: (-float(logits[row, token]), token))[:count]
        values = [float(logits[row, token]) for token in order]
        assert [float(logits[row, token]) for token in found.ids[row].tolist()] == values
        assert len(set(found.ids[row].tolist())) == len(order)
        assert found.logprobs[row].tolist() == pytest.approx(expected[row, order].tolist(), abs=1e-4)
    assert torch.equal(found.ids, found.ids.clone()) and found.ids.shape == (rows, min(count, vocab))


def test_parts_do_not_change_a_row_and_barred_ids_are_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, token = torch.randn((7, 30), generator=torch.Generator().manual_seed(1)), torch.arange(7)
    barred = torch.zeros(30, dtype=torch.bool)
    barred[[int(logits[0].argmax()), 3]] = True
    whole = top_logprobs(logits, token, 5, barred)
    monkeypatch.setattr(module, "_AT_ONCE", 60)
    parts = top_logprobs(logits, token, 5, barred)
    assert torch.equal(whole.ids, parts.ids) and torch.equal(whole.logprobs, parts.logprobs)
    assert not barred[whole.ids].any()
    assert torch.allclose(whole.logprob, logits.log_softmax(-1)[torch.arange(7), token], atol=1e-5)
    empty = top_logprobs(logits[:0], token[:0], 5)
    assert empty.logprob.shape == (0,) and empty.ids.shape == (0, 5)
