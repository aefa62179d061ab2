"""SDAR and TraDo (JetAstra/SDAR): Qwen3 layers, block-causal attention, logits read at the masked position itself."""

import torch

from worker.models.checkpoint import (
    Checkpoint,
    ModelError,
    find_decoding,
    find_filler_ids,
    find_mask_id,
    find_temperature,
)
from worker.models.layers import Decoder
from worker.models.qwen import build_decoder, name_slots, read_shape
from worker.models.spec import Attention, ModelSpec
from worker.models.weights import load_weights

# The id in the released checkpoints, which all share one tokenizer.
MASK_TOKEN_ID = 151669
BLOCK_LENGTH = 4


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    """Return the facts of a checkpoint. Raises `ModelError`."""
    shape = read_shape(checkpoint, head_norm=True)
    vocab_size = checkpoint.integer("vocab_size")
    mask_token_id = find_mask_id(checkpoint, MASK_TOKEN_ID)
    stop_token_ids = checkpoint.special("eos_token_id")
    filler_ids = find_filler_ids(checkpoint, stop_token_ids)
    for name, token in [("mask", mask_token_id), *(("stop", token) for token in stop_token_ids)]:
        if token >= vocab_size:
            raise ModelError(f"{checkpoint.folder}: {name} token {token} is outside the vocabulary of {vocab_size}")
    text_vocab_size = vocab_size if checkpoint.tokenizer is None else min(vocab_size, checkpoint.tokenizer.size)
    generation = checkpoint.generation
    return ModelSpec(
        family="sdar",
        attention=Attention.BLOCK_CAUSAL,
        vocab_size=vocab_size,
        text_vocab_size=text_vocab_size,
        mask_token_id=mask_token_id,
        stop_token_ids=stop_token_ids,
        block_length=_block_length(checkpoint, generation.get("block_length")),
        max_model_len=checkpoint.integer("max_position_embeddings"),
        num_layers=checkpoint.integer("num_hidden_layers"),
        hidden_size=shape.hidden_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        decoding=find_decoding(checkpoint),
        temperature=find_temperature(checkpoint),
        filler_ids=tuple(token for token in filler_ids if token < vocab_size),
    )


def build(checkpoint: Checkpoint, *, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Return the module with the checkpoint's weights. Raises `ModelError`."""
    biased = checkpoint.config.get("attention_bias") is True
    shape = read_shape(checkpoint, head_norm=True, qkv_bias=biased, out_bias=biased)
    decoder = build_decoder(checkpoint, shape, device=device, dtype=dtype)
    load_weights(checkpoint.folder, *name_slots(decoder))
    return decoder


def _block_length(checkpoint: Checkpoint, generation: object) -> int:
    if generation is None:
        return checkpoint.integer("block_size", BLOCK_LENGTH)
    if not isinstance(generation, int) or isinstance(generation, bool) or generation < 1:
        raise ModelError(
            f"{checkpoint.folder / 'generation_config.json'}: block_length must be >= 1, not {generation!r}"
        )
    return generation
