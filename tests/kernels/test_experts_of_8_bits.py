"""Experts whose weights have 8 bits: products of what they stand for, in the reference and in its twin."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.gpu_cases import DEVICE, NARROW, ON_GPU, TOLERANCE, integers, normal, relative_error

pytest.importorskip("triton")

import triton
import triton.language as tl

import kernels.gpu.moe
from kernels.fp8 import BLOCK, FP8, FP8_MAX, dequantize, quantize_rows
from kernels.gpu.moe import Tile, multiply
from kernels.moe import Experts, Router, experts, mix, route

# The interpreter computes with numpy, which warns where a GPU silently makes an infinity or a NaN.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

KINDS = ("outputs", "blocks")
kinds = pytest.mark.parametrize("kind", KINDS)
dtypes = pytest.mark.parametrize("dtype", (torch.float32, NARROW), ids=lambda dtype: str(dtype).removeprefix("torch."))


def in_8_bits(weight: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return weight [experts, outputs, inputs] as e4m3 with its scales."""
    count, outputs, inputs = weight.shape
    if kind == "outputs":
        small = quantize_rows(weight.flatten(0, 1))
        return small.values.view(weight.shape), small.scale.view(count, outputs)
    wide = torch.nn.functional.pad(weight.float(), (0, -inputs % BLOCK, 0, -outputs % BLOCK))
    parts = wide.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))
    # Neighbours differ much, so that the wrong one's scale shows.
    scale = parts.abs().amax((2, 4)) / FP8_MAX * (1 + integers(0, 4, parts.shape[:2] + parts.shape[3:4], 9))
    values = (parts / scale[:, :, None, :, None]).flatten(3).flatten(1, 2)[:, :outputs, :inputs]
    return values.to(FP8).contiguous(), scale


def a_stack(count: int, hidden: int, inner: int, kind: str, *, shared: bool = False) -> Experts:
    gate_up = normal(count + shared, 2 * inner, hidden, dtype=torch.float32, seed=2, scale=hidden**-0.5)
    down = normal(count + shared, hidden, inner, dtype=torch.float32, seed=3, scale=inner**-0.5)
    # Outputs of one weight are larger than others by far.
    gate_up *= normal(count + shared, 2 * inner, 1, dtype=torch.float32, seed=4).exp()
    (gate_up, gate_up_scale), (down, down_scale) = in_8_bits(gate_up, kind), in_8_bits(down, kind)
    return Experts(gate_up, down, gate_up_scale, down_scale, shared)


def widened(stack: Experts) -> Experts:
    """Return what the weights stand for."""
    assert stack.gate_up_scale is not None and stack.down_scale is not None
    pairs = (stack.gate_up, stack.gate_up_scale), (stack.down, stack.down_scale)
    gate_up, down = (
        torch.stack([dequantize(*each, torch.float32) for each in zip(*pair, strict=True)]) for pair in pairs
    )
    return Experts(gate_up, down, shared=stack.shared)


_widen = kernels.gpu.moe._widen


@triton.jit
def _widen_all(small_ptr, wide_ptr):
    place = tl.arange(0, 256)
    tl.store(wide_ptr + place, _widen(tl.load(small_ptr + place), wide_ptr.dtype.element_ty))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32) if ON_GPU else (NARROW, torch.float32))
def test_each_number_of_8_bits_is_widened_to_itself(dtype):
    small = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(FP8)
    wide = torch.empty(256, dtype=dtype, device=DEVICE)
    _widen_all[(1,)](small, wide)
    finite = small.float().isfinite()
    assert finite.sum() == 254
    assert torch.equal(wide[finite].float(), small[finite].float())


@kinds
@pytest.mark.parametrize("shared", (False, True))
def test_the_reference_multiplies_by_what_the_weights_stand_for(kind, shared):
    stack = a_stack(4, 100, 70, kind, shared=shared)
    x = normal(9, 100, dtype=torch.float32, seed=1)
    ids, weights = route(normal(9, 4, dtype=torch.float32, seed=5), Router(top_k=2))
    torch.testing.assert_close(experts(x, ids, weights, stack), experts(x, ids, weights, widened(stack)))


@dtypes
@kinds
@pytest.mark.parametrize(
    "tokens, count, hidden, inner, top_k, shared",
    [
        (1, 4, 64, 32, 2, False),
        (5, 9, 100, 70, 3, True),
        (17, 3, 256, 192, 2, False),
        (50, 3, 128, 64, 2, True),
        (40, 2, 384, 128, 1, True),
    ]
    + (
        [(32, 256, 2048, 512, 8, True), (1024, 256, 2048, 512, 8, True), (2304, 64, 1024, 768, 8, False)]
        if ON_GPU
        else []
    ),
)
def test_the_twin_multiplies_by_what_the_weights_stand_for(dtype, kind, tokens, count, hidden, inner, top_k, shared):
    stack = a_stack(count, hidden, inner, kind, shared=shared)
    x = normal(tokens, hidden, dtype=dtype, seed=1)
    ids, weights = route(normal(tokens, count, dtype=torch.float32, seed=5), Router(top_k=top_k))
    ids[-1, 0], weights[-1, 0] = -1, 0.0
    expected = experts(x.float(), ids, weights, widened(stack))
    # Gate, product and share are rounded one after the other, as with weights of more bits.
    assert relative_error(kernels.gpu.moe.experts(x, ids, weights, stack), expected) < 1.5 * TOLERANCE[dtype]


@kinds
@pytest.mark.parametrize("first, shared", [(0, True), (4, False)])
def test_the_choice_of_experts_takes_those_of_8_bits(kind, first, shared):
    stack, router = a_stack(4, 128, 64, kind, shared=shared), Router(2, "sigmoid")
    x, logits = normal(21, 128, dtype=NARROW, seed=1), normal(21, 8, dtype=torch.float32, seed=2)
    out = kernels.gpu.moe.mix(x, logits, router, stack, first=first)
    expected = mix(x.float(), logits, router, widened(stack), first=first)
    assert relative_error(out, expected) < 1.5 * TOLERANCE[NARROW]


TILES = (
    Tile(16, 64, 128, 64, 4, 5),
    Tile(16, 64, 128, 128, 4, 3),
    Tile(32, 64, 128, 64, 4, 4),
    Tile(64, 64, 128, 64, 4, 3),
    Tile(32, 64, 64, 64, 4, 5),
    Tile(32, 128, 128, 128, 8, 3),
    Tile(64, 64, 128, 128, 4, 3),
    Tile(64, 64, 128, 64, 8, 4, registers=128),
    Tile(128, 64, 128, 64, 8, 4),
)


@kinds
@pytest.mark.parametrize("tile", (*TILES, None), ids=str)
def test_however_products_are_cut_they_are_the_same(kind, tile):
    """Blocks of 256 x 256 weights have scales that differ, and an expert has several tiles of tokens."""
    stack = a_stack(3, 256, 256, kind, shared=True)
    x, ids = (
        normal(70, 256, dtype=NARROW, seed=1),
        torch.stack((integers(0, 3, (70,), 4), integers(-1, 1, (70,), 5)), 1),
    )
    weights = normal(70, 2, dtype=torch.float32, seed=5).sigmoid()
    expected = experts(x.float(), ids, weights, widened(stack))
    assert relative_error(multiply(x, ids, weights, stack, tile), expected) < 1.5 * TOLERANCE[NARROW]


@pytest.mark.parametrize("tokens", (8, 64, 256, 2000))
@kinds
def test_tiles_that_are_chosen_fit_the_blocks(kind, tokens):
    stack = a_stack(8, 256, 128, kind)
    tile = kernels.gpu.moe._fit_together(normal(tokens, 256, dtype=NARROW, seed=1), 2 * tokens, stack)
    if not ON_GPU or torch.cuda.get_device_capability() >= (9, 0):
        assert tile is not None
        assert tokens / 4 <= tile.tokens or tile.tokens == 64


def test_scales_that_do_not_go_with_their_weights_are_refused():
    stack = a_stack(4, 128, 64, "outputs")
    assert stack.down_scale is not None
    x, ids, weights = (
        normal(3, 128, dtype=NARROW, seed=1),
        integers(0, 4, (3, 2), 2),
        normal(3, 2, dtype=torch.float32, seed=3),
    )
    with pytest.raises(ValueError, match=r"scales \[4, 127\] do not go with experts \[4, 128, 64\]"):
        kernels.gpu.moe.experts(x, ids, weights, replace(stack, down_scale=stack.down_scale[:, 1:]))
