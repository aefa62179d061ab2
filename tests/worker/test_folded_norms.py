"""Where norms are folded into the products around them, a decoder computes the same."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import kernels
from kernels.attention import plan_attention
from kernels.dispatch import Op
from kernels.moe import Router
from tests.worker.parallel.test_shares import CPU
from worker.models.fp8 import quantize
from worker.models.layers import Decoder, ForwardContext, LayerShape, LowRank, MoeShape

SHAPE = LayerShape(32, 4, 2, 8, 48, 1e-5, qkv_bias=True, out_bias=True, head_norm=True)
AN_8B = LayerShape(4096, 32, 8, 128, 12288, 1e-6, head_norm=True)
MOE = MoeShape(experts=3, inner=16, router=Router(2), dense_layers=frozenset({1, 2}))
TOKENS = 7
LAYERS = 4


def a_decoder(moe: MoeShape | None) -> Decoder:
    decoder = Decoder(replace(SHAPE, moe=moe), LAYERS, 50, 1e4, False, device=CPU, dtype=torch.float32)
    draw = torch.Generator().manual_seed(3)
    for parameter in decoder.parameters():
        parameter.normal_(0, 0.4, generator=draw)
    return decoder


def a_context() -> ForwardContext:
    plan = plan_attention([0], [[TOKENS] * TOKENS], [[0]], TOKENS, device=CPU, dtype=torch.float32)
    pages = tuple((torch.zeros(1, TOKENS, 2, 8), torch.zeros(1, TOKENS, 2, 8)) for _ in range(LAYERS))
    return ForwardContext(plan, torch.arange(TOKENS), pages)


def hidden_of(decoder: Decoder, context: ForwardContext, wanted: Tensor | None) -> Tensor:
    return decoder.forward(torch.arange(TOKENS) * 3, context, wanted)


@pytest.fixture
def folded(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Fold wherever the layers ask; the list tells of each norm whether a gate stood behind it."""
    found: list[bool] = []

    def folds(x: Tensor, weight: Tensor, reader: Tensor, *, gated: bool) -> bool:
        assert x.shape[1] == weight.shape[1] and weight.shape[0] == reader.shape[1]
        found.append(gated)
        return True

    monkeypatch.setattr(kernels, "folds", Op(folds))
    return found


@pytest.mark.parametrize("wanted", [None, torch.tensor([5, 1])], ids=["all", "two"])
@pytest.mark.parametrize(
    ("moe", "expected"), [(None, [True, False] * 3 + [True]), (MOE, [True, False, True, False])], ids=["dense", "mixed"]
)
def test_a_decoder_with_folded_norms_is_the_same(
    moe: MoeShape | None,
    expected: list[bool],
    wanted: Tensor | None,
    folded: list[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = a_decoder(moe)
    with monkeypatch.context() as plain:
        plain.setattr(kernels, "folds", Op(lambda x, weight, reader, *, gated: False))
        context = a_context()
        without, written = hidden_of(decoder, context, wanted), context.kv
    assert not folded
    context = a_context()
    hidden = hidden_of(decoder, context, wanted)
    assert folded == expected
    assert torch.allclose(hidden, without, atol=1e-4)
    for mine, theirs in zip(context.kv, written, strict=True):
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(mine, theirs, strict=True))


def test_adapters_ranks_and_weights_of_8_bits_keep_the_norm_for_itself(folded: list[bool]) -> None:
    adapted = replace(a_context(), lora=LowRank({}, ()))
    hidden_of(a_decoder(None), adapted, None)
    shared = a_decoder(None)
    for layer in shared.layers:
        layer.peers = _Alone()
    hidden_of(shared, a_context(), None)
    small = a_decoder(None)
    quantize(small)
    hidden_of(small, a_context(), None)
    assert not folded


def clusters_run() -> bool:
    if not torch.cuda.is_available():
        return False
    clusters = pytest.importorskip("kernels.gpu.clusters")
    return clusters.able(torch.device("cuda", torch.cuda.current_device()))


@pytest.mark.gpu
@pytest.mark.skipif(not clusters_run(), reason="clusters need Hopper and NVRTC")
@pytest.mark.parametrize("tokens", [4, 32, 64, 128])
def test_an_8bs_layers_fold_their_norms_on_hopper_and_are_the_same(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, dtype, asked = torch.device("cuda", torch.cuda.current_device()), torch.bfloat16, list[bool]()
    decoder = Decoder(AN_8B, 2, 1000, 1e6, False, device=device, dtype=dtype)
    draw = torch.Generator(device).manual_seed(3)
    for name, parameter in decoder.named_parameters():
        parameter.normal_(1.0 if "norm" in name else 0.0, 0.2 if "norm" in name else 0.02, generator=draw)
    ids = torch.arange(tokens, device=device)
    ends, pages = [[tokens] * tokens], [list(range(-(-tokens // 32)))]
    plan = plan_attention([0], ends, pages, 32, device=device, dtype=dtype)
    keys, values = torch.zeros(2, 2, len(pages[0]), 32, 8, 128, dtype=dtype, device=device)
    context = ForwardContext(plan, ids, tuple(zip(keys, values, strict=True)))

    def folds(*args: Tensor, gated: bool) -> bool:
        asked.append(chosen(*args, gated=gated))
        return asked[-1]

    chosen = kernels.folds
    monkeypatch.setattr(kernels, "folds", folds)
    hidden = decoder.forward(ids, context)
    assert asked == [True, True, True]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = decoder.forward(ids, context)
    graph.replay()
    assert torch.equal(replayed, hidden)
    monkeypatch.setattr(kernels, "folds", lambda *args, gated: False)
    without = decoder.forward(ids, context)
    assert (hidden.double() - without.double()).norm() < 2e-2 * without.double().norm()


class _Alone:
    rank, size = 0, 1

    def sum(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> Tensor:
        return x[None]
