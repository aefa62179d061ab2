"""From token ids to text, one token at a time, without taking back what was given out.

Two kinds of vocabulary spell text in bytes: byte-level BPE, and sentencepiece with byte fallback. For them each token
is a few bytes, and an incremental UTF-8 decoder does the rest. Every other decoder joins whole pieces by rules that
look at the token before at most, so that decoding a short window of tokens tells what the newest one adds.
"""

import codecs
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer as Backend

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 4
"""Bytes, and so tokens, that one character can be spread over."""


class Detokenizer(Protocol):
    def push(self, token_ids: Sequence[int]) -> str:
        """Feed tokens; return the text that became certain: never half a character."""
        ...

    def flush(self) -> str:
        """Return what was held back, with U+FFFD for bytes that are no character."""
        ...


def detokenizer_factory(backend: Backend) -> Callable[[bool], Detokenizer]:
    """Return a function that makes a fresh detokenizer; its argument tells whether to skip special tokens."""
    special = {number for number, token in backend.get_added_tokens_decoder().items() if token.special}
    nothing: frozenset[int] = frozenset()
    piece = _byte_piece(json.loads(backend.to_str())["decoder"])
    if piece is None:
        return lambda skip_special: _Window(backend, special if skip_special else nothing)
    spelling = _Spelling(backend, *piece)
    return lambda skip_special: _Bytes(spelling, special if skip_special else nothing)


class Speller:
    """The bytes of single tokens, as they stand within a text."""

    def __init__(self, backend: Backend) -> None:
        piece = _byte_piece(json.loads(backend.to_str())["decoder"])
        self._backend = backend
        self._spelling = None if piece is None else _Spelling(backend, *piece)
        self.strip = b"" if self._spelling is None else self._spelling.strip
        """Taken off the very beginning of a text, once."""

    def spell(self, token_id: int) -> bytes:
        """Return a token's bytes; none for an id without a token."""
        if self._spelling is not None:
            return self._spelling[token_id]
        return self._backend.decode([token_id], skip_special_tokens=False).encode()


class _Spelling:
    """The bytes of each token, looked up once."""

    def __init__(self, backend: Backend, piece: Callable[[str], bytes], strip: bytes) -> None:
        self.strip = strip
        """Taken off the very beginning of a text, once."""
        self._backend = backend
        self._piece = piece
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        known = self._known.get(token_id)
        if known is None:
            token = self._backend.id_to_token(token_id)
            # Ids without a token exist: embedding tables are padded to round sizes.
            known = self._known[token_id] = b"" if token is None else self._piece(token)
        return known


class _Bytes:
    def __init__(self, spelling: _Spelling, skip: frozenset[int] | set[int]) -> None:
        self._spelling = spelling
        self._skip = skip
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = bool(spelling.strip)

    def push(self, token_ids: Sequence[int]) -> str:
        spelled = b"".join(self._spelling[number] for number in token_ids if number not in self._skip)
        if self._at_start and spelled:
            spelled = spelled.removeprefix(self._spelling.strip)
            self._at_start = False
        return self._decoder.decode(spelled)

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _Window:
    """Decode the newest tokens twice, with and without the undecided ones: the difference is what they add."""

    def __init__(self, backend: Backend, skip: frozenset[int] | set[int]) -> None:
        self._backend = backend
        self._skip = skip
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        self._pending.extend(number for number in token_ids if number not in self._skip)
        added = self._added()
        if added.endswith(_REPLACEMENT) and len(self._pending) < _LONGEST_CHARACTER:
            return ""
        return self._release(added)

    def flush(self) -> str:
        return self._release(self._added())

    def _added(self) -> str:
        before = self._backend.decode(self._context, skip_special_tokens=False)
        return self._backend.decode(self._context + self._pending, skip_special_tokens=False)[len(before) :]

    def _release(self, added: str) -> str:
        if added:
            self._context, self._pending = self._pending, []
        return added


def _byte_piece(decoder: dict[str, Any] | None) -> tuple[Callable[[str], bytes], bytes] | None:
    """Return how a decoder of tokenizer.json spells one token, and what it strips at the start of a text.

    None if its tokens are not spelled in bytes.
    """
    steps: list[dict[str, Any]] = [] if decoder is None else decoder.get("decoders", [decoder])
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level_piece, b""
    if "ByteFallback" not in kinds or not set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return None
    replaced: list[tuple[str, str]] = []
    strip = b""
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                replaced.append((old, new))
            case {"type": "Strip", "content": str(content), "start": 0 | 1 as start, "stop": 0}:
                strip += (content * start).encode()
            case {"type": "ByteFallback" | "Fuse"}:
                pass
            case _:
                return None

    def spell(token: str) -> bytes:
        if byte := _BYTE_PIECE.fullmatch(token):
            return bytes.fromhex(byte[1])
        for old, new in replaced:
            token = token.replace(old, new)
        return token.encode()

    return spell, strip


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's printable stand-in for each byte: itself where printable, else from U+0100 on in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level_alphabet()


def _byte_level_piece(token: str) -> bytes:
    try:
        return bytes([_BYTE_LEVEL[character] for character in token])
    except KeyError:
        # An added token is spelled in plain text.
        return token.encode()
