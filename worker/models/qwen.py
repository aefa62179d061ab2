"""The Qwen and Llama make of decoder: config keys, layers and tensor names that many families share."""

from collections.abc import Collection

import torch
from torch import Tensor

from worker.models.checkpoint import Checkpoint, ModelError
from worker.models.layers import Decoder, GatedMLP, LayerShape, Linear, MoeMLP, MoeShape
from worker.models.rope import read_rope

# Older exports carry the rotary table, which is computed here.
_ROTARY_TABLE = "rotary_emb.inv_freq"


def read_shape(
    checkpoint: Checkpoint,
    *,
    head_norm: bool,
    qkv_bias: bool = False,
    out_bias: bool = False,
    moe: MoeShape | None = None,
    dense_size: str = "intermediate_size",
) -> LayerShape:
    """Read the layer's shape from config.json. Raises `ModelError` for what these layers do not do.

    `dense_size` is the key of the plain MLP's size; with a mixture in every layer it may be absent.
    """
    config = checkpoint.config
    hidden, heads = checkpoint.integer("hidden_size"), checkpoint.integer("num_attention_heads")
    kv_heads = checkpoint.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise refuse(checkpoint, "num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {heads}")
    # head_dim is a fact of its own: SDAR-4B has 32 heads of 128 on a hidden size of 2560.
    head_dim = checkpoint.integer("head_dim") if config.get("head_dim") is not None else hidden // heads
    if config.get("hidden_act", "silu") != "silu":
        raise refuse(checkpoint, "hidden_act", f"{config['hidden_act']!r} is not supported, only 'silu'")
    if config.get("use_sliding_window"):
        raise refuse(checkpoint, "use_sliding_window", "sliding windows are not supported")
    return LayerShape(
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=checkpoint.integer(dense_size, None if moe is None or moe.dense_layers else 1),
        eps=checkpoint.number("rms_norm_eps", 1e-6),
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        head_norm=head_norm,
        rotary_dim=_rotary_dim(checkpoint, head_dim),
        moe=moe,
    )


def _rotary_dim(checkpoint: Checkpoint, head_dim: int) -> int:
    share = checkpoint.config.get("partial_rotary_factor")
    if share is None:
        return 0
    width = int(head_dim * checkpoint.number("partial_rotary_factor"))
    if not 0 < width <= head_dim or width % 2:
        raise refuse(checkpoint, "partial_rotary_factor", f"{share} of a head of {head_dim} is not an even part")
    return width


def build_decoder(checkpoint: Checkpoint, shape: LayerShape, *, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Make the decoder that config.json describes, with uninitialised weights. Raises `ModelError`."""
    return Decoder(
        shape,
        num_layers=checkpoint.integer("num_hidden_layers"),
        vocab_size=checkpoint.integer("vocab_size"),
        rope=read_rope(checkpoint),
        tied=checkpoint.config.get("tie_word_embeddings") is True,
        device=device,
        dtype=dtype,
    )


def name_slots(decoder: Decoder, stored: Collection[str] = ()) -> tuple[dict[str, tuple[Tensor, ...]], frozenset[str]]:
    """Return the places of each tensor of a checkpoint, and the names that may be there without one.

    `stored` are the checkpoint's names, which tell how a mixture's experts were exported.
    """
    slots, ignored = name_ends(decoder)
    for number, layer in enumerate(decoder.layers):
        prefix = f"model.layers.{number}."
        attention = layer.attention
        shape = attention.shape
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        rows = [heads * shape.head_dim, kv_heads * shape.head_dim, kv_heads * shape.head_dim]
        slots |= name_pieces(prefix + "self_attn.{}_proj", ("q", "k", "v"), attention.qkv, rows)
        slots |= name_pieces(prefix + "self_attn.{}_proj", ("o",), attention.out, [shape.hidden_size])
        slots |= name_mlp(f"{prefix}mlp.", layer.mlp, stored)
        slots[prefix + "input_layernorm.weight"] = (layer.attention_norm.weight,)
        slots[prefix + "post_attention_layernorm.weight"] = (layer.mlp_norm.weight,)
        if attention.head_norm is not None:
            slots[prefix + "self_attn.q_norm.weight"] = attention.head_norm[:heads].unbind(0)
            slots[prefix + "self_attn.k_norm.weight"] = attention.head_norm[heads:].unbind(0)
        ignored.add(f"{prefix}self_attn.{_ROTARY_TABLE}")
    return slots, frozenset(ignored)


def name_ends(
    decoder: Decoder, embedding: str = "model.embed_tokens.weight"
) -> tuple[dict[str, tuple[Tensor, ...]], set[str]]:
    """Return the places of what stands before and behind the layers, and the names that may be there without one."""
    slots: dict[str, tuple[Tensor, ...]] = {
        embedding: (decoder.embedding,),
        "model.norm.weight": (decoder.norm.weight,),
    }
    ignored = {f"model.{_ROTARY_TABLE}"}
    if decoder.head is decoder.embedding:
        ignored.add("lm_head.weight")
    else:
        slots["lm_head.weight"] = (decoder.head,)
    return slots, ignored


def name_mlp(prefix: str, mlp: GatedMLP | MoeMLP, stored: Collection[str]) -> dict[str, tuple[Tensor, ...]]:
    """Return the places of an MLP's tensors, `prefix` ending in a dot.

    A mixture's experts are stored one by one (`experts.N.gate_proj.weight`), or stacked ([experts, ...]) as
    `experts.gate_proj` or, gate and up in one, `experts.gate_up_proj`, with or without `.weight`.
    """
    if isinstance(mlp, GatedMLP):
        return _name_gated(prefix, mlp)
    slots: dict[str, tuple[Tensor, ...]] = {f"{prefix}gate.weight": (mlp.router,)}
    if mlp.selection_bias is not None:
        slots[f"{prefix}gate.expert_bias"] = (mlp.selection_bias,)
    if mlp.shared is not None:
        # LLaDA2.0 speaks of shared experts, LLaDA-MoE of one.
        plural = f"{prefix}shared_experts.gate_proj.weight" in stored
        slots |= _name_gated(f"{prefix}shared_expert{'s' if plural else ''}.", mlp.shared)
    inner = mlp.down.shape[2]
    gate, up = mlp.gate_up.split(inner, dim=1)
    for end in ("", ".weight"):
        if f"{prefix}experts.down_proj{end}" not in stored:
            continue
        slots[f"{prefix}experts.down_proj{end}"] = (mlp.down,)
        if f"{prefix}experts.gate_up_proj{end}" in stored:
            slots[f"{prefix}experts.gate_up_proj{end}"] = (mlp.gate_up,)
        else:
            slots[f"{prefix}experts.gate_proj{end}"] = (gate,)
            slots[f"{prefix}experts.up_proj{end}"] = (up,)
        return slots
    pieces: list[tuple[str, str, str]] = []
    for number in range(mlp.down.shape[0]):
        names = [f"{prefix}experts.{number}.{name}_proj" for name in ("gate", "up", "down")]
        for name, stacked in zip(names, (gate, up, mlp.down), strict=True):
            slots[f"{name}.weight"] = (stacked[number],)
        pieces.append((names[0], names[1], names[2]))
    mlp.pieces = tuple(pieces)
    return slots


def _name_gated(prefix: str, mlp: GatedMLP) -> dict[str, tuple[Tensor, ...]]:
    hidden, inner = mlp.down.weight.shape
    pieces = name_pieces(prefix + "{}_proj", ("gate", "up"), mlp.gate_up, [inner] * 2)
    return pieces | name_pieces(prefix + "{}_proj", ("down",), mlp.down, [hidden])


def name_pieces(pattern: str, names: tuple[str, ...], fused: Linear, rows: list[int]) -> dict[str, tuple[Tensor, ...]]:
    """Return the places of projections that are stacked by rows in one linear, and note their names there."""
    first = 0
    for name, count in zip(names, rows, strict=True):
        fused.pieces[pattern.format(name)] = (first, first + count)
        first += count
    places = {
        f"{pattern.format(name)}.weight": (piece,) for name, piece in zip(names, fused.weight.split(rows), strict=True)
    }
    if fused.bias is not None:
        for name, piece in zip(names, fused.bias.split(rows), strict=True):
            places[f"{pattern.format(name)}.bias"] = (piece,)
    return places


def refuse(checkpoint: Checkpoint, key: str, why: str) -> ModelError:
    return ModelError(f"{checkpoint.folder / 'config.json'}: {key}: {why}")
