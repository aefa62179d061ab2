"""Models of the real shapes with random weights, and the floors of their steps."""

from dataclasses import dataclass

import torch
from torch import Tensor

import kernels
from kernels.fp8 import BLOCK, FP8, FP8_MAX
from kernels.moe import Experts, Router
from shared.decoding import LowConfidenceStatic
from worker.models import LoadedModel
from worker.models.layers import Decoder, ForwardContext, LayerShape, Linear, MoeMLP, MoeShape, Peers
from worker.models.spec import Attention as Visibility
from worker.models.spec import ModelSpec
from worker.parallel.loading import share_decoder, share_spec
from worker.parallel.shares import Rank

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Shape:
    """A model, and what its step must read and compute (performance.md section 6)."""

    name: str
    layer: LayerShape
    layers: int
    vocab: int
    weights: float
    """Parameters read by every step."""
    active: float
    """Parameters that a token is multiplied by."""

    @property
    def kv_bytes(self) -> int:
        return 2 * 2 * self.layers * self.layer.num_kv_heads * self.layer.head_dim

    def touched(self, tokens: int) -> float:
        """Parameters read by a step of `tokens` rows that route independently."""
        moe = self.layer.moe
        if moe is None:
            return self.weights
        met = moe.experts * (1 - (1 - moe.router.top_k / moe.experts) ** tokens)
        return self.weights + (self.layers - len(moe.dense_layers)) * met * 3 * self.layer.hidden_size * moe.inner

    def floor_ms(self, rows: int, query: int, context: int, bandwidth: float, matrix: float) -> tuple[float, float]:
        """Return the times to move the bytes and to do the arithmetic of rows of `query` positions."""
        tokens = rows * query
        moved = 2 * self.touched(tokens) + rows * (context + query) * self.kv_bytes
        attention = 4 * self.layers * self.layer.num_heads * self.layer.head_dim * (context + query) * tokens
        return moved / bandwidth * 1e3, (2 * self.active * tokens + attention) / matrix * 1e3


SDAR_8B = Shape("SDAR-8B", LayerShape(4096, 32, 8, 128, 12288, 1e-6, head_norm=True), 36, 151936, 7.568e9, 7.568e9)
LLADA_8B = Shape("LLaDA-8B", LayerShape(4096, 32, 32, 128, 12288, 1e-5), 32, 126464, 7.497e9, 7.497e9)
_EXPERTS = MoeShape(256, 512, Router(8, "sigmoid", 8, 4, True, 2.5), 512, True, frozenset({0}))
LLADA2_MINI = Shape(
    "LLaDA2-mini",
    LayerShape(2048, 16, 4, 128, 5120, 1e-6, head_norm=True, rotary_dim=64, moe=_EXPERTS),
    20,
    157184,
    0.633e9,
    1.111e9,
)
TINY = Shape("tiny", LayerShape(64, 4, 2, 16, 128, 1e-6, head_norm=True), 2, 1024, 1e5, 1e5)
"""To try a benchmark where there is no GPU."""
SOAK = Shape("soak", LayerShape(1024, 8, 4, 128, 2816, 1e-6, head_norm=True), 2, 4096, 2.8e7, 2.8e7)
"""Small enough that the host sets the pace; heads as in SDAR."""
SHAPES = {shape.name: shape for shape in (SDAR_8B, LLADA_8B, LLADA2_MINI, SOAK, TINY)}


def _scatter_routing(mlp: MoeMLP) -> None:
    """Let tokens route by fixed random scores: all masks of a random model would go to the same few experts."""
    scores = torch.randn(8192, mlp.router.shape[0], device=mlp.router.device)

    def forward(x: Tensor, context: ForwardContext | None = None) -> Tensor:
        logits = torch.add(scores[: x.shape[0]], kernels.router_logits(x, mlp.router), alpha=1e-3)
        return mlp.mix(x, logits, context)

    mlp.forward = forward


def store_in_blocks(module: Decoder) -> None:
    """Turn the layers' linears and experts into what a checkpoint of 8 bits with a scale for each block holds."""
    for each in module.modules():
        if isinstance(each, MoeMLP):
            each.hold(experts_in_blocks(each.stack()))
        elif isinstance(each, Linear) and each.scale is None:
            small, scale = _in_blocks(each.weight)
            each.weight, each.scale = (torch.nn.Parameter(part, requires_grad=False) for part in (small, scale))


def experts_in_blocks(stack: Experts) -> Experts:
    """Return experts of 8 bits with a scale for each block."""
    gate_up, gate_up_scale = _each_in_blocks(stack.gate_up)
    down, down_scale = _each_in_blocks(stack.down)
    return Experts(gate_up, down, gate_up_scale, down_scale, stack.shared)


def _each_in_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize weight [experts, outputs, inputs] one by one: in float32 they take four times their room."""
    count, outputs, inputs = weight.shape
    values = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    scale = torch.empty((count, outputs // BLOCK, inputs // BLOCK), device=weight.device)
    for number, expert in enumerate(weight):
        values[number], scale[number] = _in_blocks(expert)
    return values, scale


def _in_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    outputs, inputs = weight.shape
    tiles = weight.float().view(outputs // BLOCK, BLOCK, inputs // BLOCK, BLOCK)
    scale = tiles.abs().amax((1, 3)) / FP8_MAX
    return (tiles / scale[:, None, :, None]).view(outputs, inputs).to(FP8), scale


def random_model(
    shape: Shape, device: torch.device, dtype: torch.dtype = BF16, peers: Peers | None = None
) -> LoadedModel:
    """Return a whole model, or what this rank holds of one."""
    first = device if peers is None else torch.device("meta")
    module = Decoder(shape.layer, shape.layers, shape.vocab, 1e6, False, device=first, dtype=dtype)
    if peers is not None:
        share_decoder(module, peers, device)
    for number, layer in enumerate(module.layers):
        if isinstance(layer.mlp, MoeMLP):
            _scatter_routing(layer.mlp)
        else:
            # Adapters ask where each projection's rows are.
            inner = layer.mlp.down.weight.shape[1]
            layer.mlp.gate_up.pieces = {f"{number}.gate": (0, inner), f"{number}.up": (inner, 2 * inner)}
    for name, parameter in module.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        elif "bias" not in name:
            parameter.normal_(0, 0.02)
    layer = shape.layer
    spec = ModelSpec(
        family="random",
        attention=Visibility.BLOCK_CAUSAL,
        vocab_size=shape.vocab,
        text_vocab_size=shape.vocab,
        mask_token_id=shape.vocab - 1,
        stop_token_ids=(),
        block_length=32,
        max_model_len=4096,
        num_layers=shape.layers,
        hidden_size=layer.hidden_size,
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        decoding=LowConfidenceStatic(),
    )
    if peers is not None:
        spec = share_spec(spec, Rank(peers.rank, peers.size), module)
    return LoadedModel(spec, module.eval(), device, dtype)
