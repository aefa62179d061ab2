"""Plain autoregressive Qwen2, Qwen3 and Llama: a block is one token, proposed by the row before it."""

import torch

from worker.models.checkpoint import Checkpoint
from worker.models.facts import gather_facts
from worker.models.layers import Decoder, LayerShape
from worker.models.qwen import build_decoder, name_slots, read_shape, refuse
from worker.models.spec import NO_MASK, Attention, Commit, ModelSpec
from worker.models.weights import fill


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    """Return the facts of a checkpoint. Raises `ModelError`."""
    return gather_facts(
        checkpoint,
        _read_shape(checkpoint),
        family="autoregressive",
        attention=Attention.CAUSAL,
        block_length=1,
        mask_token_id=NO_MASK,
        commit=Commit.SEEDED,
        fixed_block_length=True,
    )


def build(checkpoint: Checkpoint, *, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Return the module with the checkpoint's weights. Raises `ModelError`."""
    decoder = build_decoder(checkpoint, _read_shape(checkpoint), device=device, dtype=dtype)
    fill(checkpoint, *name_slots(decoder))
    return decoder


def _read_shape(checkpoint: Checkpoint) -> LayerShape:
    config = checkpoint.config
    if config.get("mlp_bias"):
        raise refuse(checkpoint, "mlp_bias", "is not supported")
    biased = config.get("attention_bias") is True
    names = config.get("architectures") or []
    return read_shape(
        checkpoint,
        head_norm="Qwen3ForCausalLM" in names,
        qkv_bias=biased or "Qwen2ForCausalLM" in names,
        out_bias=biased,
    )
