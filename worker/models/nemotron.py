"""Nemotron-Labs-Diffusion (arXiv 2607.05722): Ministral-3 layers; text is read causally, a block decided as a whole."""

import torch

from worker.models.checkpoint import Checkpoint
from worker.models.facts import gather_facts
from worker.models.layers import Decoder, LayerShape, Linear
from worker.models.qwen import build_decoder, name_slots, read_shape
from worker.models.spec import Attention, Commit, ModelSpec
from worker.models.weights import fill

MASK_TOKEN_ID = 100
BLOCK_LENGTH = 32


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    """Return the facts of a checkpoint. Raises `ModelError`."""
    # The other mode of the published loop: what is written sees its whole block, and no token comes with it.
    causal = checkpoint.generation.get("causal_context", True) is not False
    return gather_facts(
        checkpoint,
        _read_shape(checkpoint),
        family="nemotron_labs_diffusion",
        attention=Attention.BLOCK_CAUSAL,
        block_length=BLOCK_LENGTH,
        mask_token_id=MASK_TOKEN_ID,
        commit=Commit.SEEDED if causal else Commit.FUSED,
        context=Attention.CAUSAL if causal else None,
        blocks_after_prompt=True,
    )


def build(checkpoint: Checkpoint, *, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Return the module with the checkpoint's weights. Raises `ModelError`."""
    decoder = build_decoder(checkpoint, _read_shape(checkpoint), device=device, dtype=dtype)
    slots, ignored = name_slots(decoder)
    for module in decoder.modules():
        if isinstance(module, Linear):
            module.pieces = {_rename(name): rows for name, rows in module.pieces.items()}
    fill(
        checkpoint,
        {_rename(name): places for name, places in slots.items()},
        frozenset(_rename(name) for name in ignored),
    )
    return decoder


def _rename(name: str) -> str:
    """Return the checkpoint's name of a tensor that Llama's checkpoints have as `name`."""
    return "diffusion_head.weight" if name == "lm_head.weight" else f"encoder.{name.removeprefix('model.')}"


def _read_shape(checkpoint: Checkpoint) -> LayerShape:
    biased = checkpoint.config.get("attention_bias") is True
    return read_shape(checkpoint, head_norm=False, qkv_bias=biased, out_bias=biased)
