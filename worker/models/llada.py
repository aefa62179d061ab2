"""LLaDA 8B and LLaDA 1.5 (ML-GSAI/LLaDA): Llama layers under OLMo's names, attention over the whole canvas."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shared.decoding import LowConfidenceStatic
from worker.models.checkpoint import Checkpoint
from worker.models.facts import gather_facts
from worker.models.layers import Decoder, GatedMLP, LayerShape
from worker.models.qwen import build_decoder, name_pieces, read_shape, refuse
from worker.models.spec import Attention, Commit, ModelSpec
from worker.models.weights import fill

# Ids of the released checkpoints: the mask, and `<|eot_id|>`, which ends a turn before `<|endoftext|>` fills the rest.
MASK_TOKEN_ID = 126336
TURN_END_ID = 126348
BLOCK_LENGTH = 32

# What the configuration could ask for beyond these layers, and the values under which it does not.
_FIXED: Mapping[str, tuple[object, ...]] = {
    "activation_type": ("silu", "swiglu"),
    "alibi": (False,),
    "attention_layer_norm": (False,),
    "block_type": ("llama",),
    "include_bias": (False,),
    "input_emb_norm": (False,),
    "layer_norm_type": ("rms",),
    "rope": (True,),
    "scale_logits": (False,),
}


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    """Return the facts of a checkpoint. Raises `ModelError`."""
    checkpoint = _in_llama_keys(checkpoint)
    eos = checkpoint.special("eos_token_id")
    has_turns = checkpoint.integer("vocab_size") > TURN_END_ID
    spec = gather_facts(
        checkpoint,
        _read_shape(checkpoint),
        family="llada",
        attention=Attention.BIDIRECTIONAL,
        block_length=BLOCK_LENGTH,
        mask_token_id=MASK_TOKEN_ID,
        stop_token_ids=tuple(dict.fromkeys((*eos, TURN_END_ID))) if has_turns else eos,
        decoding=LowConfidenceStatic(),
        commit=Commit.REFRESHED,
        blocks_after_prompt=True,
    )
    return replace(spec, filler_ids=eos) if has_turns else spec


def build(checkpoint: Checkpoint, *, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Return the module with the checkpoint's weights. Raises `ModelError`."""
    checkpoint = _in_llama_keys(checkpoint)
    decoder = build_decoder(checkpoint, _read_shape(checkpoint), device=device, dtype=dtype)
    fill(checkpoint, *_name_slots(decoder))
    return decoder


def _in_llama_keys(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with its configuration under the names that Llama's has. Raises `ModelError`."""
    config = checkpoint.config
    for key, allowed in _FIXED.items():
        if config.get(key, allowed[0]) not in allowed:
            raise refuse(checkpoint, key, f"{config[key]!r} is not supported, only {allowed[0]!r}")
    heads = checkpoint.integer("n_heads")
    kv_heads = 1 if config.get("multi_query_attention") else config.get("n_kv_heads")
    translated: dict[str, Any] = {
        "hidden_size": checkpoint.integer("d_model"),
        "intermediate_size": checkpoint.integer("mlp_hidden_size"),
        "max_position_embeddings": checkpoint.integer("max_sequence_length"),
        "num_attention_heads": heads,
        "num_hidden_layers": checkpoint.integer("n_layers"),
        "num_key_value_heads": heads if kv_heads is None else kv_heads,
        "rms_norm_eps": checkpoint.number("rms_norm_eps", 1e-5),
        "rope_theta": checkpoint.number("rope_theta", 10000.0),
        "tie_word_embeddings": config.get("weight_tying") is True,
        # The logits are as wide as the embedding, which is padded beyond the vocabulary.
        "vocab_size": checkpoint.integer("embedding_size", config.get("vocab_size")),
    }
    return replace(checkpoint, config={**config, **translated})


def _read_shape(checkpoint: Checkpoint) -> LayerShape:
    return read_shape(checkpoint, head_norm=False, qkv_bias=checkpoint.config.get("include_qkv_bias") is True)


def _name_slots(decoder: Decoder) -> tuple[dict[str, tuple[Tensor, ...]], frozenset[str]]:
    head = "model.transformer.ff_out.weight"
    slots: dict[str, tuple[Tensor, ...]] = {
        "model.transformer.wte.weight": (decoder.embedding,),
        "model.transformer.ln_f.weight": (decoder.norm.weight,),
    }
    tied = decoder.head is decoder.embedding
    if not tied:
        slots[head] = (decoder.head,)
    for number, layer in enumerate(decoder.layers):
        prefix, shape, mlp = f"model.transformer.blocks.{number}.", layer.attention.shape, layer.mlp
        assert isinstance(mlp, GatedMLP)
        kv = shape.num_kv_heads * shape.head_dim
        rows = [shape.num_heads * shape.head_dim, kv, kv]
        slots |= name_pieces(prefix + "{}_proj", ("q", "k", "v"), layer.attention.qkv, rows)
        slots |= name_pieces(prefix + "{}", ("attn_out",), layer.attention.out, [shape.hidden_size])
        slots |= name_pieces(prefix + "{}_proj", ("ff", "up"), mlp.gate_up, [shape.intermediate_size] * 2)
        slots |= name_pieces(prefix + "{}", ("ff_out",), mlp.down, [shape.hidden_size])
        slots[prefix + "attn_norm.weight"] = (layer.attention_norm.weight,)
        slots[prefix + "ff_norm.weight"] = (layer.mlp_norm.weight,)
    return slots, frozenset({head} if tied else ())
