"""The Qwen and Llama make of decoder: config keys, layers and tensor names that many families share."""

import torch
from torch import Tensor

from worker.models.checkpoint import Checkpoint, ModelError
from worker.models.layers import Decoder, LayerShape, Linear

# Older exports carry the rotary table, which is computed here.
_ROTARY_TABLE = "rotary_emb.inv_freq"


def read_shape(
    checkpoint: Checkpoint, *, head_norm: bool, qkv_bias: bool = False, out_bias: bool = False
) -> LayerShape:
    """Read the layer's shape from config.json. Raises `ModelError` for what these layers do not do."""
    config = checkpoint.config
    hidden, heads = checkpoint.integer("hidden_size"), checkpoint.integer("num_attention_heads")
    kv_heads = checkpoint.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise _refused(checkpoint, "num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {heads}")
    # head_dim is a fact of its own: SDAR-4B has 32 heads of 128 on a hidden size of 2560.
    head_dim = checkpoint.integer("head_dim") if config.get("head_dim") is not None else hidden // heads
    if config.get("hidden_act", "silu") != "silu":
        raise _refused(checkpoint, "hidden_act", f"{config['hidden_act']!r} is not supported, only 'silu'")
    if config.get("use_sliding_window"):
        raise _refused(checkpoint, "use_sliding_window", "sliding windows are not supported")
    return LayerShape(
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=checkpoint.integer("intermediate_size"),
        eps=checkpoint.number("rms_norm_eps", 1e-6),
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        head_norm=head_norm,
    )


def read_rope_theta(checkpoint: Checkpoint) -> float:
    """Return the rotary base, from `rope_parameters` (newer exports) or `rope_theta`. Raises `ModelError`."""
    config = checkpoint.config
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise _refused(checkpoint, "rope_scaling", f"rope type {kind!r} is not supported, only 'default'")
    theta = parameters.get("rope_theta", config.get("rope_theta"))
    if not isinstance(theta, int | float) or not theta > 0:
        raise _refused(checkpoint, "rope_theta", f"must be a positive number, not {theta!r}")
    return float(theta)


def build_decoder(checkpoint: Checkpoint, shape: LayerShape, *, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Make the decoder that config.json describes, with uninitialised weights. Raises `ModelError`."""
    return Decoder(
        shape,
        num_layers=checkpoint.integer("num_hidden_layers"),
        vocab_size=checkpoint.integer("vocab_size"),
        rope_theta=read_rope_theta(checkpoint),
        tied=checkpoint.config.get("tie_word_embeddings") is True,
        device=device,
        dtype=dtype,
    )


def name_slots(decoder: Decoder) -> tuple[dict[str, tuple[Tensor, ...]], frozenset[str]]:
    """Return the places of each tensor of a checkpoint, and the names that may be there without one."""
    slots: dict[str, tuple[Tensor, ...]] = {
        "model.embed_tokens.weight": (decoder.embedding,),
        "model.norm.weight": (decoder.norm.weight,),
    }
    ignored = {f"model.{_ROTARY_TABLE}"}
    if decoder.head is decoder.embedding:
        ignored.add("lm_head.weight")
    else:
        slots["lm_head.weight"] = (decoder.head,)
    for number, layer in enumerate(decoder.layers):
        prefix = f"model.layers.{number}."
        attention, mlp = layer.attention, layer.mlp
        shape = attention.shape
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        rows = [heads * shape.head_dim, kv_heads * shape.head_dim, kv_heads * shape.head_dim]
        slots |= _pieces(prefix + "self_attn.{}_proj", ("q", "k", "v"), attention.qkv, rows)
        slots |= _pieces(prefix + "self_attn.{}_proj", ("o",), attention.out, [shape.hidden_size])
        slots |= _pieces(prefix + "mlp.{}_proj", ("gate", "up"), mlp.gate_up, [shape.intermediate_size] * 2)
        slots |= _pieces(prefix + "mlp.{}_proj", ("down",), mlp.down, [shape.hidden_size])
        slots[prefix + "input_layernorm.weight"] = (layer.attention_norm.weight,)
        slots[prefix + "post_attention_layernorm.weight"] = (layer.mlp_norm.weight,)
        if attention.head_norm is not None:
            slots[prefix + "self_attn.q_norm.weight"] = attention.head_norm[:heads].unbind(0)
            slots[prefix + "self_attn.k_norm.weight"] = attention.head_norm[heads:].unbind(0)
        ignored.add(f"{prefix}self_attn.{_ROTARY_TABLE}")
    return slots, frozenset(ignored)


def _pieces(pattern: str, names: tuple[str, ...], fused: Linear, rows: list[int]) -> dict[str, tuple[Tensor, ...]]:
    """Return the places of projections that are stacked by rows in one linear."""
    places = {
        f"{pattern.format(name)}.weight": (piece,) for name, piece in zip(names, fused.weight.split(rows), strict=True)
    }
    if fused.bias is not None:
        for name, piece in zip(names, fused.bias.split(rows), strict=True):
            places[f"{pattern.format(name)}.bias"] = (piece,)
    return places


def _refused(checkpoint: Checkpoint, key: str, why: str) -> ModelError:
    return ModelError(f"{checkpoint.folder / 'config.json'}: {key}: {why}")
