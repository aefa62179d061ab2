"""LLaDA-MoE (inclusionAI): OLMoE-like layers with normed heads, and attention over the whole canvas."""

import torch

from kernels.moe import Router
from shared.decoding import LowConfidenceStatic
from worker.models.checkpoint import Checkpoint
from worker.models.facts import gather_facts
from worker.models.layers import Decoder, LayerShape, MoeShape
from worker.models.qwen import build_decoder, name_slots, read_shape, refuse
from worker.models.spec import Attention, Commit, ModelSpec
from worker.models.weights import fill, stored_names

# No config file of the released checkpoints names it.
MASK_TOKEN_ID = 156895
BLOCK_LENGTH = 64


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    """Return the facts of a checkpoint. Raises `ModelError`."""
    return gather_facts(
        checkpoint,
        _read_shape(checkpoint),
        family="llada_moe",
        attention=Attention.BIDIRECTIONAL,
        block_length=BLOCK_LENGTH,
        mask_token_id=MASK_TOKEN_ID,
        decoding=LowConfidenceStatic(),
        commit=Commit.REFRESHED,
        blocks_after_prompt=True,
    )


def build(checkpoint: Checkpoint, *, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Return the module with the checkpoint's weights. Raises `ModelError`."""
    decoder = build_decoder(checkpoint, _read_shape(checkpoint), device=device, dtype=dtype)
    fill(checkpoint, *name_slots(decoder, stored_names(checkpoint.folder)))
    return decoder


def _read_shape(checkpoint: Checkpoint) -> LayerShape:
    config = checkpoint.config
    biased = config.get("attention_bias") is True
    return read_shape(
        checkpoint,
        head_norm=config.get("qk_layernorm") is True,
        qkv_bias=biased,
        out_bias=biased,
        moe=_read_moe(checkpoint),
        dense_size="dense_intermediate_size",
    )


def _read_moe(checkpoint: Checkpoint) -> MoeShape:
    config = checkpoint.config
    if config.get("moe_router_score_function", "softmax") != "softmax":
        raise refuse(checkpoint, "moe_router_score_function", "only 'softmax' is supported")
    for key in ("router_num_group", "clip_qkv"):
        if config.get(key):
            raise refuse(checkpoint, key, "is not supported")
    layers = checkpoint.integer("num_hidden_layers")
    frequency = config.get("moe_layer_freq", 1)
    has_experts = frequency if isinstance(frequency, list) else [frequency] * layers
    if len(has_experts) != layers:
        raise refuse(checkpoint, "moe_layer_freq", f"must have one entry for each of {layers} layers")
    return MoeShape(
        experts=checkpoint.integer("num_experts"),
        inner=checkpoint.integer("expert_intermediate_size"),
        router=Router(
            top_k=checkpoint.integer("num_experts_per_tok"),
            normalise=config.get("norm_topk_prob") is True,
            scale=checkpoint.number("routed_scaling_factor", 1.0),
        ),
        shared_inner=config.get("shared_expert_intermediate_size") or 0,
        selection_bias=config.get("moe_router_enable_expert_bias") is True,
        dense_layers=frozenset(layer for layer, value in enumerate(has_experts) if not value),
    )
