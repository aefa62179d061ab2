"""Weights of 8 bits: how exact they are, the fused twins, and a model that runs on them."""

import pytest
import torch

import kernels
from kernels.fp8 import (
    BLOCK,
    FP8,
    FP8_MAX,
    dequantize,
    fp8_linear,
    fp8_product,
    quantize_rows,
    rms_norm_fp8,
    swiglu_fp8,
)
from kernels.linear import linear
from kernels.rms_norm import rms_norm
from kernels.swiglu import swiglu
from tests.fleet.models import write_tiny_model
from tests.kernels.gpu_cases import DEVICE, ON_GPU, normal, relative_error
from worker.assembly import assemble
from worker.models import load_model
from worker.models.fp8 import quantize
from worker.models.layers import Decoder, Linear, block_scales
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
@pytest.mark.parametrize("made_by", ["rows", "gate", "norm", "norm of a sum"])
@pytest.mark.parametrize("group", [0, BLOCK])
def test_rows_are_quantized_by_the_twin_as_by_the_reference(tokens, inputs, made_by, group):
    x = normal(tokens, 2 * inputs if made_by == "gate" else inputs, dtype=torch.float32, seed=2)
    total = expected_total = None
    if made_by == "rows":
        ours, expected = kernels.gpu.fp8.quantize_rows(x, group), quantize_rows(x, group)
    elif made_by == "gate":
        ours, expected = kernels.gpu.fp8.swiglu_fp8(x, group), swiglu_fp8(x, group)
    else:
        weight = normal(inputs, dtype=torch.float32, seed=10)
        residual = normal(tokens, inputs, dtype=torch.float32, seed=11) if made_by == "norm of a sum" else None
        ours, total = kernels.gpu.fp8.rms_norm_fp8(x, weight, 1e-6, residual, group)
        expected, expected_total = rms_norm_fp8(x, weight, 1e-6, residual, group)
        assert torch.equal(total, expected_total)
    assert ours.values.shape == (tokens, inputs)
    assert ours.scale.shape == expected.scale.shape
    assert torch.allclose(ours.scale, expected.scale, rtol=1e-5)
    # On the border between two values a quotient may fall to either side; the interpreter cuts instead of rounding.
    assert relative_error(ours.values.float(), expected.values.float()) < (2e-3 if ON_GPU else 2 * ROUNDING)


@pytest.mark.parametrize("inputs", [64, 128, 300])
def test_each_group_of_a_row_has_a_scale_of_its_own(inputs):
    x = normal(5, inputs, dtype=torch.float32, seed=12)
    x[:, :100] *= 1e4
    values, scale = quantize_rows(x, BLOCK)
    assert scale.shape == (5, -(-inputs // BLOCK))
    back = values.float() * scale.repeat_interleave(BLOCK, 1)[:, :inputs]
    assert bool(((back - x).abs() <= x.abs() * ROUNDING + scale.repeat_interleave(BLOCK, 1)[:, :inputs] * 2**-9).all())


def test_the_quantized_norm_and_gate_are_the_plain_ones_quantized():
    x, weight = normal(3, 96, dtype=torch.float32, seed=13), normal(96, dtype=torch.float32, seed=14)
    small, total = rms_norm_fp8(x, weight, 1e-6, x)
    normed, expected = rms_norm(x, weight, 1e-6, x)
    assert torch.equal(total, expected)
    assert relative_error(small.values.float() * small.scale, normed) < ROUNDING
    gated = swiglu_fp8(x)
    assert relative_error(gated.values.float() * gated.scale, swiglu(x)) < ROUNDING


@pytest.mark.parametrize("outputs, inputs", [(256, 128), (200, 300)])
def test_a_product_of_blocks_is_the_product_of_what_they_stand_for(outputs, inputs):
    """To the last bits with the rounded tokens; against the exact ones, off by the tokens' rounding."""
    x, weight, scale = normal(7, inputs, dtype=torch.float32, seed=15), *_blocks(outputs, inputs)
    truth = dequantize(weight, scale, torch.float32)
    for row in range(0, outputs, BLOCK):
        for column in range(0, inputs, BLOCK):
            part = (slice(row, row + BLOCK), slice(column, column + BLOCK))
            assert torch.equal(truth[part], weight[part].float() * scale[row // BLOCK, column // BLOCK])
    small = quantize_rows(x, BLOCK)
    rounded = small.values.float() * small.scale.repeat_interleave(BLOCK, 1)[:, :inputs]
    bias = normal(outputs, dtype=torch.float32, seed=16)
    assert relative_error(fp8_linear(x, weight, scale, bias), linear(rounded, truth, bias)) < 1e-6
    assert relative_error(fp8_linear(x, weight, scale, bias), linear(x, truth, bias)) < ROUNDING


def _blocks(outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight and the scales of its blocks, orders of magnitude apart, laid out as they are loaded."""
    wide = normal(outputs, inputs, dtype=torch.float32, seed=17)
    scale = block_scales(outputs, inputs, device=DEVICE)
    scale.copy_(normal(*scale.shape, dtype=torch.float32, seed=18).exp())
    return (wide / wide.abs().max() * FP8_MAX).to(FP8), scale


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
    wide = fp8_linear(x, gate_up, gate_scale[:, 0])
    small = kernels.gpu.fp8.swiglu_fp8(wide)
    ours = kernels.gpu.fp8.fp8_product(*small, down, down_scale[:, 0].contiguous(), None, dtype)
    assert relative_error(ours, fp8_product(*swiglu_fp8(wide), down, down_scale[:, 0], None, dtype)) < 6e-3


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="the product is PyTorch's own, for GPUs")
@pytest.mark.parametrize("tokens", [1, 5, 33, 1024])
@pytest.mark.parametrize("outputs, inputs", [(256, 512), (1024, 2048), (208, 1024), (384, 384), (200, 300)])
@pytest.mark.parametrize("bias", [False, True])
def test_products_of_blocks_on_the_gpu_are_those_of_the_reference(tokens, outputs, inputs, bias):
    x, weight, scale = normal(tokens, inputs, dtype=torch.bfloat16, seed=19), *_blocks(outputs, inputs)
    offset = normal(outputs, dtype=torch.bfloat16, seed=20) if bias else None
    ours = kernels.gpu.fp8.fp8_linear(x, weight, scale, offset)
    assert relative_error(ours, fp8_linear(x, weight, scale, offset)) < 6e-3


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
