"""Proposals against plain Python, and the noise against plain integers."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
from kernels.noise import gumbel, hash_words, uniform
from kernels.token_stats import Filters, Noise

WORD = 0xFFFFFFFF
INF = float("inf")
# No deadline: a shared machine may be slow, which proves nothing.
unhurried = settings(max_examples=100, deadline=None)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def softmax(values: list[float]) -> list[float]:
    peak = max(values)
    weights = [math.exp(value - peak) for value in values]
    return [weight / sum(weights) for weight in weights]


# Sixteenths are exact in float32, so that plain Python sees the same ties.
rows_of_logits = st.integers(2, 12).flatmap(
    lambda size: st.lists(
        st.lists(st.integers(-80, 80).map(lambda n: n / 16), min_size=size, max_size=size), min_size=1, max_size=4
    )
)


@unhurried
@given(rows_of_logits, st.sampled_from([0.25, 0.5, 1.0, 2.0]))
def test_the_proposal_is_the_first_most_probable_token(rows: list[list[float]], temperature: float) -> None:
    found = kernels.token_stats(torch.tensor(rows), torch.full((len(rows),), temperature), entropy=True, margin=True)

    for i, row in enumerate(rows):
        p = softmax([value / temperature for value in row])
        assert found.token[i] == row.index(max(row))
        assert found.confidence[i].item() == pytest.approx(max(p), rel=1e-4)
        assert found.entropy[i].item() == pytest.approx(-sum(q * math.log(q) for q in p if q > 0), abs=1e-4)
        best, second = sorted(p, reverse=True)[:2]
        assert found.margin[i].item() == pytest.approx(best - second, abs=1e-4)
        assert found.finite[i]


@unhurried
@given(rows_of_logits, st.lists(st.sampled_from([0.125, 0.5, 1.0, 2.0]), min_size=8, max_size=8), st.integers(0, 99))
def test_what_ranks_a_token_may_have_a_temperature_of_its_own(
    rows: list[list[float]], temperatures: list[float], seed: int
) -> None:
    n, logits = len(rows), torch.tensor(rows)
    warmth, ranking = (torch.tensor(temperatures[first : first + n]) for first in (0, 4))
    noise = Noise(torch.arange(n), torch.full((n,), seed), torch.arange(n), torch.zeros(n, dtype=torch.int64))

    found = kernels.token_stats(logits, warmth, noise=noise, ranking=ranking, entropy=True, margin=True)

    drawn = kernels.token_stats(logits, warmth, noise=noise)
    ranked = kernels.token_stats(logits, ranking, entropy=True, margin=True)
    assert torch.equal(found.token, drawn.token)
    assert torch.equal(found.entropy, ranked.entropy) and torch.equal(found.margin, ranked.margin)
    for i, row in enumerate(rows):
        p = softmax([value / ranking[i].item() for value in row])
        assert found.confidence[i].item() == pytest.approx(p[found.token[i]], rel=1e-4)


@unhurried
@given(
    rows_of_logits,
    st.integers(0, 14),
    st.sampled_from([0.001, 0.3, 0.9, 1.0]),
    st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
def test_filters_keep_what_the_definitions_keep(
    rows: list[list[float]], top_k: int, top_p: float, min_p: float
) -> None:
    n = len(rows)
    filters = Filters(
        torch.arange(n),
        torch.full((n,), top_k),
        torch.full((n,), top_p),
        torch.full((n,), min_p),
        torch.full((n,), True),
    )

    found = kernels.token_stats(torch.tensor(rows), filters=filters)

    for i, row in enumerate(rows):
        kept = sorted(row, reverse=True)
        if 0 < top_k < len(row):
            kept = [value for value in kept if value >= kept[top_k - 1]]
        share = softmax(kept)
        if top_p < 1:
            reach = next(count for count in range(1, len(kept) + 1) if sum(share[:count]) >= top_p - 1e-6)
            kept = [value for value in kept if value >= kept[reach - 1]]
        kept = [value for value in kept if value >= kept[0] + (math.log(min_p) if min_p else -INF) - 1e-6]
        assert found.confidence[i].item() == pytest.approx(softmax(kept)[0], rel=1e-4)


def test_the_models_own_confidence_is_not_changed_by_filters() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]] * 2)
    filters = Filters(ints(0, 1), ints(1, 1), torch.ones(2), torch.zeros(2), torch.tensor([False, True]))

    found = kernels.token_stats(logits, filters=filters)

    assert found.confidence.tolist() == pytest.approx([softmax([1, 2, 3])[2], 1.0])


def test_a_barred_id_is_never_proposed_and_keeps_its_probability() -> None:
    logits = torch.tensor([[5.0, 1.0, 0.0]])

    found = kernels.token_stats(logits, barred=torch.tensor([True, False, False]))

    assert found.token.tolist() == [1]
    assert found.confidence.tolist() == pytest.approx([softmax([5, 1, 0])[1]])


def test_a_forbidden_id_leaves_the_distribution_of_its_row_only() -> None:
    logits = torch.tensor([[5.0, 1.0, 0.0]] * 2)

    found = kernels.token_stats(logits, forbidden=(ints(1), ints(0)), entropy=True)

    assert found.token.tolist() == [0, 1]
    assert found.confidence.tolist() == pytest.approx([softmax([5, 1, 0])[0], softmax([1, 0])[0]])
    assert found.entropy.isfinite().all()


@unhurried
@given(seed=st.integers(0, 2**63 - 1), step=st.integers(0, 100), position=st.integers(0, 2**20))
def test_draws_stay_inside_the_filters_and_off_barred_ids(seed: int, step: int, position: int) -> None:
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0, 0.0]] * 6)
    rows = torch.arange(6)
    filters = Filters(rows, torch.full((6,), 3), torch.ones(6), torch.zeros(6), torch.full((6,), False))
    noise = Noise(rows, torch.full((6,), seed), position + rows, torch.full((6,), step))

    found = kernels.token_stats(
        logits, barred=torch.tensor([True, False, False, False, False]), filters=filters, noise=noise
    )

    assert set(found.token.tolist()) <= {1, 2, 3}


def test_draws_follow_the_distribution() -> None:
    n, logits = 20_000, torch.tensor([1.0, 0.0, 2.0, -1.0])
    noise = Noise(torch.arange(n), torch.full((n,), 7), torch.arange(n), torch.zeros(n, dtype=torch.int64))

    found = kernels.token_stats(logits.expand(n, 4), noise=noise)

    counts = Counter(found.token.tolist())
    for token, p in enumerate(softmax(logits.tolist())):
        # Five standard deviations of a binomial count.
        assert abs(counts[token] - n * p) < 5 * math.sqrt(n * p * (1 - p))
        mask = found.token == token
        assert found.confidence[mask].tolist() == pytest.approx([p] * int(mask.sum()), rel=1e-4)


def test_a_draw_does_not_depend_on_its_batch() -> None:
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(0))
    seed, position, step = ints(*range(8)), ints(*range(30, 38)), ints(*range(8))
    together = kernels.token_stats(logits, noise=Noise(torch.arange(8), seed, position, step)).token

    alone = [
        kernels.token_stats(
            logits[i : i + 1], noise=Noise(ints(0), seed[i : i + 1], position[i : i + 1], step[i : i + 1])
        ).token.item()
        for i in range(8)
    ]

    assert together.tolist() == alone


@pytest.mark.parametrize("poison", [float("nan"), INF])
def test_a_row_with_a_number_that_is_none_is_told_and_zeroed(poison: float) -> None:
    logits = torch.tensor([[1.0, 2.0], [1.0, poison], [float("-inf"), 0.0]])

    found = kernels.token_stats(logits, entropy=True, margin=True)

    assert found.finite.tolist() == [True, False, True]
    for column in (found.token, found.confidence, found.entropy, found.margin):
        assert column[1] == 0
        assert column.isfinite().all()


def test_bfloat16_logits_are_read_in_float32() -> None:
    logits = torch.randn(3, 1000).to(torch.bfloat16)

    found = kernels.token_stats(logits)

    expected = logits.double().softmax(-1).amax(-1)
    assert torch.allclose(found.confidence.double(), expected, atol=1e-6)


def mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D & WORD
    x ^= x >> 15
    x = x * 0x846CA68B & WORD
    return x ^ x >> 16


@unhurried
@given(st.integers(0, 2**63 - 1), st.integers(0, 2**31), st.integers(0, 2**20), st.integers(0, WORD))
def test_the_hash_is_plain_32_bit_arithmetic(seed: int, position: int, step: int, lane: int) -> None:
    key = mix(seed & WORD ^ 0x9E3779B9)
    for word in (seed >> 32, position, step):
        key = mix(key ^ (word * 0x85EBCA6B + 0xC2B2AE35 & WORD))
    expected = mix(mix(lane + key & WORD) ^ key)

    assert hash_words(ints(seed), ints(position), ints(step), ints(lane)).item() == expected


def test_uniforms_are_inside_the_interval_and_spread_over_it() -> None:
    lane = torch.arange(100_000)
    u = uniform(ints(1), ints(2), ints(3), lane)

    assert 0 < u.min() and u.max() < 1
    # Five standard errors of the mean, and of the variance 1/12.
    assert abs(u.mean().item() - 0.5) < 5 * math.sqrt(1 / 12 / 100_000)
    assert abs(u.var().item() - 1 / 12) < 5 * math.sqrt(1 / 180 / 100_000)


@pytest.mark.parametrize("varied", ["seed", "position", "step"])
def test_each_part_of_the_key_changes_the_noise(varied: str) -> None:
    base = {"seed": 1, "position": 2, "step": 3}
    keys = [base, base | {varied: base[varied] + 1}, base | {varied: base[varied] + 2}]
    seed, position, step = (ints(*(key[name] for key in keys)) for name in ("seed", "position", "step"))
    noise = gumbel(seed, position, step, 4096)

    correlation = torch.corrcoef(noise)
    # 1 / sqrt(4096) is one standard error of the correlation of independent columns.
    assert (correlation - torch.eye(3)).abs().max() < 5 / 64
