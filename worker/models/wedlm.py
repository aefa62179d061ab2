"""WeDLM 7B and 8B (Tencent/WeDLM): Qwen2.5 or Qwen3 layers, causal attention over known tokens first, masks last."""

import torch

from shared.decoding import Threshold
from worker.models.checkpoint import Checkpoint
from worker.models.facts import gather_facts
from worker.models.layers import Decoder, LayerShape
from worker.models.qwen import build_decoder, name_slots, read_shape
from worker.models.spec import Attention, Commit, ModelSpec
from worker.models.weights import fill

# The id that the published fine-tuning code adds.
MASK_TOKEN_ID = 151665
BLOCK_LENGTH = 16


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    """Return the facts of a checkpoint. Raises `ModelError`."""
    return gather_facts(
        checkpoint,
        _read_shape(checkpoint),
        family="wedlm",
        attention=Attention.CAUSAL,
        block_length=BLOCK_LENGTH,
        mask_token_id=MASK_TOKEN_ID,
        decoding=Threshold(),
        commit=Commit.REORDERED,
        blocks_after_prompt=True,
    )


def build(checkpoint: Checkpoint, *, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Return the module with the checkpoint's weights. Raises `ModelError`."""
    decoder = build_decoder(checkpoint, _read_shape(checkpoint), device=device, dtype=dtype)
    fill(checkpoint, *name_slots(decoder))
    return decoder


def _read_shape(checkpoint: Checkpoint) -> LayerShape:
    # The two sizes differ in these: 7B is Qwen2.5 with biased projections, 8B Qwen3 with normed heads.
    config = checkpoint.config
    biased = config.get("attention_bias") is True
    return read_shape(checkpoint, head_norm=config.get("qk_norm") is True, qkv_bias=biased)
