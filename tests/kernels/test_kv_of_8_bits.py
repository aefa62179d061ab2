"""Pages of 8 bits: how exact they are, and the fused twins that write and read them."""

import pytest
import torch

from kernels.attention import attention
from kernels.fp8 import FP8
from kernels.kv_write import kv_write
from kernels.rope import rope_tables
from kernels.rope_write import rope_write
from tests.kernels.gpu_cases import (
    ATTENTION,
    DEVICE,
    GPU_ATTENTION,
    NARROW,
    ON_GPU,
    TOLERANCE,
    AttentionCase,
    attention_inputs,
    normal,
    relative_error,
    widened,
)

pytest.importorskip("triton")

import kernels.gpu.attention
import kernels.gpu.kv_write
import kernels.gpu.rope

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

ROUNDING = 1 / 16
SLOTS = torch.tensor([7, 0, 47, 13, 8], device=DEVICE)


def _pages(heads: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return pages and scales with something in them already."""
    values = normal(2, 6, 8, heads, head_dim, dtype=torch.float32, seed=8).to(FP8)
    return values[0].clone(), values[1].clone(), normal(2, 6, 8, heads, dtype=torch.float32, seed=9).abs()


def _wide(pages: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return pages.float() * scale[..., None]


def _back(k_pages: torch.Tensor, v_pages: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return torch.stack((_wide(k_pages, scales[0]), _wide(v_pages, scales[1]))).flatten(1, 2)


def test_each_head_of_each_slot_is_rounded_under_a_scale_of_its_own():
    k, v = normal(2, 5, 3, 80, dtype=torch.float32, seed=1)
    k *= torch.tensor([1e-4, 1.0, 1e4], device=DEVICE)[:, None]
    k_pages, v_pages, scales = _pages(3, 80)
    before = _back(k_pages, v_pages, scales)
    kv_write(k, v, k_pages, v_pages, SLOTS, scales)
    after = _back(k_pages, v_pages, scales)
    for number, wide in enumerate((k, v)):
        least = wide.abs().amax(-1, keepdim=True) * 2**-10
        assert bool(((after[number, SLOTS] - wide).abs() <= wide.abs() * ROUNDING + least).all())
    others = torch.ones(48, dtype=torch.bool, device=DEVICE).index_fill_(0, SLOTS, False)
    assert torch.equal(after[:, others], before[:, others])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "heads, kv_heads, head_dim, width", [(28, 4, 64, 64), (12, 2, 80, 80), (16, 4, 128, 64), (4, 4, 96, 96)]
)
def test_the_twin_that_rotates_writes_what_the_reference_does(dtype, heads, kv_heads, head_dim, width):
    qkv = normal(5, heads + 2 * kv_heads, head_dim, dtype=dtype, seed=1)
    weight = normal(heads + kv_heads, head_dim, dtype=dtype, seed=2)
    inv_freq = 1.0 / 1e4 ** (torch.arange(0, width, 2, device=DEVICE).float() / width)
    cos, sin = rope_tables(torch.tensor([0, 7, 1000, 31, 32], device=DEVICE), inv_freq, dtype)
    ours, theirs = _pages(kv_heads, head_dim), _pages(kv_heads, head_dim)
    q = kernels.gpu.rope.rope_write(qkv, cos, sin, weight, 1e-6, ours[0], ours[1], SLOTS, ours[2])
    expected = rope_write(qkv, cos, sin, weight, 1e-6, theirs[0], theirs[1], SLOTS, theirs[2])
    assert relative_error(q, expected) < 2 * TOLERANCE[dtype]
    assert torch.allclose(ours[2], theirs[2], rtol=1e-5 if dtype is torch.float32 else 1e-2)
    # On the border between two values a quotient may fall to either side; the interpreter cuts instead of rounding.
    assert relative_error(_back(*ours), _back(*theirs)) < (ROUNDING / 4 if ON_GPU else ROUNDING)


@pytest.mark.parametrize("case", ATTENTION + (GPU_ATTENTION if ON_GPU else ()), ids=lambda case: case.name)
def test_attention_reads_pages_of_8_bits_as_the_reference_does(case: AttentionCase):
    q, k, v, plan = attention_inputs(case, NARROW, seed=3)
    scales = torch.zeros((2, *k.shape[:3]), device=DEVICE)
    small = torch.zeros((2, *k.shape), dtype=FP8, device=DEVICE)
    every = torch.arange(k.shape[0] * k.shape[1], device=DEVICE)
    kv_write(k.flatten(0, 1), v.flatten(0, 1), small[0], small[1], every, scales)
    out = kernels.gpu.attention.attention(q, small[0], small[1], plan, case.head_dim**-0.5, scales)
    # The reference multiplies hidden values by zero, so for it they must be finite.
    wide = [_wide(pages, scale).nan_to_num(0) for pages, scale in zip(small, scales, strict=True)]
    exact = attention(q.float(), wide[0], wide[1], widened(plan), case.head_dim**-0.5)
    assert relative_error(out, exact) < 1.5 * TOLERANCE[NARROW]
    finite = [pages.float().nan_to_num(0).to(FP8) for pages in small]
    scaled = attention(q.float(), finite[0], finite[1], widened(plan), case.head_dim**-0.5, scales.nan_to_num(0))
    assert relative_error(scaled, exact) < 1e-5
