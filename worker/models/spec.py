"""Facts about a model family and one checkpoint. Rules elsewhere read them; nothing here computes."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypedDict

from shared.decoding import Decoding

NO_MASK = -1
"""The mask id of a family that has none; nothing that is undecided then enters a forward under it."""


class Attention(StrEnum):
    """What a query position may see; the engine turns it into a visible end for each position."""

    BLOCK_CAUSAL = "block_causal"
    """Everything up to the end of the position's own block."""
    BIDIRECTIONAL = "bidirectional"
    """The whole canvas."""
    CAUSAL = "causal"
    """Everything up to the position itself."""


class Commit(StrEnum):
    """How the keys and values of a finished block become final."""

    FUSED = "fused"
    """The next block's first denoise forward writes them (block-causal families)."""
    SEEDED = "seeded"
    """A forward of their own writes them, and its last row proposes the next block's first token (Fast-dLLM v2,
    Nemotron-Labs-Diffusion; with a block length of 1 this is autoregressive decoding)."""
    REFRESHED = "refreshed"
    """Never: every position sees the whole canvas, and each block begins with a forward over it (LLaDA, Dream)."""
    REORDERED = "reordered"
    """Known tokens stand before masks in the order of storage and attention is causal in that order, so the contiguous
    known prefix is final as soon as it is written (WeDLM)."""
    ENCODED = "encoded"
    """A forward of their own writes them, as `context`, and proposes nothing (DiffusionGemma)."""


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
    """`NO_MASK` where there is none."""
    stop_token_ids: tuple[int, ...]
    block_length: int
    """Default; 0: the whole canvas is one block."""
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
    commit: Commit = Commit.FUSED
    context: Attention | None = None
    """What prompt and committed blocks see while they are written; None: `attention`."""
    cache: Literal["none", "prefix", "dual"] = "none"
    """Keys that a refreshed family reuses within a block, unless a request says otherwise."""
    blocks_after_prompt: bool = False
    """True: the first block begins behind the prompt; else at position 0, so that it may hold the prompt's tail."""
    sliding_window: int = 0
    """How far some layers see; 0: there are no such layers."""
    layer_kv: tuple[tuple[int, int], ...] = ()
    """(KV heads, head dim) of each layer, where layers differ; else empty."""
    fixed_block_length: bool = False
    """True if only `block_length` works (canvas models); else a request may choose."""


class FamilyFacts(TypedDict, total=False):
    """The facts with a default, which a family's module declares where it departs from it; see `ModelSpec`."""

    never_sampled: tuple[int, ...]
    logit_shift: int
    commit: Commit
    context: Attention | None
    cache: Literal["none", "prefix", "dual"]
    blocks_after_prompt: bool
    sliding_window: int
    layer_kv: tuple[tuple[int, int], ...]
    fixed_block_length: bool


def kv_shapes(spec: ModelSpec) -> tuple[tuple[int, int], ...]:
    """Return (KV heads, head dim) of each layer."""
    return spec.layer_kv or ((spec.num_kv_heads, spec.head_dim),) * spec.num_layers
