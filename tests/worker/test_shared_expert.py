"""A mixture's shared expert: its weights lie behind the others', and one product of all experts has it too."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kernels
from kernels.fp8 import quantize_rows
from kernels.moe import Experts, Router
from kernels.swiglu import swiglu
from worker.models.layers import LayerShape, MoeMLP, MoeShape

MOE = MoeShape(experts=6, inner=16, router=Router(2, "sigmoid", 2, 1, True, 2.5), shared_inner=16, selection_bias=True)
SHAPE = LayerShape(hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=64, eps=1e-6)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each mixture had its shared expert among the others."""
    found: list[bool] = []
    mix = kernels.mix

    def note(x: Tensor, logits: Tensor, router: Router, stack: Experts, *args: Any, **kwargs: Any) -> Tensor:
        found.append(stack.shared)
        return mix(x, logits, router, stack, *args, **kwargs)

    monkeypatch.setattr(kernels, "mix", note)
    return found


def mixture(moe: MoeShape = MOE) -> MoeMLP:
    mlp = MoeMLP(SHAPE, moe, device=torch.device("cpu"), dtype=torch.float32)
    torch.manual_seed(1)
    for parameter in mlp.parameters():
        parameter.normal_(0, 0.3)
    return mlp


def expected(mlp: MoeMLP, x: Tensor) -> Tensor:
    """Return what each token's experts and the shared one add up to, one after the other, in float64."""
    assert mlp.shared is not None
    ids, weights = kernels.route(x @ mlp.router.T, mlp.rule, mlp.selection_bias)
    wide = x.double()
    total = gated(wide, mlp.shared.gate_up.weight, mlp.shared.down.weight)
    for token, (chosen, shares) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
        for expert, share in zip(chosen, shares, strict=True):
            total[token] += share * gated(wide[token : token + 1], mlp.gate_up[expert], mlp.down[expert])[0]
    return total


def gated(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return swiglu(x @ gate_up.double().T) @ down.double().T


def tokens() -> Tensor:
    return torch.randn(9, 32, generator=torch.Generator().manual_seed(2))


def test_a_shared_expert_of_the_others_size_is_multiplied_with_them(launched: list[bool]) -> None:
    mlp = mixture()
    torch.testing.assert_close(mlp.forward(tokens()).double(), expected(mlp, tokens()), rtol=1e-5, atol=1e-5)
    assert launched == [True]


def test_a_shared_expert_of_another_size_is_multiplied_apart(launched: list[bool]) -> None:
    mlp = mixture(replace(MOE, shared_inner=24))
    torch.testing.assert_close(mlp.forward(tokens()).double(), expected(mlp, tokens()), rtol=1e-5, atol=1e-5)
    assert launched == [False]


def move_gate(mlp: MoeMLP) -> None:
    assert mlp.shared is not None
    mlp.shared.gate_up.weight = nn.Parameter(mlp.shared.gate_up.weight.clone() * 1.5, requires_grad=False)


def move_down(mlp: MoeMLP) -> None:
    assert mlp.shared is not None
    mlp.shared.down.weight = nn.Parameter(mlp.shared.down.weight.clone() * 1.5, requires_grad=False)


def move_experts(mlp: MoeMLP) -> None:
    mlp.gate_up = nn.Parameter(mlp.gate_up.clone() * 1.5, requires_grad=False)


def take_another_of_the_same_memory(mlp: MoeMLP) -> None:
    assert mlp.shared is not None
    mlp.shared.down.weight = nn.Parameter(mlp.down[2], requires_grad=False)


@pytest.mark.parametrize("move", (move_gate, move_down, move_experts, take_another_of_the_same_memory))
def test_weights_that_were_put_elsewhere_are_the_ones_that_count(
    launched: list[bool], move: Callable[[MoeMLP], None]
) -> None:
    mlp = mixture()
    before = mlp.forward(tokens())
    move(mlp)
    after = mlp.forward(tokens())
    torch.testing.assert_close(after.double(), expected(mlp, tokens()), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(after, before)
    assert launched == [True, False]


def test_a_shared_expert_of_8_bits_is_multiplied_apart(launched: list[bool]) -> None:
    mlp = mixture()
    assert mlp.shared is not None
    for linear in (mlp.shared.gate_up, mlp.shared.down):
        weight, scale = quantize_rows(linear.weight)
        linear.weight = nn.Parameter(weight, requires_grad=False)
        linear.scale = nn.Parameter(scale[:, 0].contiguous(), requires_grad=False)
    mlp.forward(tokens())
    assert launched == [False]
