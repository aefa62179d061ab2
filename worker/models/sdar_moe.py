"""SDAR-MoE (JetAstra/SDAR, 30B-A3B): Qwen3-MoE layers under SDAR's mask."""

import torch

from kernels.moe import Router
from worker.models.checkpoint import Checkpoint
from worker.models.facts import gather_facts
from worker.models.layers import Decoder, LayerShape, MoeShape
from worker.models.qwen import build_decoder, name_slots, read_shape
from worker.models.sdar import BLOCK_LENGTH, MASK_TOKEN_ID
from worker.models.spec import Attention, ModelSpec
from worker.models.weights import fill, stored_names


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    """Return the facts of a checkpoint. Raises `ModelError`."""
    return gather_facts(
        checkpoint,
        _read_shape(checkpoint),
        family="sdar_moe",
        attention=Attention.BLOCK_CAUSAL,
        block_length=BLOCK_LENGTH,
        mask_token_id=MASK_TOKEN_ID,
    )


def build(checkpoint: Checkpoint, *, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Return the module with the checkpoint's weights. Raises `ModelError`."""
    decoder = build_decoder(checkpoint, _read_shape(checkpoint), device=device, dtype=dtype)
    fill(checkpoint, *name_slots(decoder, stored_names(checkpoint.folder)))
    return decoder


def _read_shape(checkpoint: Checkpoint) -> LayerShape:
    biased = checkpoint.config.get("attention_bias") is True
    moe = _read_moe(checkpoint)
    return read_shape(checkpoint, head_norm=True, qkv_bias=biased, out_bias=biased, moe=moe)


def _read_moe(checkpoint: Checkpoint) -> MoeShape:
    """Qwen3-MoE: experts in every `decoder_sparse_step`-th layer, but for those of `mlp_only_layers`."""
    config = checkpoint.config
    step, plain = checkpoint.integer("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    layers = range(checkpoint.integer("num_hidden_layers"))
    return MoeShape(
        # transformers 5 exports it under the other name.
        experts=checkpoint.integer("num_experts" if "num_experts" in config else "num_local_experts"),
        inner=checkpoint.integer("moe_intermediate_size"),
        router=Router(
            top_k=checkpoint.integer("num_experts_per_tok"),
            normalise=config.get("norm_topk_prob") is True,
        ),
        dense_layers=frozenset(layer for layer in layers if layer in plain or (layer + 1) % step),
    )
