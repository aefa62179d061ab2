"""Weights of 8 bits: how exact they are, the fused twins, and a model that runs on them."""

import pytest
import torch

import kernels
from kernels.fp8 import FP8, FP8_MAX, fp8_linear, fp8_mlp, quantize_rows
from kernels.linear import linear
from kernels.swiglu import swiglu
from tests.fleet.models import write_tiny_model
from tests.kernels.gpu_cases import DEVICE, ON_GPU, normal, relative_error
from worker.assembly import assemble
from worker.models import load_model
from worker.models.fp8 import quantize
from worker.models.layers import Decoder, Linear
from worker.settings import WorkerSettings

pytest.importorskip("triton")

import kernels.gpu.fp8

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

DTYPES = (torch.float32, torch.bfloat16)
# e4m3 keeps 4 bits: half a unit in the last place is 1/16 of the value at most, 1/28 of it on average.
ROUNDING = 1 / 16


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_rounded_to_four_bits_under_its_own_scale(dtype):
    x = (
        normal(7, 100, dtype=dtype, seed=1)
        * torch.tensor([1e-3, 1, 1e4, 5, 0, 1, 1], device=DEVICE, dtype=dtype)[:, None]
    )
    values, scale = quantize_rows(x)
    assert values.dtype == FP8
    back = values.float() * scale
    least = x.float().abs().amax(-1, keepdim=True) * 2**-10 / FP8_MAX
    assert bool(((back - x.float()).abs() <= x.float().abs() * ROUNDING + 2**6 * least).all())
    assert bool((values.float().abs().amax(-1)[[0, 1, 2, 3, 5, 6]] == FP8_MAX).all())
    assert bool((back[4] == 0).all())


@pytest.mark.parametrize("tokens, inputs", [(1, 64), (5, 300), (3, 1025)] + ([(1024, 12288)] if ON_GPU else []))
@pytest.mark.parametrize("gated", [False, True])
def test_rows_are_quantized_by_the_twin_as_by_the_reference(tokens, inputs, gated):
    x = normal(tokens, 2 * inputs if gated else inputs, dtype=torch.float32, seed=2)
    ours, scale = kernels.gpu.fp8._quantize(x, gated=gated)
    values, expected = quantize_rows(swiglu(x) if gated else x)
    assert torch.allclose(scale, expected, rtol=1e-6)
    # On the border between two values a quotient may fall to either side; the interpreter cuts instead of rounding.
    assert relative_error(ours.float(), values.float()) < (2e-3 if ON_GPU else 2 * ROUNDING)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="the product is PyTorch's own, for GPUs")
@pytest.mark.parametrize("tokens", [1, 16, 33, 1024])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_products_on_the_gpu_are_those_of_the_reference(tokens, dtype, bias):
    x = normal(tokens, 512, dtype=dtype, seed=3)
    gate_up, gate_scale = quantize_rows(normal(2 * 768, 512, dtype=dtype, seed=4))
    down, down_scale = quantize_rows(normal(512, 768, dtype=dtype, seed=5))
    offset = normal(2 * 768, dtype=dtype, seed=6) if bias else None
    ours = kernels.gpu.fp8.fp8_linear(x, gate_up, gate_scale[:, 0], offset)
    assert relative_error(ours, fp8_linear(x, gate_up, gate_scale[:, 0], offset)) < 6e-3
    arguments = (x, gate_up, gate_scale[:, 0].contiguous(), down, down_scale[:, 0].contiguous())
    assert relative_error(kernels.gpu.fp8.fp8_mlp(*arguments), fp8_mlp(*arguments)) < 3e-2


def test_a_product_is_off_by_no_more_than_its_roundings():
    x, weight = normal(20, 512, dtype=torch.float32, seed=7), normal(256, 512, dtype=torch.float32, seed=8)
    values, scale = quantize_rows(weight)
    assert relative_error(fp8_linear(x, values, scale[:, 0]), linear(x, weight)) < ROUNDING


def test_a_model_keeps_its_shape_and_nearly_its_logits(tmp_path):
    plain = load_model(write_tiny_model(tmp_path / "model"))
    small = load_model(tmp_path / "model")
    assert isinstance(small.module, Decoder)
    assert isinstance(plain.module, Decoder)
    linears = [module for module in small.module.modules() if isinstance(module, Linear)]
    assert quantize(small.module) == len(linears)
    assert all(each.weight.dtype == FP8 and each.scale is not None for each in linears)
    x = normal(9, 64, dtype=torch.float32, seed=9).cpu()
    for ours, wide in zip(small.module.layers, plain.module.layers, strict=True):
        assert relative_error(ours.mlp.forward(x), wide.mlp.forward(x)) < 2 * ROUNDING


def test_a_worker_serves_on_weights_of_8_bits(tmp_path):
    folder = write_tiny_model(tmp_path / "model")
    assembly = assemble(WorkerSettings(model=str(folder), weights="fp8", device="cpu", threads=1, num_pages=8))
    assert assembly.engine.idle
