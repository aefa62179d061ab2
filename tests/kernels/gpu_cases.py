"""Inputs of the fused twins' tests and benchmarks: awkward shapes on the CPU under Triton's interpreter, large ones too
on a GPU. Import this before `kernels.gpu`: Triton reads its environment when a kernel is defined."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.attention import AttentionPlan, plan_attention

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPES = (torch.float32, torch.bfloat16)
# The interpreter's matrix product takes a bfloat16 for an integer.
NARROW = torch.bfloat16 if ON_GPU else torch.float16

# Relative error ||out - reference|| / ||reference|| against the reference in float32 on the same inputs. bfloat16 keeps
# 8 bits: one rounding of the result is 1.7e-3 rms, a rounded intermediate (softmax weights, a gate) adds about as much.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}


def generator(seed: int) -> torch.Generator:
    return torch.Generator(device=DEVICE).manual_seed(seed)


def normal(*shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    drawn = torch.randn(shape, generator=generator(seed), device=DEVICE)
    return (drawn * scale).to(dtype)


def integers(low: int, high: int, shape: Sequence[int], seed: int) -> Tensor:
    return torch.randint(low, high, tuple(shape), generator=generator(seed), device=DEVICE)


def relative_error(out: Tensor, reference: Tensor) -> float:
    """Return ||out - reference|| / ||reference|| in float64; infinite if `out` holds what is not a number."""
    out, reference = out.double(), reference.double()
    difference = (out - reference).norm()
    if not bool(difference.isfinite()):
        return float("inf")
    return float(difference / reference.norm().clamp(min=1e-30))


@dataclass(frozen=True)
class AttentionCase:
    """Rows of (start, query length) and how they see, over shuffled pages."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    page: int
    rows: tuple[tuple[int, int], ...]
    rule: str
    """block4, block32: block-causal; causal; whole: bidirectional."""

    def ends(self) -> list[list[int]]:
        ends = []
        for start, query in self.rows:
            positions = range(start, start + query)
            if self.rule == "causal":
                ends.append([position + 1 for position in positions])
            elif self.rule == "whole":
                # A dual cache: the window sees the whole canvas, stale keys behind it included.
                ends.append([start + query + 5 for _ in positions])
            else:
                block = int(self.rule.removeprefix("block"))
                ends.append([(position // block + 1) * block for position in positions])
        return ends


ATTENTION = (
    AttentionCase("sdar denoise 32/8", 32, 8, 128, 32, ((64, 32), (32, 32)), "block32"),
    AttentionCase("fused commit 8/2", 8, 2, 128, 32, ((32, 64), (0, 64), (96, 64)), "block32"),
    AttentionCase("block 4, 28/4", 28, 4, 64, 16, ((20, 4), (0, 8), (4, 4)), "block4"),
    AttentionCase("12/2, head 80", 12, 2, 80, 8, ((5, 3), (11, 1)), "causal"),
    AttentionCase("10/2, head 96, ragged prefill", 10, 2, 96, 16, ((0, 37), (16, 2), (3, 19)), "causal"),
    AttentionCase("16/4 prefill", 16, 4, 64, 32, ((0, 96),), "block32"),
    AttentionCase("32/32 dual cache", 32, 32, 128, 16, ((10, 8), (40, 8)), "whole"),
    AttentionCase("head 256", 4, 2, 256, 16, ((30, 4), (0, 9)), "causal"),
    AttentionCase("one query, long context (split)", 4, 1, 64, 32, ((700, 1),), "causal"),
    AttentionCase("split, ragged", 4, 2, 64, 16, ((513, 5), (2, 4), (300, 1)), "causal"),
    AttentionCase("page 4, single query", 7, 1, 64, 4, ((0, 1),), "causal"),
)
GPU_ATTENTION = (
    AttentionCase("sdar-8b, 8 rows", 32, 8, 128, 32, ((1024, 32),) * 8, "block32"),
    AttentionCase("sdar-8b, 1 row", 32, 8, 128, 32, ((1024, 32),), "block32"),
    AttentionCase("sdar-8b, 1 row, fused commit", 32, 8, 128, 32, ((992, 64),), "block32"),
    AttentionCase("sdar-8b prefill", 32, 8, 128, 32, ((0, 1024), (512, 512)), "block32"),
    AttentionCase("dream 28/4", 28, 4, 128, 32, ((1000, 24), (0, 700)), "whole"),
    AttentionCase("llada 32/32", 32, 32, 128, 32, ((1024, 32), (0, 1280)), "whole"),
    AttentionCase("llada2 16/4, block 32", 16, 4, 128, 32, ((1024, 32),) * 5, "block32"),
    AttentionCase("40/8", 40, 8, 128, 16, ((640, 4), (16, 4)), "block4"),
    AttentionCase("12/2", 12, 2, 128, 64, ((2043, 1), (100, 33)), "causal"),
    AttentionCase("head 256, 8/4", 8, 4, 256, 32, ((1024, 64),), "whole"),
)

AttentionInputs = tuple[Tensor, Tensor, Tensor, AttentionPlan]


def attention_inputs(case: AttentionCase, dtype: torch.dtype, seed: int) -> AttentionInputs:
    """Return (q, k_pages, v_pages, plan): pages shuffled, everything no query may see filled with NaN."""
    ends = case.ends()
    needed = [-(-max(row) // case.page) for row in ends]
    order = torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(seed)).tolist()
    pages, used = [], 0
    for count in needed:
        pages.append(order[used : used + count])
        used += count
    tokens = sum(query for _, query in case.rows)
    shape = (len(order), case.page, case.kv_heads, case.head_dim)
    q = normal(tokens, case.heads, case.head_dim, dtype=dtype, seed=seed)
    k, v = normal(*shape, dtype=dtype, seed=seed + 1), normal(*shape, dtype=dtype, seed=seed + 2)
    visible = torch.zeros(len(order) * case.page, dtype=torch.bool)
    for row, numbers in zip(ends, pages, strict=True):
        for position in range(max(row)):
            visible[numbers[position // case.page] * case.page + position % case.page] = True
    hidden = (~visible).view(len(order), case.page).to(DEVICE)
    k[hidden], v[hidden] = float("nan"), float("nan")
    starts = [start for start, _ in case.rows]
    # A plan that hides nothing, but says so, has the groups that the reference needs on a GPU as well.
    begins = [[0] * len(row) for row in ends]
    plan = plan_attention(starts, ends, pages, case.page, device=DEVICE, dtype=dtype, visible_start=begins)
    return q, k, v, replace(plan, visible_start=None)


def widened(plan: AttentionPlan) -> AttentionPlan:
    """Return the plan with its masks in float32, for a reference in float32."""
    groups = tuple(replace(group, bias=None if group.bias is None else group.bias.float()) for group in plan.groups)
    return replace(plan, groups=groups)
