"""A model whose experts are put into 8 bits when it is loaded: what they are, who computes them, and how far answers
move."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kernels
from kernels.attention import plan_attention
from kernels.fp8 import FP8, dequantize
from kernels.moe import Experts, Router
from shared.commands import Generate, Limits
from shared.events import Finished
from tests.goldens.folder import find_folders
from tests.worker.parallel.ranks import SilentPeers, shared_model
from tests.worker.parallel.test_groups import vector
from tests.worker.test_families import MOE, load_with_mask, write_oracle
from tests.worker.texts import NoText
from worker.engine.engine import Engine
from worker.engine.ports import Arrival, Inbox
from worker.engine.scheduler import BatchLimits, CacheShape
from worker.models import LoadedModel, load_model
from worker.models.checkpoint import read_checkpoint
from worker.models.fp8 import quantize, quantize_experts
from worker.models.layers import Decoder, ForwardContext, LayerShape, LowRank, MoeMLP, MoeShape
from worker.parallel.loading import load_share
from worker.runner import Runner

CPU = torch.device("cpu")
ROUNDING = 1 / 16
GOLDENS = {folder.name: folder.path for folder in find_folders()}
MIXTURE = MoeShape(6, 32, Router(2, "sigmoid", 2, 1, True, 2.5), shared_inner=32, selection_bias=True)


def a_decoder(moe: MoeShape = MIXTURE) -> Decoder:
    shape = LayerShape(64, 4, 2, 16, 96, 1e-6, moe=moe)
    decoder = Decoder(shape, 2, 100, 1e4, False, device=CPU, dtype=torch.float32)
    draw = torch.Generator().manual_seed(1)
    for parameter in decoder.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.3)
    return decoder


def mixtures(decoder: object) -> list[MoeMLP]:
    assert isinstance(decoder, Decoder)
    return [layer.mlp for layer in decoder.layers if isinstance(layer.mlp, MoeMLP)]


def stands_for(stack: Experts) -> list[Tensor]:
    assert stack.gate_up_scale is not None and stack.down_scale is not None
    pairs = (stack.gate_up, stack.gate_up_scale), (stack.down, stack.down_scale)
    return [torch.stack([dequantize(*each, torch.float32) for each in zip(*pair, strict=True)]) for pair in pairs]


@torch.inference_mode()
def test_experts_are_rounded_to_four_bits_output_by_output_and_a_shared_one_stays_behind_them():
    decoder, wide = a_decoder(), a_decoder()
    assert quantize(decoder) == 2 * 2 + 2 * 2 + 2  # attention, shared experts, mixtures
    for mlp, before in zip(mixtures(decoder), mixtures(wide), strict=True):
        stack = mlp.stack()
        assert stack.shared and len(stack.down) == 7 and stack.down.dtype == FP8
        assert mlp.router.dtype == torch.float32 and torch.equal(mlp.router, before.router)
        for small, exact in zip(stands_for(stack), (before.stack().gate_up, before.stack().down), strict=True):
            least = exact.abs().amax(-1, keepdim=True) * 2**-10 / 448
            assert bool(((small - exact).abs() <= exact.abs() * ROUNDING + 2**6 * least).all())
        assert mlp.shared is not None and mlp.shared.down.scale is not None
        held = {part.untyped_storage().data_ptr() for part in (mlp.gate_up, mlp.shared.gate_up.weight)}
        assert len(held) == 1 and mlp.gate_up.untyped_storage().nbytes() == stack.gate_up.numel()


@torch.inference_mode()
def test_weights_alone_are_rounded_tokens_are_not():
    decoder = a_decoder()
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(2))
    quantize(decoder)
    for mlp in mixtures(decoder):
        gate_up, down = stands_for(mlp.stack())
        logits = kernels.router_logits(x, mlp.router)
        exact = kernels.mix(x, logits, mlp.rule, Experts(gate_up, down, shared=True), mlp.selection_bias)
        torch.testing.assert_close(mlp.forward(x), exact)


@torch.inference_mode()
def test_quantizing_twice_changes_nothing():
    decoder = a_decoder()
    count = quantize(decoder)
    before = [mlp.stack() for mlp in mixtures(decoder)]
    assert quantize(decoder) == count
    assert all(
        torch.equal(a.down.float(), b.stack().down.float()) for a, b in zip(before, mixtures(decoder), strict=True)
    )


@torch.inference_mode()
@pytest.mark.parametrize("inner", (32, 48))
def test_adapters_leave_a_shared_expert_to_its_linears(inner: int):
    decoder = a_decoder(replace(MIXTURE, shared_inner=inner))
    quantize(decoder)
    plan = plan_attention([0], [[9] * 9], [[0]], 9, device=CPU, dtype=torch.float32)
    context = ForwardContext(plan, torch.arange(9), (), lora=LowRank({}, ()))
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(2))
    for mlp in mixtures(decoder):
        together, apart = mlp.forward(x), mlp.forward(x, context)
        # Its linears quantize their tokens too.
        assert (together - apart).norm() < 2 * ROUNDING * together.norm()
        assert torch.equal(together, apart) == (inner == 48)


@torch.inference_mode()
def test_experts_with_odd_sides_stay_as_they_are():
    decoder = a_decoder(replace(MIXTURE, inner=24, shared_inner=24))
    quantize(decoder)
    assert all(mlp.stack().down.dtype == torch.float32 for mlp in mixtures(decoder))


def test_ranks_that_share_the_experts_add_up_to_all_of_them():
    folder = GOLDENS["llada_moe"]
    whole, shares = (
        load_model(folder),
        [
            load_share(read_checkpoint(folder), SilentPeers(rank, 2), device=CPU, dtype=torch.float32)
            for rank in range(2)
        ],
    )
    for model in (whole, *shares):
        assert isinstance(model.module, Decoder)
        quantize(model.module)
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(2))
    for mlp, *parts in zip(*(mixtures(model.module) for model in (whole, *shares)), strict=True):
        assert [len(part.down) for part in parts] == [len(mlp.down) // 2] * 2
        assert all(part.down_scale is not None for part in parts)
        torch.testing.assert_close(parts[0].forward(x) + parts[1].forward(x), mlp.forward(x))


@pytest.mark.parametrize("name", ("llada2", "llada_moe"))
def test_processes_that_share_a_model_quantize_their_experts(name: str):
    whole = load_model(GOLDENS[name])
    assert isinstance(whole.module, Decoder)
    quantize(whole.module)
    with shared_model(GOLDENS[name], weights="fp8") as model:
        assert isinstance(model.module, Decoder)
        quantize(model.module)
        wanted, found = (torch.tensor(embedding(each)) for each in (whole, model))
    # Each rank's half of the columns of a linear has scales of its own, and a near tie may choose another expert.
    assert (found - wanted).norm() < 4 * ROUNDING * wanted.norm()


def embedding(model: LoadedModel) -> list[float]:
    engine = Engine(model.spec, CacheShape(8, 32), BatchLimits(4, 64), Runner(model, 32, 8), lambda *_: NoText())
    asked = Generate(id="e", model="m", prompt=tuple(range(20, 44)), limits=Limits(max_tokens=1), embed=True)
    inbox = Inbox(arrivals=[Arrival(asked, 1)])
    while True:
        for event in engine.step(inbox).events:
            if isinstance(event, Finished):
                return vector(event)
        inbox = Inbox()


def hidden(model: LoadedModel, texts: list[list[int]], block: int) -> Tensor:
    """Return the hidden states of the masked blocks behind some texts."""
    found: list[Tensor] = []
    spec = model.spec
    for text in texts:
        ids = text + [spec.mask_token_id] * block
        total = len(ids)
        plan = plan_attention([0], [[total] * total], [[0]], total, device=CPU, dtype=model.dtype)
        shape = (1, total, spec.num_kv_heads, spec.head_dim)
        kv = tuple((torch.zeros(shape), torch.zeros(shape)) for _ in range(spec.num_layers))
        out = model.module.forward(torch.tensor(ids), ForwardContext(plan, torch.arange(total), kv))
        found.append(out[-block:])
    return torch.cat(found)


def golden(name: str) -> Callable[[Path], LoadedModel]:
    return lambda _: load_model(GOLDENS[name])


def sdar_moe(folder: Path) -> LoadedModel:
    write_oracle(folder, "Qwen3Moe", MOE | {"moe_intermediate_size": 32}, "SDARMoeForCausalLM")
    return load_with_mask(folder)


@dataclass(frozen=True)
class Bounds:
    """Of a random model, whose tokens and choices of experts are often near ties."""

    logits: float
    """Relative error."""
    tokens: float
    """Share of the masked positions that keep theirs."""
    moved: float
    """What the confidence moves by on average."""
    most: float


@torch.inference_mode()
@pytest.mark.parametrize(
    "load, bounds",
    [
        pytest.param(golden("llada2"), Bounds(0.06, 0.9, 0.03, 0.2), id="llada2"),
        pytest.param(golden("llada_moe"), Bounds(0.12, 0.75, 0.06, 0.35), id="llada_moe"),
        pytest.param(sdar_moe, Bounds(0.03, 0.95, 0.02, 0.05), id="sdar_moe"),
    ],
)
def test_statistics_of_a_mixture_stay_within_their_bounds(
    tmp_path: Path, load: Callable[[Path], LoadedModel], bounds: Bounds
):
    model = load(tmp_path)
    draw = torch.Generator().manual_seed(3)
    texts = [torch.randint(0, 60, (48,), generator=draw).tolist() for _ in range(8)]
    before = model.module.logits(hidden(model, texts, 16))
    for mlp in mixtures(model.module):
        mlp.hold(quantize_experts(mlp.stack()))
    after = model.module.logits(hidden(model, texts, 16))
    plain, small = kernels.token_stats(before), kernels.token_stats(after)
    moved = (plain.confidence - small.confidence).abs()
    assert float((after - before).norm() / before.norm()) < bounds.logits
    assert float((plain.token == small.token).float().mean()) > bounds.tokens
    assert float(moved.mean()) < bounds.moved
    assert float(moved.max()) < bounds.most
