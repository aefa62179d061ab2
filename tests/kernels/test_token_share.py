"""What ranks tell of their shares of a vocabulary, put together, is what one look at all of it gives."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kernels
from kernels.token_share import Part
from kernels.token_stats import Noise, Proposals
from worker.draws import Draws

unhurried = settings(max_examples=100, deadline=None)

# Sixteenths are exact in float32, so that ties are ties on both sides.
logits_of = st.tuples(st.integers(2, 40), st.integers(1, 4)).flatmap(
    lambda shape: st.lists(
        st.lists(st.integers(-80, 80).map(lambda n: n / 16), min_size=shape[0], max_size=shape[0]),
        min_size=shape[1],
        max_size=shape[1],
    )
)


def cuts_of(size: int) -> st.SearchStrategy[list[int]]:
    """Where shares begin: any split, each share at least one id."""
    return st.sets(st.integers(1, size - 1), max_size=7).map(lambda inner: [0, *sorted(inner), size])


def shared(logits: Tensor, cuts: list[int], barred: Tensor | None = None, **how: object) -> Proposals:
    draws = Draws(forbidden=how.pop("forbidden", None))  # pyright: ignore[reportArgumentType]
    parts = [
        kernels.token_share(
            logits[:, a:b],
            a,
            barred=None if barred is None else barred[a:b],
            forbidden=draws.within(a, b).forbidden,
            **how,  # pyright: ignore[reportArgumentType]
        )
        for a, b in zip(cuts, cuts[1:], strict=False)
    ]
    asked = {name: value for name, value in how.items() if name in ("entropy", "margin")}
    return kernels.merge_shares(torch.stack(parts), **asked)  # pyright: ignore[reportArgumentType]


def assert_equal(found: Proposals, expected: Proposals) -> None:
    assert torch.equal(found.token, expected.token)
    assert torch.equal(found.finite, expected.finite)
    for column in ("confidence", "entropy", "margin"):
        torch.testing.assert_close(getattr(found, column), getattr(expected, column), rtol=2e-5, atol=2e-6)


@unhurried
@given(st.data())
def test_any_split_gives_the_statistics_of_the_whole(data: st.DataObject) -> None:
    logits = torch.tensor(data.draw(logits_of))
    rows, size = logits.shape
    cuts = data.draw(cuts_of(size))
    warmth = st.sampled_from([0.125, 0.5, 1.0, 2.0])
    how: dict[str, object] = {"entropy": data.draw(st.booleans()), "margin": data.draw(st.booleans())}
    for name in ("temperature", "ranking"):
        if data.draw(st.booleans()):
            how[name] = torch.tensor(data.draw(st.lists(warmth, min_size=rows, max_size=rows)))
    if data.draw(st.booleans()):
        how["forbidden"] = (
            torch.tensor([0, rows - 1]),
            torch.tensor(data.draw(st.tuples(*[st.integers(0, size - 1)] * 2))),
        )
    if data.draw(st.booleans()):
        drawn = torch.tensor(data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows)))
        seed, step = torch.full((rows,), data.draw(st.integers(0, 99))), torch.zeros(rows, dtype=torch.int64)
        how["noise"] = Noise(torch.arange(rows), seed, torch.arange(rows), step, drawn)
    barred = torch.zeros(size, dtype=torch.bool)
    barred[data.draw(st.integers(0, size - 1))] = True

    found = shared(logits, cuts, barred, **how)

    assert_equal(found, kernels.token_stats(logits, barred=barred, **how))  # pyright: ignore[reportArgumentType]


@unhurried
@given(st.data())
def test_equals_in_two_shares_go_to_the_lowest_id(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 30))
    places = data.draw(st.sets(st.integers(0, size - 1), min_size=2))
    logits = torch.zeros((1, size))
    logits[0, sorted(places)] = 3.0

    assert shared(logits, data.draw(cuts_of(size))).token.item() == min(places)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_share_that_is_not_finite_makes_its_row_so(bad: float) -> None:
    logits = torch.randn(3, 12)
    logits[1, 7] = bad

    found = shared(logits, [0, 4, 8, 12], entropy=True, margin=True)

    assert found.finite.tolist() == [True, False, True]
    assert_equal(found, kernels.token_stats(logits, entropy=True, margin=True))


def test_a_share_without_any_finite_logit_adds_nothing() -> None:
    logits = torch.randn(2, 12)
    logits[:, 4:8] = float("-inf")

    found = shared(logits, [0, 4, 8, 12], entropy=True, margin=True)

    assert_equal(found, kernels.token_stats(logits, entropy=True, margin=True))
    assert kernels.token_share(logits[:, 4:8], 4)[Part.MASS].tolist() == [0.0, 0.0]
