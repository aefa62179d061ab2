"""ModernBERT (arXiv 2412.13663) as a masked language model: pre-norm layers, most of which see a window of the text."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kernels
from kernels.rope import rope_tables
from worker.models.checkpoint import Checkpoint
from worker.models.encoder import LayerNorm, attend, gather_encoder_facts, name_linear, read_encoder_shape
from worker.models.layers import ForwardContext, LayerShape, Linear, Rotation, empty_parameter
from worker.models.qwen import refuse
from worker.models.rope import RopeShape
from worker.models.spec import ModelSpec
from worker.models.weights import Slots, load_weights

# Those of the released vocabulary.
MASK_TOKEN_ID = 50284
SEP_TOKEN_ID = 50282


@dataclass(frozen=True, slots=True)
class _Biases:
    norm: bool
    attention: bool
    mlp: bool
    transform: bool
    decoder: bool


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    """Return the facts of a checkpoint. Raises `ModelError`."""
    window = checkpoint.integer("local_attention", 128)
    return gather_encoder_facts(
        checkpoint,
        _read_shape(checkpoint),
        "modernbert",
        MASK_TOKEN_ID,
        SEP_TOKEN_ID,
        window if any(_read_near(checkpoint)) else 0,
    )


def build(checkpoint: Checkpoint, *, device: torch.device, dtype: torch.dtype) -> "ModernBert":
    """Return the module with the checkpoint's weights. Raises `ModelError`."""
    config = checkpoint.config
    if config.get("classifier_activation", "gelu") != "gelu":
        raise refuse(checkpoint, "classifier_activation", "only 'gelu' is supported")
    biases = _Biases(
        norm=config.get("norm_bias") is True,
        attention=config.get("attention_bias") is True,
        mlp=config.get("mlp_bias") is True,
        transform=config.get("classifier_bias") is True,
        decoder=config.get("decoder_bias") is not False,
    )
    module = ModernBert(
        _read_shape(checkpoint),
        _read_near(checkpoint),
        biases,
        vocab=checkpoint.integer("vocab_size"),
        near_rope=_read_rope(checkpoint, "sliding_attention", "local_rope_theta", 10_000.0),
        far_rope=_read_rope(checkpoint, "full_attention", "global_rope_theta", 160_000.0),
        tied=config.get("tie_word_embeddings") is not False,
        device=device,
        dtype=dtype,
    )
    tied = module.head is module.embedding
    load_weights(checkpoint.folder, _name_slots(module), frozenset({"decoder.weight"} if tied else ()))
    return module


def _read_shape(checkpoint: Checkpoint) -> LayerShape:
    return read_encoder_shape(checkpoint, "norm_eps", "hidden_activation")


def _read_near(checkpoint: Checkpoint) -> tuple[bool, ...]:
    """Return for each layer whether it sees a window only."""
    layers, types = checkpoint.integer("num_hidden_layers"), checkpoint.config.get("layer_types")
    if types is None:
        every = checkpoint.integer("global_attn_every_n_layers", 3)
        return tuple(layer % every != 0 for layer in range(layers))
    if len(types) != layers or not set(types) <= {"full_attention", "sliding_attention"}:
        raise refuse(checkpoint, "layer_types", f"must name the kind of each of {layers} layers")
    return tuple(kind == "sliding_attention" for kind in types)


def _read_rope(checkpoint: Checkpoint, kind: str, old_key: str, default: float) -> RopeShape:
    parameters = (checkpoint.config.get("rope_parameters") or {}).get(kind) or {}
    if parameters.get("rope_type", "default") != "default":
        raise refuse(checkpoint, "rope_parameters", f"rope type {parameters['rope_type']!r} is not supported")
    return RopeShape(float(parameters.get("rope_theta") or checkpoint.config.get(old_key) or default))


class _Layer(nn.Module):
    def __init__(
        self, shape: LayerShape, number: int, near: bool, biases: _Biases, *, device: torch.device, dtype: torch.dtype
    ):
        super().__init__()
        self.number, self.near = number, near
        self.heads, self.head_dim = shape.num_heads, shape.head_dim
        hidden, inner = shape.hidden_size, shape.intermediate_size
        # The embeddings are normed already.
        self.attention_norm = LayerNorm(hidden, shape.eps, biases.norm, device=device, dtype=dtype) if number else None
        self.qkv = Linear(hidden, 3 * hidden, biases.attention, device=device, dtype=dtype)
        self.out = Linear(hidden, hidden, biases.attention, device=device, dtype=dtype)
        self.mlp_norm = LayerNorm(hidden, shape.eps, biases.norm, device=device, dtype=dtype)
        self.up = Linear(hidden, 2 * inner, biases.mlp, device=device, dtype=dtype)
        self.down = Linear(inner, hidden, biases.mlp, device=device, dtype=dtype)

    def forward(self, x: Tensor, rotation: Rotation, context: ForwardContext) -> Tensor:
        normed = x if self.attention_norm is None else self.attention_norm.forward(x)
        qkv = self.qkv.forward(normed, context).view(x.shape[0], 3 * self.heads, self.head_dim)
        turned = kernels.rope(qkv[:, : 2 * self.heads], rotation.cos, rotation.sin)
        q, k = turned[:, : self.heads].contiguous(), turned[:, self.heads :]
        plan = context.near if self.near else None
        x = x + self.out.forward(attend(q, k, qkv[:, 2 * self.heads :], self.number, context, plan), context)
        value, gate = self.up.forward(self.mlp_norm.forward(x), context).chunk(2, -1)
        return x + self.down.forward(F.gelu(value) * gate, context)


class ModernBert(nn.Module):
    """Embedding, layers, and the head that predicts tokens."""

    def __init__(
        self,
        shape: LayerShape,
        near: tuple[bool, ...],
        biases: _Biases,
        vocab: int,
        near_rope: RopeShape,
        far_rope: RopeShape,
        tied: bool,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ):
        super().__init__()
        hidden = shape.hidden_size
        self.dtype = dtype
        self.embedding = empty_parameter(vocab, hidden, device=device, dtype=dtype)
        self.embedding_norm = LayerNorm(hidden, shape.eps, biases.norm, device=device, dtype=dtype)
        layers = [_Layer(shape, i, each, biases, device=device, dtype=dtype) for i, each in enumerate(near)]
        self.layers: Iterable[_Layer] = nn.ModuleList(layers)  # pyright: ignore[reportAttributeAccessIssue]
        self.norm = LayerNorm(hidden, shape.eps, biases.norm, device=device, dtype=dtype)
        self.transform = Linear(hidden, hidden, biases.transform, device=device, dtype=dtype)
        self.transform_norm = LayerNorm(hidden, shape.eps, biases.norm, device=device, dtype=dtype)
        self.head = self.embedding if tied else empty_parameter(vocab, hidden, device=device, dtype=dtype)
        self.bias = empty_parameter(vocab, device=device, dtype=dtype) if biases.decoder else None
        # By whether the layer is near: registered, so that they move with the module.
        for name, rope in (("inv_freq_near", near_rope), ("inv_freq_far", far_rope)):
            self.register_buffer(name, rope.frequencies(shape.head_dim, device), persistent=False)

    def forward(self, token_ids: Tensor, context: ForwardContext, wanted: Tensor | None = None) -> Tensor:
        """Write the keys and values of token_ids [tokens]; return hidden states [wanted or tokens, hidden]."""
        x = self.embedding_norm.forward(F.embedding(token_ids, self.embedding))
        rotations = {
            near: Rotation(*rope_tables(context.positions, getattr(self, name), self.dtype))
            for near, name in ((True, "inv_freq_near"), (False, "inv_freq_far"))
        }
        for layer in self.layers:
            x = layer.forward(x, rotations[layer.near], context)
        if wanted is not None:
            x = x.index_select(0, wanted)
        return self.norm.forward(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [n, vocab] for the hidden states [n, hidden]."""
        hidden = self.transform_norm.forward(F.gelu(self.transform.forward(hidden)))
        return kernels.linear(hidden, self.head, self.bias)


def _name_slots(module: ModernBert) -> Slots:
    slots: dict[str, tuple[Tensor, ...]] = {
        "model.embeddings.tok_embeddings.weight": (module.embedding,),
        **name_linear("model.embeddings.norm", module.embedding_norm),
        **name_linear("model.final_norm", module.norm),
        **name_linear("head.dense", module.transform),
        **name_linear("head.norm", module.transform_norm),
    }
    module.transform.pieces.clear()  # behind the forward, where no adapter reaches it
    if module.head is not module.embedding:
        slots["decoder.weight"] = (module.head,)
    if module.bias is not None:
        slots["decoder.bias"] = (module.bias,)
    for layer in module.layers:
        prefix = f"model.layers.{layer.number}."
        slots |= name_linear(f"{prefix}attn.Wqkv", layer.qkv)
        slots |= name_linear(f"{prefix}attn.Wo", layer.out)
        slots |= name_linear(f"{prefix}mlp_norm", layer.mlp_norm)
        slots |= name_linear(f"{prefix}mlp.Wi", layer.up)
        slots |= name_linear(f"{prefix}mlp.Wo", layer.down)
        if layer.attention_norm is not None:
            slots |= name_linear(f"{prefix}attn_norm", layer.attention_norm)
    return slots
