"""The router's product: float32 to the last bits, whatever units it runs on."""

import pytest
import torch

from tests.kernels.gpu_cases import NARROW, ON_GPU, normal, relative_error

pytest.importorskip("triton")

import kernels.gpu.moe

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
SHAPES = [(1, 8, 64), (70, 100, 200), (64, 64, 128)] + ([(2048, 256, 2048), (300, 64, 2048)] if ON_GPU else [])


@pytest.mark.parametrize("tokens, experts, hidden", SHAPES)
def test_three_narrow_products_make_a_float32_one(tokens, experts, hidden):
    x = normal(tokens, hidden, dtype=NARROW, seed=1)
    weight = normal(experts, hidden, dtype=torch.float32, seed=2)
    exact = x.double() @ weight.double().t()
    ours = kernels.gpu.moe.multiply_exactly(x, weight)
    assert ours.dtype == torch.float32
    assert relative_error(ours, exact) < 2e-6
    # What a weight of its own dtype alone would give is a hundred times as far off.
    assert relative_error(x.double() @ weight.to(NARROW).double().t(), exact) > 1e-4
