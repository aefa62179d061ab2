"""A model's tokens as llguidance sees them, and in which order they help to end a text."""

import re
from collections.abc import Sequence

from llguidance import LLMatcher, LLTokenizer

_CLOSERS = re.compile(rb'["}\])]+')
_ORDER = (
    _CLOSERS,
    re.compile(rb"[,:;]"),
    re.compile(rb'[,:] ?"'),
    re.compile(rb"[0-9]"),
    re.compile(rb"[tfn]|true|false|null"),
    re.compile(rb'"|[\[({] ?'),
    re.compile(rb"\n?</?[a-z_]*>?\n?"),
    re.compile(rb"\n"),
    re.compile(rb"[ -~]"),
    re.compile(rb"[ -~\n]+"),
)


class Vocabulary:
    """Immutable; shared by all guards of a worker."""

    def __init__(self, tokenizer_json: str, vocab_size: int, stop_ids: Sequence[int]) -> None:
        """Takes seconds for a vocabulary of 150,000. Raises `ValueError` for a tokenizer that spells no bytes."""
        self.stop_ids = tuple(stop_ids)
        self.tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(stop_ids) or None)
        self.size = vocab_size
        ranked: list[tuple[int, int, int]] = []
        for token in range(vocab_size):
            if not self.tokenizer.is_special_token(token) and (rank := self._rank(token)) is not None:
                ranked.append((*rank, token))
        self.closing_order = tuple(token for _, _, token in sorted(ranked))
        """Those tokens that a text may be ended with, the most helpful first."""

    def _rank(self, token: int) -> tuple[int, int] | None:
        text = self.tokenizer.decode_bytes([token])
        kind = next((kind for kind, pattern in enumerate(_ORDER) if pattern.fullmatch(text)), None)
        if kind is None:
            # A byte alone can always come where a character beyond ASCII must.
            return (len(_ORDER), 0) if len(text) == 1 else None
        # Of closing brackets the more at once the better; of all others the shorter.
        return kind, -len(text) if _ORDER[kind] is _CLOSERS else len(text)


def allowed_tokens(matcher: LLMatcher, stop_ids: Sequence[int], may_stop: bool) -> bytes:
    """Return a byte for each token id, 0 for those that may not come next.

    A stop token may come where the text is whole; if nothing else may come, even where `may_stop` is false.
    """
    # Of a whole text that nothing may follow there is nothing more to ask.
    whole, over = matcher.is_accepting(), matcher.is_stopped()
    allowed = bytearray(matcher.compute_logit_bias())
    for token in stop_ids:
        allowed[token] = 0
    if whole and (may_stop or over or not any(allowed)):
        for token in stop_ids:
            allowed[token] = 1
    return bytes(allowed)
