"""The facts that every family reads alike; a family's module adds the ones that make it a family."""

from typing import Unpack

from shared.decoding import Decoding
from worker.models.checkpoint import (
    Checkpoint,
    ModelError,
    find_decoding,
    find_filler_ids,
    find_mask_id,
    find_temperature,
)
from worker.models.layers import LayerShape
from worker.models.spec import NO_MASK, Attention, FamilyFacts, ModelSpec


def gather_facts(
    checkpoint: Checkpoint,
    shape: LayerShape,
    *,
    family: str,
    attention: Attention,
    block_length: int,
    mask_token_id: int | None = None,
    stop_token_ids: tuple[int, ...] | None = None,
    decoding: Decoding | None = None,
    **declared: Unpack[FamilyFacts],
) -> ModelSpec:
    """Return the facts of a checkpoint.

    `mask_token_id` and `decoding` are the family's own, for a checkpoint that names none; a mask of `NO_MASK` stands.
    `stop_token_ids` replaces the checkpoint's eos. Raises `ModelError`.
    """
    vocab_size = checkpoint.integer("vocab_size")
    mask = NO_MASK if mask_token_id == NO_MASK else find_mask_id(checkpoint, mask_token_id)
    stops = checkpoint.special("eos_token_id") if stop_token_ids is None else stop_token_ids
    for name, token in [("mask", mask), *(("stop", token) for token in stops)]:
        if token >= vocab_size:
            raise ModelError(f"{checkpoint.folder}: {name} token {token} is outside the vocabulary of {vocab_size}")
    return ModelSpec(
        family=family,
        attention=attention,
        vocab_size=vocab_size,
        text_vocab_size=vocab_size if checkpoint.tokenizer is None else min(vocab_size, checkpoint.tokenizer.size),
        mask_token_id=mask,
        stop_token_ids=stops,
        block_length=find_block_length(checkpoint, block_length),
        max_model_len=checkpoint.integer("max_position_embeddings"),
        num_layers=checkpoint.integer("num_hidden_layers"),
        hidden_size=shape.hidden_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        decoding=find_decoding(checkpoint, decoding),
        temperature=find_temperature(checkpoint),
        filler_ids=tuple(token for token in find_filler_ids(checkpoint, stops) if token < vocab_size),
        **declared,
    )


def find_block_length(checkpoint: Checkpoint, default: int) -> int:
    """Return the default block length: generation_config.json's, else config.json's, else the family's."""
    value = checkpoint.generation.get("block_length")
    if value is None:
        value = checkpoint.config.get("block_size")
        return default if value is None else checkpoint.integer("block_size")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{checkpoint.folder / 'generation_config.json'}: block_length must be >= 1, not {value!r}")
    return value
