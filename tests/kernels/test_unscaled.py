"""Norms folded into the products around them: the reference by what it stands for, the twins on Hopper."""

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kernels
from kernels import unscaled
from kernels.linear import gated_linear, linear
from kernels.rms_norm import rms_norm
from tests.kernels.gpu_cases import DEVICE, ON_GPU, TOLERANCE, normal, relative_error

if TYPE_CHECKING:
    from kernels.gpu.clusters import Tiling

EPS = 1e-6
BROKEN = [float("nan"), float("inf"), -float("inf")]


@given(
    tokens=st.integers(0, 5),
    inputs=st.integers(1, 20),
    hidden=st.integers(1, 200),
    outputs=st.integers(1, 9),
    biased=st.booleans(),
    gated=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(deadline=None)
def test_two_products_and_the_norm_folded_into_them_are_the_three_one_after_the_other(
    tokens, inputs, hidden, outputs, biased, gated, seed
):
    x, weight, bias, residual, norm_weight, reader, added = drawn(
        tokens, inputs, hidden, 2 * outputs, torch.float32, seed, torch.device("cpu")
    )
    bias, added = (bias, added) if biased else (None, None)
    assert not unscaled.folds(x, weight, reader, gated=gated)

    between, total = unscaled.unscaled_linear(x, weight, bias, residual, norm_weight, EPS)
    normed, expected_total = rms_norm(linear(x, weight, bias), norm_weight, EPS, residual)

    assert torch.equal(total, expected_total)
    fields = between.values, between.squares, between.eps
    if gated:
        out, expected = unscaled.scaled_gated_linear(*fields, reader), gated_linear(normed, reader)
    else:
        out, expected = unscaled.scaled_linear(*fields, reader, added), linear(normed, reader, added)
    assert out.shape == expected.shape and torch.allclose(out, expected, rtol=1e-4, atol=1e-4)


def test_the_squares_of_a_token_are_those_of_all_its_columns_and_of_no_other_tokens():
    x, weight, bias, residual, norm_weight, *_ = drawn(3, 8, 200, 4, torch.float32, 1, torch.device("cpu"))
    between, total = unscaled.unscaled_linear(x, weight, bias, residual, norm_weight, EPS)
    assert torch.allclose(between.squares.sum(1), total.square().sum(1))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("what", BROKEN)
def test_a_token_that_is_not_a_number_spoils_no_other(what, gated):
    spoils_no_other(what, drawn(3, 8, 200, 16, torch.float32, 3, torch.device("cpu")), gated=gated)


def spoils_no_other(what: float, case: tuple[Tensor, ...], *, gated: bool) -> None:
    """Check that one broken token leaves the others what they are without it, and is not a number in the end."""
    x, weight, bias, residual, norm_weight, reader, _ = case
    middle = len(x) // 2
    broken = residual.clone()
    broken[middle, residual.shape[1] // 2] = what
    fine, out = (fold(x, weight, bias, each, norm_weight, reader, gated=gated) for each in (residual, broken))
    others = torch.arange(len(x), device=x.device) != middle
    assert fine.isfinite().all() and torch.equal(out[others], fine[others])
    assert out[middle].isnan().all()


def fold(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    reader: Tensor,
    *,
    gated: bool = True,
) -> Tensor:
    """Return both products, with the norm folded into them."""
    between, _ = kernels.unscaled_linear(x, weight, bias, residual, norm_weight, EPS)
    product = kernels.scaled_gated_linear if gated else kernels.scaled_linear
    return product(between.values, between.squares, between.eps, reader)


def drawn(tokens, inputs, hidden, outputs, dtype, seed, device) -> tuple[Tensor, ...]:
    """Return x, weight, bias, residual, norm's weight, the reader's weight and bias."""
    shapes = ((tokens, inputs), (hidden, inputs), (hidden,), (tokens, hidden), (hidden,), (outputs, hidden), (outputs,))
    scales = (1.0, inputs**-0.5, 1.0, 3.0, 1.0, hidden**-0.5, 1.0)
    parts = zip(shapes, scales, strict=True)
    return tuple(
        normal(*shape, dtype=dtype, seed=seed + number, scale=scale).to(device)
        for number, (shape, scale) in enumerate(parts)
    )


def hopper() -> bool:
    if not ON_GPU:
        return False
    from kernels.gpu import clusters

    return clusters.able(DEVICE)


on_hopper = pytest.mark.skipif(not hopper(), reason="clusters need Hopper and NVRTC")
TOKENS = [1, 17, 31, 32, 33, 64, 65, 100, 128, 129, 144, 160, 192, 200, 224, 225, 256, 257, 288, 289, 320, 321, 352]


def poison(*shapes: tuple[int, ...]) -> None:
    """Leave what is not a number in the memory that is given out next."""
    held = [torch.full(shape, float("nan"), dtype=torch.float32, device=DEVICE) for shape in shapes]
    del held


GATE, QKV = (4096, 24576, True), (12288, 6144, False)
"""Of an 8B: the first product's inputs, the second one's outputs, whether these are gated."""


@on_hopper
@pytest.mark.parametrize("inputs, outputs, gated", [GATE, QKV])
def test_an_8bs_norms_are_folded_where_it_gains(inputs, outputs, gated):
    def folds(tokens: int, dtype: torch.dtype = torch.bfloat16) -> bool:
        x, weight, reader = (
            torch.empty(shape, dtype=dtype, device=DEVICE)
            for shape in ((tokens, inputs), (4096, inputs), (outputs, 4096))
        )
        return kernels.folds(x, weight, reader, gated=gated)

    assert all(map(folds, (1, 32, 64, 96, 128)))
    assert not any(map(folds, (129, 192, 224, 256, 320, 384, 1024))) and not folds(32, torch.float16)


@on_hopper
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    "inputs, outputs, gated, tokens", [(*case, tokens) for case in (GATE, QKV) for tokens in TOKENS]
)
def test_the_twins_fold_an_8bs_norms_at_every_number_of_tokens(tokens, inputs, outputs, gated, biased):
    x, weight, bias, residual, norm_weight, reader, added = drawn(
        tokens, inputs, 4096, outputs, torch.bfloat16, 5 * tokens, DEVICE
    )
    bias = bias if biased else None
    poison((tokens, 4096), (tokens, 64), (tokens, outputs))

    between, total = kernels.unscaled_linear(x, weight, bias, residual, norm_weight, EPS)

    _, expected_total = kernels.rms_norm(kernels.linear(x, weight, bias), norm_weight, EPS, residual)
    assert torch.equal(total, expected_total)
    assert torch.equal(between.values, (total.float() * norm_weight.float()).to(torch.bfloat16))
    assert relative_error(between.squares.sum(1), total.double().square().sum(1)) < 1e-6

    fields = between.values, between.squares, between.eps
    if gated:
        out = kernels.scaled_gated_linear(*fields, reader)
        expected = unscaled.scaled_gated_linear(between.values.float(), *fields[1:], reader.float())
        again = kernels.scaled_gated_linear(*fields, reader)
    else:
        with_bias = added if biased else None
        out = kernels.scaled_linear(*fields, reader, with_bias)
        wide = None if with_bias is None else with_bias.float()
        expected = unscaled.scaled_linear(between.values.float(), *fields[1:], reader.float(), wide)
        again = kernels.scaled_linear(*fields, reader, with_bias)
    assert relative_error(out, expected) < TOLERANCE[torch.bfloat16]
    assert torch.equal(out, again)
    repeated, _ = kernels.unscaled_linear(x, weight, bias, residual, norm_weight, EPS)
    assert torch.equal(repeated.values, between.values) and torch.equal(repeated.squares, between.squares)


def tilings() -> list[tuple["Tiling", torch.dtype]]:
    pytest.importorskip("triton")
    from kernels.gpu import clusters
    from tests.kernels.test_clusters import TILINGS

    every = dict.fromkeys((*TILINGS, *clusters.PLAIN))
    return [(tiling, torch.bfloat16) for tiling in every] + [(tiling, torch.float16) for tiling in TILINGS]


@on_hopper
@pytest.mark.parametrize("tiling, dtype", tilings(), ids=str)
def test_every_tiling_adds_and_scales(tiling, dtype):
    from kernels.gpu import clusters

    for tokens, hidden in ((1, 512), (100, 1048), (300, 4104)):
        x, weight, bias, residual, norm_weight, reader, added = drawn(tokens, 520, hidden, 1040, dtype, 7, DEVICE)
        expected, expected_total = unscaled.unscaled_linear(
            x.float(), weight.float(), bias.float(), residual.float(), norm_weight.float(), EPS
        )
        poison((tokens, hidden), (tokens, -(-hidden // 64)))

        values, squares, total = clusters.add(x, weight, bias, residual, norm_weight, tiling)

        assert relative_error(total, expected_total) < TOLERANCE[dtype]
        assert relative_error(values, expected.values) < TOLERANCE[dtype]
        assert relative_error(squares.sum(1), total.double().square().sum(1)) < 1e-6
        wide = (values.float(), squares, EPS, reader.float())
        out = clusters.multiply(values, reader, added, tiling, gated=False, squares=squares, eps=EPS)
        assert relative_error(out, unscaled.scaled_linear(*wide, added.float())) < TOLERANCE[dtype]
        if tiling.gates:
            out = clusters.multiply(values, reader, None, tiling, gated=True, squares=squares, eps=EPS)
            assert relative_error(out, unscaled.scaled_gated_linear(*wide)) < TOLERANCE[dtype]


@on_hopper
@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.parametrize("tokens", [3, 64, 100, 256, 300])
@pytest.mark.parametrize("inputs, outputs, gated", [GATE, QKV])
def test_a_token_that_is_not_a_number_spoils_no_other_on_hopper(inputs, outputs, gated, tokens, what):
    spoils_no_other(what, drawn(tokens, inputs, 4096, outputs, torch.bfloat16, 3, DEVICE), gated=gated)


@on_hopper
@pytest.mark.parametrize("tokens", [3, 32, 64, 100, 256, 300])
@pytest.mark.parametrize("inputs, outputs, gated", [GATE, QKV])
def test_a_token_is_the_same_wherever_it_stands_and_whatever_stands_beside_it(inputs, outputs, gated, tokens):
    x, weight, bias, residual, norm_weight, reader, _ = drawn(tokens, inputs, 4096, outputs, torch.bfloat16, 4, DEVICE)

    def folded(x: Tensor, residual: Tensor) -> Tensor:
        return fold(x, weight, bias, residual, norm_weight, reader, gated=gated)

    out = folded(x, residual)
    assert torch.equal(folded(x.flip(0), residual.flip(0)), out.flip(0))
    stay = torch.arange(tokens, device=DEVICE) % 3 == 1
    others = [torch.where(stay[:, None], each, -3 * each) for each in (x, residual)]
    assert torch.equal(folded(*others)[stay], out[stay])


@on_hopper
@pytest.mark.parametrize("tokens", [32, 128, 256])
def test_a_folded_norm_replays_for_new_tokens(tokens):
    x, weight, bias, residual, norm_weight, reader, _ = drawn(tokens, 4096, 4096, 24576, torch.bfloat16, 1, DEVICE)

    def folded(x: Tensor, residual: Tensor) -> Tensor:
        return fold(x, weight, bias, residual, norm_weight, reader)

    others = x.flip(0).contiguous(), 2 * residual
    wanted = folded(x, residual), folded(*others)
    held = x.clone(), residual.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = folded(*held)
    for given_, want in zip(((x, residual), others), wanted, strict=True):
        for target, source in zip(held, given_, strict=True):
            target.copy_(source)
        graph.replay()
        assert torch.equal(out, want)


@on_hopper
def test_what_does_not_go_with_a_product_is_an_error():
    from kernels.gpu import clusters
    from tests.kernels.test_clusters import TILINGS

    x, weight, _, residual, norm_weight, *_ = drawn(8, 512, 512, 64, torch.bfloat16, 1, DEVICE)
    with pytest.raises(ValueError, match="residual"):
        clusters.add(x, weight, None, residual[:4], norm_weight, TILINGS[0])
    ones = torch.ones(8, 8, device=DEVICE)
    for wrong in (torch.ones(8, 6, device=DEVICE), ones[:4], ones.double(), ones[:, 1:5], ones.t()):
        with pytest.raises(ValueError, match="squares"):
            clusters.multiply(x, weight, None, TILINGS[0], gated=False, squares=wrong)
    with pytest.raises(ValueError, match="clusters"):
        kernels.scaled_linear(x, torch.ones(8, 4, device=DEVICE), EPS, weight)
