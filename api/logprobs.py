"""Log-probabilities in OpenAI's shapes and the native one, in step with the text that a stream has released."""

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from shared.events import Delta, Finished, TokenLogprob
from shared.text import Tokenizer

LEAST = -9999.0
"""Stands for everything that is less likely, also for what JSON cannot say."""


@dataclass(frozen=True, slots=True)
class _Spelled:
    token: int
    spelled: bytes
    start: int
    """Characters of the answer that were complete before it."""
    told: TokenLogprob


class LogprobWriter:
    """The log-probabilities of one answer.

    Those of a token are given out with the text that it begins: text that is held back may turn out to be a stop
    string, whose tokens are no part of the answer.
    """

    def __init__(self, tokenizer: Tokenizer, start: int = 0) -> None:
        """`start` is where the answer begins in the text that the caller sees."""
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.special_tokens.values())
        self._strip = tokenizer.speller.strip
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held: deque[_Spelled] = deque()
        self._spelled = self._released = start

    def of_delta(self, event: Delta) -> list[_Spelled]:
        """Take a block in; return the tokens whose text is out."""
        for token, told in zip(event.token_ids, event.logprobs or (), strict=False):
            spelled = b"" if token in self._special else self._tokenizer.speller.spell(token)
            if self._strip and spelled:
                spelled, self._strip = spelled.removeprefix(self._strip), b""
            self._held.append(_Spelled(token, spelled, self._spelled, told))
            self._spelled += len(self._decoder.decode(spelled))
        self._released += len(event.text)
        out: list[_Spelled] = []
        while self._held and self._held[0].start < self._released:
            out.append(self._held.popleft())
        return out

    def of_answer(self, deltas: Sequence[Delta], end: Finished) -> list[_Spelled]:
        """Return the tokens of a whole answer."""
        return [item for delta in deltas for item in self.of_delta(delta)] + self.of_end(end)

    def of_end(self, event: Finished) -> list[_Spelled]:
        """Return what is left at the end: nothing, or tokens without text of their own."""
        left, self._held = list(self._held), deque[_Spelled]()
        return [] if event.detail == "stop_string" else left

    def chat(self, tokens: Sequence[_Spelled]) -> dict[str, object]:
        """Return `logprobs` as chats have it."""
        return {"content": [self._entry(item) for item in tokens], "refusal": None}

    def response(self, tokens: Sequence[_Spelled]) -> list[dict[str, object]]:
        """Return what responses tell of tokens: as chats, with bytes for every one."""
        return [_with_bytes(self._entry(item)) for item in tokens]

    def native(self, delta: Delta) -> list[dict[str, object]]:
        """Return what /generate tells: an entry for each of the ids of a block, whatever text has come of them."""
        return [
            self._numbered(token, told.logprob)
            | {"top_logprobs": [self._numbered(other, value) for other, value in told.top]}
            for token, told in zip(delta.token_ids, delta.logprobs or (), strict=False)
        ]

    def completion(self, tokens: Sequence[_Spelled]) -> dict[str, object]:
        """Return `logprobs` as completions have it."""
        tops = [
            {self._name(other, self._spell(other)): _finite(value) for other, value in item.told.top} for item in tokens
        ]
        return {
            "tokens": [self._name(item.token, item.spelled) for item in tokens],
            "token_logprobs": [_finite(item.told.logprob) for item in tokens],
            "top_logprobs": tops,
            "text_offset": [item.start for item in tokens],
        }

    def _entry(self, item: _Spelled) -> dict[str, object]:
        return self._told(item.token, item.spelled, item.told.logprob) | {
            "top_logprobs": [self._told(token, self._spell(token), value) for token, value in item.told.top]
        }

    def _told(self, token: int, spelled: bytes, logprob: float) -> dict[str, object]:
        said = None if token in self._special else list(spelled)
        return {"token": self._name(token, spelled), "logprob": _finite(logprob), "bytes": said}

    def _numbered(self, token: int, logprob: float) -> dict[str, object]:
        return {"token_id": token} | self._told(token, self._spell(token), logprob)

    def _spell(self, token: int) -> bytes:
        return self._tokenizer.speller.spell(token)

    def _name(self, token: int, spelled: bytes) -> str:
        if token in self._special:
            spelled = self._tokenizer.speller.spell(token)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            # OpenAI's spelling of a piece of a character.
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def _with_bytes(entry: dict[str, object]) -> dict[str, object]:
    tops = cast(list[dict[str, object]], entry["top_logprobs"])
    return entry | {
        "bytes": entry["bytes"] or [],
        "top_logprobs": [top | {"bytes": top["bytes"] or []} for top in tops],
    }


def _finite(logprob: float) -> float:
    return max(logprob, LEAST) if logprob == logprob else LEAST
