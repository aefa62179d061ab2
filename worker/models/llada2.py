"""LLaDA2.0 and 2.1 (inclusionAI): block-causal mixture of experts, sigmoid router with groups, half-rotated heads."""

import torch

from kernels.moe import Router
from shared.decoding import LowConfidenceDynamic
from worker.models.checkpoint import Checkpoint
from worker.models.facts import gather_facts
from worker.models.layers import Decoder, LayerShape, MoeShape
from worker.models.qwen import build_decoder, name_ends, name_mlp, name_pieces, read_shape, refuse
from worker.models.spec import Attention, ModelSpec
from worker.models.weights import fill, stored_names

# The id in the released checkpoints, which all share one tokenizer.
MASK_TOKEN_ID = 156895
BLOCK_LENGTH = 32


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    """Return the facts of a checkpoint. Raises `ModelError`."""
    return gather_facts(
        checkpoint,
        _read_shape(checkpoint),
        family="llada2",
        attention=Attention.BLOCK_CAUSAL,
        block_length=BLOCK_LENGTH,
        mask_token_id=MASK_TOKEN_ID,
        # The authors' own: at least one a step, all above 0.95.
        decoding=LowConfidenceDynamic(threshold=0.95),
    )


def build(checkpoint: Checkpoint, *, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Return the module with the checkpoint's weights. Raises `ModelError`."""
    decoder = build_decoder(checkpoint, _read_shape(checkpoint), device=device, dtype=dtype)
    stored = stored_names(checkpoint.folder)
    slots, ignored = name_ends(decoder, "model.word_embeddings.weight")
    for number, layer in enumerate(decoder.layers):
        prefix, attention = f"model.layers.{number}.", layer.attention
        slots |= name_mlp(f"{prefix}mlp.", layer.mlp, stored)
        # Its rows are all query heads, all key heads, all value heads, as here.
        for name, linear in (("query_key_value", attention.qkv), ("dense", attention.out)):
            slots |= name_pieces(prefix + "attention.{}", (name,), linear, [linear.weight.shape[0]])
        if attention.head_norm is not None:
            heads = attention.shape.num_heads
            slots[f"{prefix}attention.query_layernorm.weight"] = attention.head_norm[:heads].unbind(0)
            slots[f"{prefix}attention.key_layernorm.weight"] = attention.head_norm[heads:].unbind(0)
        slots[f"{prefix}input_layernorm.weight"] = (layer.attention_norm.weight,)
        slots[f"{prefix}post_attention_layernorm.weight"] = (layer.mlp_norm.weight,)
    fill(checkpoint, slots, frozenset(ignored))
    return decoder


def _read_shape(checkpoint: Checkpoint) -> LayerShape:
    config = checkpoint.config
    return read_shape(
        checkpoint,
        head_norm=config.get("use_qk_norm") is not False,
        qkv_bias=config.get("use_qkv_bias") is True,
        out_bias=config.get("use_bias") is True,
        moe=_read_moe(checkpoint),
    )


def _read_moe(checkpoint: Checkpoint) -> MoeShape:
    config = checkpoint.config
    scoring = config.get("score_function", "sigmoid")
    if scoring not in ("sigmoid", "softmax"):
        raise refuse(checkpoint, "score_function", f"{scoring!r} is not supported, only 'sigmoid' and 'softmax'")
    inner, experts = checkpoint.integer("moe_intermediate_size"), checkpoint.integer("num_experts")
    groups = checkpoint.integer("n_group", 1)
    if experts % groups:
        raise refuse(checkpoint, "n_group", f"{groups} does not divide num_experts {experts}")
    dense, layers = config.get("first_k_dense_replace") or 0, checkpoint.integer("num_hidden_layers")
    return MoeShape(
        experts=experts,
        inner=inner,
        router=Router(
            top_k=checkpoint.integer("num_experts_per_tok"),
            scoring=scoring,
            groups=groups,
            kept_groups=checkpoint.integer("topk_group", groups),
            normalise=config.get("norm_topk_prob") is not False,
            scale=checkpoint.number("routed_scaling_factor", 1.0),
        ),
        shared_inner=inner * (config.get("num_shared_experts") or 0),
        selection_bias=config.get("moe_router_enable_expert_bias") is True,
        dense_layers=frozenset(range(min(dense, layers))),
    )
