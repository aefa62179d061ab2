"""Dream 7B, Dream-Coder and DiffuCoder: Qwen2 layers, attention over the whole canvas, logits shifted by one."""

import torch

from shared.decoding import Entropy
from worker.models.checkpoint import Checkpoint
from worker.models.facts import gather_facts
from worker.models.layers import Decoder, LayerShape
from worker.models.qwen import build_decoder, name_slots, read_shape
from worker.models.spec import Attention, Commit, ModelSpec
from worker.models.weights import fill

# Of the released checkpoints: the mask, and `<|im_end|>`, which ends a turn before `<|endoftext|>` fills the rest.
MASK_TOKEN_ID = 151666
TURN_END_ID = 151645


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    """Return the facts of a checkpoint. Raises `ModelError`."""
    eos = checkpoint.special("eos_token_id")
    has_turns = checkpoint.integer("vocab_size") > TURN_END_ID
    return gather_facts(
        checkpoint,
        _read_shape(checkpoint),
        family="dream",
        attention=Attention.BIDIRECTIONAL,
        # The published loop decides the whole canvas as one block.
        block_length=0,
        mask_token_id=MASK_TOKEN_ID,
        stop_token_ids=tuple(dict.fromkeys((TURN_END_ID, *eos))) if has_turns else eos,
        decoding=Entropy(),
        logit_shift=1,
        commit=Commit.REFRESHED,
        blocks_after_prompt=True,
    )


def build(checkpoint: Checkpoint, *, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Return the module with the checkpoint's weights. Raises `ModelError`."""
    decoder = build_decoder(checkpoint, _read_shape(checkpoint), device=device, dtype=dtype)
    fill(checkpoint, *name_slots(decoder))
    return decoder


def _read_shape(checkpoint: Checkpoint) -> LayerShape:
    return read_shape(checkpoint, head_norm=False, qkv_bias=True)
