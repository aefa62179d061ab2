"""Fast-dLLM v2 (arXiv 2509.26328): Qwen2.5 layers, block-causal attention, logits shifted by one inside a block."""

import torch

from shared.decoding import SubBlock
from worker.models.checkpoint import Checkpoint
from worker.models.facts import gather_facts
from worker.models.layers import Decoder, LayerShape
from worker.models.qwen import build_decoder, name_slots, read_shape
from worker.models.spec import Attention, Commit, ModelSpec
from worker.models.weights import fill

# The id in the released checkpoints, none of whose config files names it.
MASK_TOKEN_ID = 151665
BLOCK_LENGTH = 32


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    """Return the facts of a checkpoint. Raises `ModelError`."""
    return gather_facts(
        checkpoint,
        _read_shape(checkpoint),
        family="fastdllm_v2",
        attention=Attention.BLOCK_CAUSAL,
        block_length=checkpoint.integer("bd_size", BLOCK_LENGTH),
        mask_token_id=MASK_TOKEN_ID,
        decoding=SubBlock(),
        logit_shift=1,
        commit=Commit.SEEDED,
    )


def build(checkpoint: Checkpoint, *, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Return the module with the checkpoint's weights. Raises `ModelError`."""
    decoder = build_decoder(checkpoint, _read_shape(checkpoint), device=device, dtype=dtype)
    fill(checkpoint, *name_slots(decoder))
    return decoder


def _read_shape(checkpoint: Checkpoint) -> LayerShape:
    return read_shape(checkpoint, head_norm=False, qkv_bias=True)
