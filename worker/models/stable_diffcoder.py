"""Stable-DiffCoder (ByteDance Seed): Llama layers under a block-causal mask, logits at the masked position itself."""

import torch

from shared.decoding import Threshold
from worker.models.checkpoint import Checkpoint
from worker.models.facts import gather_facts
from worker.models.layers import Decoder
from worker.models.qwen import build_decoder, name_slots, read_shape
from worker.models.spec import Attention, ModelSpec
from worker.models.weights import fill

MASK_TOKEN_ID = 5
BLOCK_LENGTH = 4


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    """Return the facts of a checkpoint. Raises `ModelError`."""
    return gather_facts(
        checkpoint,
        read_shape(checkpoint, head_norm=False),
        family="stable_diffcoder",
        attention=Attention.BLOCK_CAUSAL,
        block_length=BLOCK_LENGTH,
        mask_token_id=MASK_TOKEN_ID,
        # The authors' own default.
        decoding=Threshold(threshold=0.95),
    )


def build(checkpoint: Checkpoint, *, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Return the module with the checkpoint's weights. Raises `ModelError`."""
    biased = checkpoint.config.get("attention_bias") is True
    shape = read_shape(checkpoint, head_norm=False, qkv_bias=biased, out_bias=biased)
    decoder = build_decoder(checkpoint, shape, device=device, dtype=dtype)
    fill(checkpoint, *name_slots(decoder))
    return decoder
