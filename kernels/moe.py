"""Mixture of experts: which experts a token goes to, and the experts' gated MLPs.

Router rules: softmax over all experts (OLMoE, Qwen3-MoE); sigmoid with a selection bias and groups (DeepSeek-V3,
arXiv 2412.19437 section 2.1.2, as in LLaDA2.0); a bounded set of experts for each block of a canvas (LLaDA2.2).
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.fp8 import dequantize
from kernels.swiglu import swiglu


@dataclass(frozen=True, slots=True)
class Experts:
    """The weights of a layer's experts: of the dtype of its tokens, or e4m3 beside float32 scales.

    Scales are [experts, outputs], or [experts, outputs / 128, inputs / 128] (rounded up) for blocks of 128 x 128. Only
    weights are quantized: tokens are multiplied as they are, and the products are those of what the weights stand for.
    """

    gate_up: Tensor
    """[experts, 2 * inner, hidden], gate first."""
    down: Tensor
    """[experts, hidden, inner]"""
    gate_up_scale: Tensor | None = None
    down_scale: Tensor | None = None
    shared: bool = False
    """The last expert is not among those that are chosen, all tokens have it, with weight 1."""

    @property
    def count(self) -> int:
        """How many can be chosen."""
        return len(self.down) - self.shared


@dataclass(frozen=True, slots=True)
class Router:
    """The rule by which experts are chosen and weighted."""

    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    kept_groups: int = 1
    """Of `groups` equal stretches of experts those with the highest sum of their best two scores stay."""
    normalise: bool = True
    """The weights of a token's experts sum to `scale`."""
    scale: float = 1.0
    capacity: int = 0
    """How many experts all tokens of a block may reach together; 0: any. Excludes groups."""

    def __post_init__(self) -> None:
        if self.capacity and self.groups > 1:
            raise ValueError("a router has groups or a capacity for each block, not both")
        if not 1 <= self.kept_groups <= self.groups:
            raise ValueError(f"kept_groups {self.kept_groups} must be in [1, groups {self.groups}]")
        if self.capacity and self.capacity < self.top_k:
            raise ValueError(f"capacity {self.capacity} is less than top_k {self.top_k}")


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Return x [tokens, hidden] times weight [experts, hidden] float32 transposed, in float32 whatever x is.

    A near tie between experts must not be decided by rounding.
    """
    return F.linear(x.float(), weight)


def route(
    logits: Tensor, router: Router, bias: Tensor | None = None, blocks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (experts [tokens, top_k] int64, weights [tokens, top_k] float32), best first, the lowest id among equals.

    logits [tokens, experts]; bias [experts] float32 takes part in the choice, not in the weights. blocks [tokens] int64
    in [-1, tokens) is needed for a capacity: the block that a token votes in; a token of block -1 is padding, has no
    vote, and gets experts -1 with weights 0.
    """
    scores = logits.float()
    scores = scores.softmax(-1) if router.scoring == "softmax" else scores.sigmoid()
    choice = scores if bias is None else scores + bias
    tokens, experts = choice.shape
    if router.groups > 1:
        grouped = choice.view(tokens, router.groups, experts // router.groups)
        worth = grouped.topk(2, -1).values.sum(-1)
        kept = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, _highest(worth, router.kept_groups), True)
        choice = grouped.masked_fill(~kept[:, :, None], float("-inf")).view(tokens, experts)
    if router.capacity:
        if blocks is None:
            raise ValueError("a router with a capacity needs the blocks of its tokens")
        votes = choice.new_full((tokens + 1, experts), float("-inf"))
        votes.scatter_reduce_(0, (blocks + 1)[:, None].expand_as(choice), choice, "amax")
        open_ = torch.zeros_like(votes, dtype=torch.bool).scatter_(1, _highest(votes, router.capacity), True)
        choice = choice.masked_fill(~open_[blocks + 1], float("-inf"))
    ids = _highest(choice, router.top_k)
    weights = scores.gather(1, ids)
    if router.normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights * router.scale
    if blocks is not None:
        padding = (blocks < 0)[:, None]
        ids, weights = ids.masked_fill(padding, -1), weights.masked_fill(padding, 0.0)
    return ids, weights


def _highest(values: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` highest of each row, the lowest index among equals."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def experts(x: Tensor, ids: Tensor, weights: Tensor, stack: Experts) -> Tensor:
    """Return for each token the weighted sum of its experts' outputs, [tokens, hidden].

    x [tokens, hidden]; ids and weights from `route`. An id of -1 adds nothing. Sums are float32.
    """
    total = x.new_zeros(x.shape, dtype=torch.float32)
    for expert in ids.unique().tolist():
        if expert < 0:
            continue
        tokens, slots = (ids == expert).nonzero(as_tuple=True)
        total.index_add_(0, tokens, _pass(x[tokens], stack, expert).float() * weights[tokens, slots, None])
    if stack.shared:
        total += _pass(x, stack, -1).float()
    return total.to(x.dtype)


def _pass(x: Tensor, stack: Experts, expert: int) -> Tensor:
    """Return an expert's output for x [n, hidden]."""
    inner = swiglu(_product(x, stack.gate_up, stack.gate_up_scale, expert))
    return _product(inner, stack.down, stack.down_scale, expert)


def _product(x: Tensor, weight: Tensor, scale: Tensor | None, expert: int) -> Tensor:
    if scale is None:
        return x @ weight[expert].T
    return (x.float() @ dequantize(weight[expert], scale[expert], torch.float32).T).to(x.dtype)


def mix(
    x: Tensor, logits: Tensor, router: Router, stack: Experts, bias: Tensor | None = None, *, first: int = 0
) -> Tensor:
    """Return what `experts` makes of x [tokens, hidden] with what `route` chooses by logits [tokens, experts].

    The stack holds the experts from number `first` on, and the shared one behind them; those that lie elsewhere add
    nothing. The router has no capacity.
    """
    ids, weights = route(logits, router, bias)
    if stack.count < logits.shape[1]:
        ids = ids - first
        ids = ids.masked_fill((ids < 0) | (ids >= stack.count), -1)
    return experts(x, ids, weights, stack)
