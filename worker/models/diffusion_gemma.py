"""DiffusionGemma (Google): Gemma-4-like layers that read text causally and denoise a canvas beside it.

Text and canvas share all weights but each layer's output scale. The canvas's embeddings are conditioned on what the
step before predicted. Vision is not served.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kernels
from kernels.moe import Router
from kernels.rope import rope_tables
from shared.decoding import Renoise
from worker.models.checkpoint import Checkpoint
from worker.models.facts import gather_facts
from worker.models.layers import ForwardContext, LayerShape, Linear, Rotation, empty_parameter
from worker.models.qwen import name_pieces, refuse
from worker.models.rope import RopeShape
from worker.models.spec import NO_MASK, Attention, Commit, ModelSpec
from worker.models.weights import Slots, load_weights, stored_names

_VISION = ("model.encoder.vision_tower.", "model.encoder.embed_vision.")
_PATTERN = 6
"""Without a list of layer types every sixth layer sees the whole text."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the two kinds of layers differ in."""

    near: bool
    """Sees only a sliding window; has value projections of its own."""
    kv_heads: int
    head_dim: int
    theta: float
    rotated: float
    """Share of a head's pairs that turn."""

    def frequencies(self, device: torch.device) -> Tensor:
        """Return [head_dim / 2] float32; pairs that do not turn have 0."""
        inv_freq = RopeShape(self.theta).frequencies(self.head_dim, device)
        inv_freq[int(self.rotated * (self.head_dim // 2)) :] = 0.0
        return inv_freq


@dataclass(frozen=True, slots=True)
class _Shape:
    hidden: int
    heads: int
    inner: int
    experts: int
    expert_inner: int
    top_k: int
    vocab: int
    eps: float
    softcap: float
    window: int
    layers: tuple[_Kind, ...]


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    """Return the facts of a checkpoint. Raises `ModelError`."""
    text, shape = _text(checkpoint), _read_shape(_text(checkpoint))
    widest = max(shape.layers, key=lambda kind: kind.kv_heads * kind.head_dim)
    sampler = checkpoint.generation.get("sampler_config") or {}
    return gather_facts(
        text,
        LayerShape(shape.hidden, shape.heads, widest.kv_heads, widest.head_dim, shape.inner, shape.eps),
        family="diffusion_gemma",
        attention=Attention.BLOCK_CAUSAL,
        context=Attention.CAUSAL,
        commit=Commit.ENCODED,
        block_length=checkpoint.integer("canvas_length", 256),
        blocks_after_prompt=True,
        fixed_block_length=True,
        mask_token_id=NO_MASK,
        sliding_window=shape.window,
        layer_kv=tuple((kind.kv_heads, kind.head_dim) for kind in shape.layers),
        decoding=Renoise(**({"bound": sampler["entropy_bound"]} if "entropy_bound" in sampler else {})),
    )


def build(checkpoint: Checkpoint, *, device: torch.device, dtype: torch.dtype) -> "DiffusionGemma":
    """Return the module with the checkpoint's weights. Raises `ModelError`."""
    module = DiffusionGemma(_read_shape(_text(checkpoint)), device=device, dtype=dtype)
    unused = {name for name in stored_names(checkpoint.folder) if name.startswith(_VISION)}
    load_weights(checkpoint.folder, _name_slots(module), frozenset({"lm_head.weight", *unused}))
    return module


def _text(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with the text model's config."""
    config = checkpoint.config.get("text_config")
    if not isinstance(config, dict):
        raise refuse(checkpoint, "text_config", "is missing")
    return replace(checkpoint, config=config)


def _read_shape(text: Checkpoint) -> _Shape:
    config = text.config
    if config.get("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise refuse(text, "hidden_activation", "only 'gelu_pytorch_tanh' is supported")
    for key in ("attention_bias", "use_bidirectional_attention"):
        if config.get(key) not in (None, False, "vision"):
            raise refuse(text, key, f"{config[key]!r} is not supported")
    count = text.integer("num_hidden_layers")
    types = config.get("layer_types") or [
        "full_attention" if (layer + 1) % _PATTERN == 0 or layer == count - 1 else "sliding_attention"
        for layer in range(count)
    ]
    if len(types) != count or not set(types) <= {"full_attention", "sliding_attention"}:
        raise refuse(text, "layer_types", f"must name the kind of each of {count} layers")
    return _Shape(
        hidden=text.integer("hidden_size"),
        heads=text.integer("num_attention_heads"),
        inner=text.integer("intermediate_size"),
        experts=text.integer("num_experts"),
        expert_inner=text.integer("moe_intermediate_size"),
        top_k=text.integer("top_k_experts"),
        vocab=text.integer("vocab_size"),
        eps=text.number("rms_norm_eps", 1e-6),
        softcap=text.number("final_logit_softcapping", 30.0),
        window=text.integer("sliding_window", 512),
        layers=tuple(_read_kind(text, layer, kind) for layer, kind in enumerate(types)),
    )


def _read_kind(text: Checkpoint, layer: int, kind: str) -> _Kind:
    config, near = text.config, kind == "sliding_attention"
    own: dict[str, Any] = {"head_dim": config.get("head_dim"), "num_key_value_heads": config.get("num_key_value_heads")}
    if not near:
        own["head_dim"] = config.get("global_head_dim") or own["head_dim"]
        own["num_key_value_heads"] = config.get("num_global_key_value_heads") or own["num_key_value_heads"]
    per_layer = config.get("per_layer_config") or {}
    own |= per_layer.get(kind) or per_layer.get(str(layer)) or {}
    sizes = replace(text, config=own)
    rope = (config.get("rope_parameters") or {}).get(kind) or {}
    rotated = rope.get("partial_rotary_factor", 1.0 if near else 0.25)
    kv_heads = sizes.integer("num_key_value_heads")
    if text.integer("num_attention_heads") % kv_heads:
        raise refuse(text, "num_key_value_heads", f"{kv_heads} does not divide num_attention_heads")
    return _Kind(
        near, kv_heads, sizes.integer("head_dim"), float(rope.get("rope_theta", 1e4 if near else 1e6)), rotated
    )


class DiffusionGemma(nn.Module):
    """Text and canvas in one ragged batch; `ForwardContext.encodes` tells them apart."""

    inv_freq_near: Tensor
    inv_freq_far: Tensor

    def __init__(self, shape: _Shape, *, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.shape = shape
        self.dtype = dtype
        self.embedding = empty_parameter(shape.vocab, shape.hidden, device=device, dtype=dtype)
        layers = [_Layer(shape, number, device=device, dtype=dtype) for number in range(len(shape.layers))]
        self.layers: Iterable[_Layer] = nn.ModuleList(layers)  # pyright: ignore[reportAttributeAccessIssue]
        self.norm = empty_parameter(shape.hidden, device=device, dtype=dtype)
        self.condition_norm = empty_parameter(shape.hidden, device=device, dtype=dtype)
        self.condition_mlp = _MLP(shape, device=device, dtype=dtype)
        for kind in shape.layers:
            self.register_buffer(_buffer(kind), kind.frequencies(device), persistent=False)

    def forward(self, token_ids: Tensor, context: ForwardContext, wanted: Tensor | None = None) -> Tensor:
        """Write the keys and values of token_ids [tokens]; return hidden states [wanted or tokens, hidden].

        Tokens of the text (`context.encodes`) are plain; the canvas's carry `context.condition`, zeros in their first
        step.
        """
        scale = math.sqrt(self.shape.hidden)
        x = F.embedding(token_ids, self.embedding) * torch.tensor(scale, dtype=self.dtype)
        encodes = context.encodes
        if encodes is None:
            encodes = torch.ones_like(token_ids, dtype=torch.bool)
        if context.condition is not None:
            signal = self.condition_mlp.forward(self._normed(context.condition, self.condition_norm), context)
            x = torch.where(encodes[:, None], x, self._normed(x + signal, None))
        rotations = {
            kind.near: Rotation(*rope_tables(context.positions, getattr(self, _buffer(kind)), self.dtype))
            for kind in self.shape.layers
        }
        for layer in self.layers:
            x = layer.forward(x, rotations[layer.kind.near], context, encodes)
        if wanted is not None:
            x = x.index_select(0, wanted)
        return self._normed(x, self.norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [n, vocab] float32 for the hidden states [n, hidden], bounded by the soft cap."""
        cap = self.shape.softcap
        return torch.tanh(kernels.linear(hidden, self.embedding).float() / cap) * cap

    def soft_embedding(self, logits: Tensor) -> Tensor:
        """Return the mean embedding [n, hidden] under softmax(logits [n, vocab]): what conditions the next step."""
        scale = torch.tensor(math.sqrt(self.shape.hidden), dtype=self.dtype)
        return (logits.softmax(-1, dtype=torch.float32).to(self.dtype) @ self.embedding) * scale

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return _norm(x, weight, self.shape.eps)


def _norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Norm the last dimension in float32.

    Each step's prediction conditions the next one, so that a difference in the last bit grows about tenfold a step:
    here and in `_rotate` the order of operations is the reference's.
    """
    wide = x.float()
    normed = wide * torch.pow(wide.pow(2).mean(-1, keepdim=True) + eps, -0.5)
    return (normed if weight is None else normed * weight.float()).to(x.dtype)


def _rotate(x: Tensor, rotation: Rotation) -> Tensor:
    return x * rotation.cos + x.roll(x.shape[-1] // 2, -1) * rotation.sin


def _buffer(kind: _Kind) -> str:
    return "inv_freq_near" if kind.near else "inv_freq_far"


class _MLP(nn.Module):
    """down(gelu(gate(x)) * up(x))"""

    def __init__(self, shape: _Shape, *, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.gate_up = Linear(shape.hidden, 2 * shape.inner, False, device=device, dtype=dtype)
        self.down = Linear(shape.inner, shape.hidden, False, device=device, dtype=dtype)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        return self.down.forward(_gated(self.gate_up.forward(x, context)), context)


def _gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


class _Experts(nn.Module):
    """A mixture whose router norms its input and scales each expert's share."""

    def __init__(self, shape: _Shape, *, device: torch.device, dtype: torch.dtype):
        super().__init__()
        hidden, inner = shape.hidden, shape.expert_inner
        self.rule = Router(top_k=shape.top_k)
        self.eps = shape.eps
        self.router = empty_parameter(shape.experts, hidden, device=device, dtype=torch.float32)
        self.router_scale = empty_parameter(hidden, device=device, dtype=torch.float32)
        self.expert_scale = empty_parameter(shape.experts, device=device, dtype=torch.float32)
        self.gate_up = empty_parameter(shape.experts, 2 * inner, hidden, device=device, dtype=dtype)
        self.down = empty_parameter(shape.experts, hidden, inner, device=device, dtype=dtype)

    def forward(self, x: Tensor, routed_by: Tensor) -> Tensor:
        """Return the mixture's output for x, whose experts are chosen by another view of the same tokens."""
        normed = _norm(routed_by.float(), None, self.eps)
        logits = F.linear(normed * self.router_scale * routed_by.shape[-1] ** -0.5, self.router)
        ids, weights = kernels.route(logits, self.rule)
        weights = weights * self.expert_scale[ids]
        total = x.new_zeros(x.shape, dtype=torch.float32)
        # `kernels.experts` has no GELU.
        for expert in ids.unique().tolist():
            tokens, slots = (ids == expert).nonzero(as_tuple=True)
            out = F.linear(_gated(F.linear(x[tokens], self.gate_up[expert])), self.down[expert])
            total.index_add_(0, tokens, out.float() * weights[tokens, slots, None])
        return total.to(x.dtype)


class _Layer(nn.Module):
    def __init__(self, shape: _Shape, number: int, *, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.number = number
        self.kind = kind = shape.layers[number]
        self.heads, self.eps = shape.heads, shape.eps
        # Far layers take the keys, before their norm, for values too.
        projected = shape.heads + (2 if kind.near else 1) * kind.kv_heads
        self.qkv = Linear(shape.hidden, projected * kind.head_dim, False, device=device, dtype=dtype)
        self.out = Linear(shape.heads * kind.head_dim, shape.hidden, False, device=device, dtype=dtype)
        self.head_norm = empty_parameter(shape.heads + kind.kv_heads, kind.head_dim, device=device, dtype=dtype)
        self.mlp = _MLP(shape, device=device, dtype=dtype)
        self.experts = _Experts(shape, device=device, dtype=dtype)
        self.norms = nn.ParameterDict(
            {name: empty_parameter(shape.hidden, device=device, dtype=dtype) for name in _NORMS}
        )
        self.encoder_scale = empty_parameter(1, device=device, dtype=dtype)
        self.canvas_scale = empty_parameter(1, device=device, dtype=dtype)

    def forward(self, x: Tensor, rotation: Rotation, context: ForwardContext, encodes: Tensor) -> Tensor:
        attended = self._attend(self._normed(x, "input_layernorm"), rotation, context)
        x = x + self._normed(attended, "post_attention_layernorm")
        dense = self.mlp.forward(self._normed(x, "pre_feedforward_layernorm"), context)
        mixed = self.experts.forward(self._normed(x, "pre_feedforward_layernorm_2"), x)
        both = self._normed(dense, "post_feedforward_layernorm_1") + self._normed(mixed, "post_feedforward_layernorm_2")
        x = x + self._normed(both, "post_feedforward_layernorm")
        return x * torch.where(encodes[:, None], self.encoder_scale, self.canvas_scale)

    def _attend(self, x: Tensor, rotation: Rotation, context: ForwardContext) -> Tensor:
        kind, plan = self.kind, context.attention
        if kind.near and context.near is not None:
            plan = context.near
        projected = self.qkv.forward(x, context).view(x.shape[0], -1, kind.head_dim)
        keyed = self.heads + kind.kv_heads
        turned = _rotate(_norm(projected[:, :keyed], self.head_norm, self.eps), rotation)
        values = _norm(projected[:, -kind.kv_heads :], None, self.eps)
        k_pages, v_pages = context.kv[self.number][:2]
        kernels.kv_write(turned[:, self.heads :], values, k_pages, v_pages, plan.slots)
        mixed = kernels.attention(turned[:, : self.heads].contiguous(), k_pages, v_pages, plan, 1.0)
        return self.out.forward(mixed.reshape(x.shape[0], -1), context)

    def _normed(self, x: Tensor, name: str) -> Tensor:
        return _norm(x, self.norms[name], self.eps)


_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm",
    "post_feedforward_layernorm_1",
    "post_feedforward_layernorm_2",
)


def _name_slots(module: DiffusionGemma) -> Slots:
    shape = module.shape
    inner = [shape.inner] * 2

    def mlp(prefix: str, mlp: _MLP) -> dict[str, tuple[Tensor, ...]]:
        pieces = name_pieces(prefix + "{}_proj", ("gate", "up"), mlp.gate_up, inner)
        return pieces | name_pieces(prefix + "{}_proj", ("down",), mlp.down, [shape.hidden])

    slots: dict[str, tuple[Tensor, ...]] = {
        "model.decoder.embed_tokens.weight": (module.embedding,),
        "model.decoder.norm.weight": (module.norm,),
        "model.decoder.self_conditioning.pre_norm.weight": (module.condition_norm,),
        **mlp("model.decoder.self_conditioning.", module.condition_mlp),
    }
    for layer in module.layers:
        kind, prefix = layer.kind, f"model.decoder.layers.{layer.number}."
        names = ("q", "k", "v") if kind.near else ("q", "k")
        rows = [shape.heads * kind.head_dim, *[kind.kv_heads * kind.head_dim] * (len(names) - 1)]
        slots |= name_pieces(prefix + "self_attn.{}_proj", names, layer.qkv, rows)
        slots |= name_pieces(prefix + "self_attn.{}_proj", ("o",), layer.out, [shape.hidden])
        slots |= mlp(f"{prefix}mlp.", layer.mlp)
        reader = f"model.encoder.language_model.layers.{layer.number}."
        for linear in (layer.qkv, layer.out, layer.mlp.gate_up, layer.mlp.down):
            linear.text_pieces = {reader + name.removeprefix(prefix): rows for name, rows in linear.pieces.items()}
        slots |= {f"{prefix}{name}.weight": (layer.norms[name],) for name in _NORMS}
        slots |= {
            f"{prefix}self_attn.q_norm.weight": layer.head_norm[: shape.heads].unbind(0),
            f"{prefix}self_attn.k_norm.weight": layer.head_norm[shape.heads :].unbind(0),
            f"{prefix}router.proj.weight": (layer.experts.router,),
            f"{prefix}router.scale": (layer.experts.router_scale,),
            f"{prefix}router.per_expert_scale": (layer.experts.expert_scale,),
            f"{prefix}experts.gate_up_proj": (layer.experts.gate_up,),
            f"{prefix}experts.down_proj": (layer.experts.down,),
            f"{prefix}layer_scalar": (layer.canvas_scale,),
            f"{reader}layer_scalar": (layer.encoder_scale,),
        }
    return slots
