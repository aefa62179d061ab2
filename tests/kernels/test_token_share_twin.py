"""The fused share of token statistics against its reference: in Triton's interpreter here, for real on a GPU."""

import itertools

import pytest
import torch
from torch import Tensor

from kernels.token_share import Part, merge_shares, token_share
from kernels.token_stats import Noise, Proposals, token_stats
from tests.kernels.gpu_cases import DEVICE, DTYPES, normal
from worker.draws import Draws

import kernels.gpu.token_share as twin  # isort: skip

# The interpreter computes both sides of a choice.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
ENDS = (0, 4096, 9000, 9001, 13000)


def compare(found: Proposals, expected: Proposals) -> None:
    assert torch.equal(found.token, expected.token)
    assert torch.equal(found.finite, expected.finite)
    for column in ("confidence", "entropy", "margin"):
        torch.testing.assert_close(getattr(found, column), getattr(expected, column), rtol=1e-4, atol=3e-6)


def shares(logits: Tensor, barred: Tensor | None, **how: object) -> tuple[Tensor, Tensor]:
    """Return what the twin and what the reference tell of unequal shares."""
    told: tuple[list[Tensor], list[Tensor]] = [], []
    draws = Draws(forbidden=how.pop("forbidden", None))  # pyright: ignore[reportArgumentType]
    for first, end in itertools.pairwise(ENDS):
        struck = draws.within(first, end).forbidden
        bars = None if barred is None else barred[first:end]
        for one, parts in ((twin.token_share, told[0]), (token_share, told[1])):
            parts.append(one(logits[:, first:end], first, barred=bars, forbidden=struck, **how))  # pyright: ignore[reportArgumentType]
    return torch.stack(told[0]), torch.stack(told[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("asked", [{}, {"entropy": True}, {"margin": True}, {"entropy": True, "margin": True}])
@pytest.mark.parametrize("how", ["greedy", "warm", "ranked", "drawn", "forbidden"])
def test_shares_and_what_they_come_to_agree(dtype: torch.dtype, asked: dict[str, bool], how: str) -> None:
    rows, size = 5, ENDS[-1]
    logits = normal(rows, size, dtype=dtype, seed=3, scale=4)
    kept = logits.clone()
    number = torch.arange(rows, device=DEVICE)
    barred = torch.zeros(size, dtype=torch.bool, device=DEVICE)
    barred[logits[0].argmax()] = True
    more: dict[str, object] = {**asked}
    if how != "greedy":
        more["temperature"] = torch.linspace(0.5, 2, rows, device=DEVICE)
    if how == "ranked":
        more["ranking"] = torch.linspace(2, 0.25, rows, device=DEVICE)
    if how == "drawn":
        more["noise"] = Noise(None, number + 2**40, number * 7, number, number % 2 == 0)
    if how == "forbidden":
        more["forbidden"] = number[[0, 2, 2, 4]], torch.stack((*logits[2].topk(3).indices, logits[4].argmax()))
    ours, theirs = shares(logits, barred, **more)

    assert torch.equal(ours[:, Part.TOKEN], theirs[:, Part.TOKEN])
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    whole = token_stats(logits, barred=barred, **more)  # pyright: ignore[reportArgumentType]
    compare(twin.merge_shares(ours, **asked), whole)
    compare(twin.merge_shares(ours, **asked), merge_shares(theirs, **asked))
    assert torch.equal(logits, kept)


def test_shares_that_are_not_finite_or_have_nothing_agree() -> None:
    logits = normal(6, ENDS[-1], dtype=torch.float32, seed=1)
    logits[0, 4999] = float("nan")
    logits[1, 3] = float("inf")
    logits[2] = float("nan")
    logits[3] = float("-inf")
    logits[4, :9000] = float("-inf")
    ours, _ = shares(logits, None, entropy=True, margin=True)

    found = twin.merge_shares(ours, entropy=True, margin=True)

    assert found.finite.tolist() == [False, False, False, False, True, True]
    compare(found, token_stats(logits, entropy=True, margin=True))


def test_equals_in_several_shares_go_to_the_lowest_id() -> None:
    logits = torch.zeros(2, ENDS[-1], device=DEVICE)
    logits[0, [9000, 8999, 12999]] = 3.0
    ours, _ = shares(logits, None)

    assert twin.merge_shares(ours).token.tolist() == [8999, 0]


def test_no_rows_have_no_statistics() -> None:
    ours, _ = shares(torch.zeros(0, ENDS[-1], device=DEVICE), None)

    assert twin.merge_shares(ours).token.tolist() == []
    with pytest.raises(ValueError, match="65 ranks"):
        twin.merge_shares(torch.zeros(65, len(Part), 1, device=DEVICE))
