"""Facts about a model family and one checkpoint. Rules elsewhere read them; nothing here computes."""

from dataclasses import dataclass
from enum import StrEnum

from shared.decoding import Decoding


class Attention(StrEnum):
    """What a query position may see; the engine turns it into a visible end for each position."""

    BLOCK_CAUSAL = "block_causal"
    """Everything up to the end of the position's own block."""
    BIDIRECTIONAL = "bidirectional"
    """The whole canvas."""
    CAUSAL = "causal"
    """Everything up to the position itself."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Resolved facts of one checkpoint.

    `vocab_size` is the width of the logits; ids from `text_vocab_size` up, `mask_token_id` and `never_sampled` are
    never produced. `filler_ids` fill a block behind the stop token (padding, end of text).
    """

    family: str
    attention: Attention
    vocab_size: int
    text_vocab_size: int
    mask_token_id: int
    stop_token_ids: tuple[int, ...]
    block_length: int
    max_model_len: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    decoding: Decoding
    temperature: float = 0.0
    filler_ids: tuple[int, ...] = ()
    never_sampled: tuple[int, ...] = ()
    logit_shift: int = 0
    """Position i's token is read from row i - logit_shift (1 for Dream and Fast-dLLM v2)."""
    fixed_block_length: bool = False
    """True if only `block_length` works (canvas models); else a request may choose."""
