"""Norm, rotation and gate against their formulas in float64."""

import pytest
import torch

import kernels
from kernels.rope import rope_tables

# bfloat16 keeps 8 bits: half a unit in the last place of values up to about 4, twice.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}
DTYPES = list(TOLERANCE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (16, 384)], ids=str)
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm_is_its_formula(shape: tuple[int, int], with_residual: bool, dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, *shape).to(dtype)
    weight = torch.rand(shape[1]).to(dtype)

    normed, total = kernels.rms_norm(x, weight, 1e-5, residual if with_residual else None)

    expected = x + residual if with_residual else x
    scale = (expected.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    assert torch.equal(total, expected)
    assert normed.dtype == dtype
    assert torch.allclose(normed.double(), expected.double() * scale * weight.double(), atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "width"), [(2, 2), (16, 16), (16, 8), (128, 64)])
@pytest.mark.parametrize("with_norm", [False, True])
def test_rope_turns_pair_i_by_position_over_theta(dim: int, width: int, with_norm: bool, dtype: torch.dtype) -> None:
    positions = torch.tensor([0, 1, 17, 900])
    inv_freq = 1.0 / 1e4 ** (torch.arange(0, width, 2).float() / width)
    x = torch.randn(4, 3, dim).to(dtype)
    weight = torch.rand(3, dim).to(dtype) if with_norm else None

    turned = kernels.rope(x, *rope_tables(positions, inv_freq, dtype), weight, 1e-6)

    y = x.double()
    if weight is not None:
        y = y * (y.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    half = width // 2
    pairs = torch.complex(y[..., :half], y[..., half:width])
    pairs = pairs * torch.polar(torch.ones(4, 1, half).double(), (positions[:, None] * inv_freq).double()[:, None])
    expected = torch.cat((pairs.real, pairs.imag, y[..., width:]), -1)
    # Angles are float32: at position 900 their last bit is worth 6e-5.
    assert torch.allclose(turned.double(), expected, atol=max(TOLERANCE[dtype], 4e-4))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu_gates_the_second_half_by_the_first(dtype: torch.dtype) -> None:
    gate, up = torch.randn(2, 5, 9).to(dtype)

    gated = kernels.swiglu(torch.cat((gate, up), -1))

    expected = gate.double() * gate.double().sigmoid() * up.double()
    assert torch.allclose(gated.double(), expected, atol=TOLERANCE[dtype])
