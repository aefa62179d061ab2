"""The router's product: float32 to the last bits, whatever units it runs on."""

import pytest
import torch

from tests.kernels.gpu_cases import NARROW, ON_GPU, normal, relative_error

pytest.importorskip("triton")

import kernels.gpu.router
import kernels.moe

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
    ours = kernels.gpu.router.multiply_exactly(x, weight)
    assert ours.dtype == torch.float32
    # A float32 sum of 2,048 products is off by 4e-7; matrix units cut off what they shift out: 2.1e-6 on an H100.
    assert relative_error(ours, exact) < 3e-6
    # What a weight of its own dtype alone would give is a hundred times as far off.
    assert relative_error(x.double() @ weight.to(NARROW).double().t(), exact) > 1e-4


@pytest.mark.parametrize("tokens", (600, 3))
def test_tokens_are_routed_by_a_float32_product_whichever_way_it_is_made(tokens):
    x = normal(tokens, 64, dtype=NARROW, seed=1)
    weight = normal(16, 64, dtype=torch.float32, seed=2)
    expected = kernels.moe.router_logits(x, weight)
    assert relative_error(kernels.gpu.router.router_logits(x, weight), expected) < 3e-6
    for wide in (x.float(), x.double()):
        assert torch.equal(kernels.gpu.router.router_logits(wide, weight), expected)
