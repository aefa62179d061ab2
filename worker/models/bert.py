"""BERT (arXiv 1810.04805) as a masked language model: post-norm layers and learned positions."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kernels
from worker.models.checkpoint import Checkpoint
from worker.models.encoder import LayerNorm, attend, gather_encoder_facts, name_linear, read_encoder_shape
from worker.models.layers import ForwardContext, LayerShape, Linear, empty_parameter
from worker.models.qwen import name_pieces, refuse
from worker.models.spec import ModelSpec
from worker.models.weights import Slots, load_weights, stored_names

# Those of the released vocabularies.
MASK_TOKEN_ID = 103
SEP_TOKEN_ID = 102
_UNUSED = ("bert.pooler.", "cls.seq_relationship.", "bert.embeddings.position_ids", "cls.predictions.decoder.")


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    """Return the facts of a checkpoint. Raises `ModelError`."""
    return gather_encoder_facts(checkpoint, _read_shape(checkpoint), "bert", MASK_TOKEN_ID, SEP_TOKEN_ID)


def build(checkpoint: Checkpoint, *, device: torch.device, dtype: torch.dtype) -> "Bert":
    """Return the module with the checkpoint's weights. Raises `ModelError`."""
    config = checkpoint.config
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise refuse(checkpoint, "position_embedding_type", "only 'absolute' is supported")
    module = Bert(
        _read_shape(checkpoint),
        layers=checkpoint.integer("num_hidden_layers"),
        vocab=checkpoint.integer("vocab_size"),
        positions=checkpoint.integer("max_position_embeddings"),
        types=checkpoint.integer("type_vocab_size", 2),
        device=device,
        dtype=dtype,
    )
    stored = stored_names(checkpoint.folder)
    unused = frozenset(name for name in stored if name.startswith(_UNUSED))
    slots = _name_slots(module)
    if any(name.endswith(".gamma") for name in stored):
        # The first exports name a norm's parts as the TensorFlow original did.
        for new, old in (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")):
            slots = {name.replace(new, old): places for name, places in slots.items()}
    load_weights(checkpoint.folder, slots, unused)
    return module


def _read_shape(checkpoint: Checkpoint) -> LayerShape:
    return read_encoder_shape(checkpoint, "layer_norm_eps", "hidden_act")


class _Layer(nn.Module):
    def __init__(self, shape: LayerShape, number: int, *, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.number = number
        self.heads, self.head_dim = shape.num_heads, shape.head_dim
        hidden, inner = shape.hidden_size, shape.intermediate_size
        self.qkv = Linear(hidden, 3 * hidden, True, device=device, dtype=dtype)
        self.out = Linear(hidden, hidden, True, device=device, dtype=dtype)
        self.attention_norm = LayerNorm(hidden, shape.eps, True, device=device, dtype=dtype)
        self.up = Linear(hidden, inner, True, device=device, dtype=dtype)
        self.down = Linear(inner, hidden, True, device=device, dtype=dtype)
        self.mlp_norm = LayerNorm(hidden, shape.eps, True, device=device, dtype=dtype)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        q, k, v = self.qkv.forward(x, context).view(x.shape[0], 3, self.heads, self.head_dim).unbind(1)
        x = self.attention_norm.forward(
            x + self.out.forward(attend(q.contiguous(), k, v, self.number, context), context)
        )
        return self.mlp_norm.forward(x + self.down.forward(F.gelu(self.up.forward(x, context)), context))


class Bert(nn.Module):
    """Embeddings, layers, and the head that predicts tokens. All tokens are of the first segment."""

    def __init__(
        self,
        shape: LayerShape,
        layers: int,
        vocab: int,
        positions: int,
        types: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ):
        super().__init__()
        hidden = shape.hidden_size
        self.words = empty_parameter(vocab, hidden, device=device, dtype=dtype)
        self.positions = empty_parameter(positions, hidden, device=device, dtype=dtype)
        self.types = empty_parameter(types, hidden, device=device, dtype=dtype)
        self.norm = LayerNorm(hidden, shape.eps, True, device=device, dtype=dtype)
        made = [_Layer(shape, number, device=device, dtype=dtype) for number in range(layers)]
        self.layers: Iterable[_Layer] = nn.ModuleList(made)  # pyright: ignore[reportAttributeAccessIssue]
        self.transform = Linear(hidden, hidden, True, device=device, dtype=dtype)
        self.transform_norm = LayerNorm(hidden, shape.eps, True, device=device, dtype=dtype)
        self.bias = empty_parameter(vocab, device=device, dtype=dtype)

    def forward(self, token_ids: Tensor, context: ForwardContext, wanted: Tensor | None = None) -> Tensor:
        """Write the keys and values of token_ids [tokens]; return hidden states [wanted or tokens, hidden]."""
        x = F.embedding(token_ids, self.words) + self.types[0] + F.embedding(context.positions, self.positions)
        x = self.norm.forward(x)
        for layer in self.layers:
            x = layer.forward(x, context)
        return x if wanted is None else x.index_select(0, wanted)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [n, vocab] for the hidden states [n, hidden]."""
        hidden = self.transform_norm.forward(F.gelu(self.transform.forward(hidden)))
        return kernels.linear(hidden, self.words, self.bias)


def _name_slots(module: Bert) -> Slots:
    hidden = module.words.shape[1]
    slots: dict[str, tuple[Tensor, ...]] = {
        "bert.embeddings.word_embeddings.weight": (module.words,),
        "bert.embeddings.position_embeddings.weight": (module.positions,),
        "bert.embeddings.token_type_embeddings.weight": (module.types,),
        **name_linear("bert.embeddings.LayerNorm", module.norm),
        **name_linear("cls.predictions.transform.dense", module.transform),
        **name_linear("cls.predictions.transform.LayerNorm", module.transform_norm),
        "cls.predictions.bias": (module.bias,),
    }
    module.transform.pieces.clear()  # behind the forward, where no adapter reaches it
    for layer in module.layers:
        prefix = f"bert.encoder.layer.{layer.number}."
        slots |= name_pieces(prefix + "attention.self.{}", ("query", "key", "value"), layer.qkv, [hidden] * 3)
        slots |= name_linear(f"{prefix}attention.output.dense", layer.out)
        slots |= name_linear(f"{prefix}attention.output.LayerNorm", layer.attention_norm)
        slots |= name_linear(f"{prefix}intermediate.dense", layer.up)
        slots |= name_linear(f"{prefix}output.dense", layer.down)
        slots |= name_linear(f"{prefix}output.LayerNorm", layer.mlp_norm)
    return slots
