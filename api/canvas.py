"""Snapshots of a canvas for the wire."""

from collections.abc import Sequence
from itertools import groupby

from shared.events import Snapshot
from shared.text import Tokenizer

MASK_GLYPH = "\u2591"
"""Light shade: one for each undecided position."""


def canvas_fields(event: Snapshot, tokenizer: Tokenizer, prompt_tokens: int) -> dict[str, object]:
    """Return what both native and chat streams say of a snapshot.

    `token_offset` counts from the first produced token; `absolute_start` and `absolute_end` from the first of the
    prompt. `tokens` is the text of each position by itself, None where masked.
    """
    return {
        "token_offset": event.offset,
        "absolute_start": prompt_tokens + event.offset,
        "absolute_end": prompt_tokens + event.offset + len(event.token_ids),
        "token_ids": event.token_ids,
        "text": canvas_text(event.token_ids, tokenizer),
        "tokens": [None if token is None else tokenizer.decode([token]) for token in event.token_ids],
        "confidence": event.confidence,
        "block": event.block,
        "step": event.step,
        "nfe": event.nfe,
    }


def canvas_text(token_ids: Sequence[int | None], tokenizer: Tokenizer) -> str:
    """Return decided runs as text, and a glyph for each masked position."""
    parts: list[str] = []
    for _, run in groupby(token_ids, key=lambda token: token is None):
        positions = list(run)
        decided = [token for token in positions if token is not None]
        parts.append(tokenizer.decode(decided) if decided else MASK_GLYPH * len(positions))
    return "".join(parts)
