"""The router's product: float32 to the last bits, whatever units it runs on."""

import pytest
import torch

from kernels.moe import router_logits
from tests.kernels.gpu_cases import DTYPES, NARROW, ON_GPU, normal, relative_error

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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [3, 300])
def test_the_twin_agrees_for_few_tokens_and_many(dtype, tokens):
    if dtype is torch.bfloat16 and not ON_GPU and tokens > 3:
        pytest.skip("the interpreter's matrix product takes a bfloat16 for an integer")
    x, weight = normal(tokens, 96, dtype=dtype, seed=3), normal(24, 96, dtype=torch.float32, seed=4)
    assert relative_error(kernels.gpu.moe.router_logits(x, weight), router_logits(x, weight)) < 2e-6
