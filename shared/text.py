# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Text to tokens and back: one implementation for the front, the workers and the command line.

Built on the `tokenizers` package and the files of a model folder (`shared.card.CARD_FILES`).
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from shared.card import CARD_FILES
from shared.detokenizer import Detokenizer, Speller, detokenizer_factory
from shared.template import ChatTemplate, Message, TemplateError

__all__ = ["InvalidText", "InvalidTokenizer", "Message", "TemplateError", "TextStream", "Tokenizer"]

_MARK = re.compile(r"\[([0-9]+):([0-9]+)\]")
_SPECIAL_TOKEN_FIELD = re.compile(r"(\w+)_token")


class InvalidTokenizer(Exception):
    """The tokenizer files of a model are missing or damaged; the message names the file."""


class InvalidText(ValueError):
    """The text cannot be encoded: it holds a lone surrogate, which is no character."""


class Tokenizer:
    """Encode text and chats, decode ids. Instances are immutable after construction and shared between threads."""

    def __init__(self, backend: Backend, template: ChatTemplate | None = None) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._template = template
        self._new_detokenizer = detokenizer_factory(backend)
        self.speller = Speller(backend)
        self.special_tokens: dict[str, int] = {
            token.content: number for number, token in backend.get_added_tokens_decoder().items() if token.special
        }
        # Longest first, so that no token hides behind one that is its prefix. `(?!)` never matches.
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._literal: Backend | None = None

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> "Tokenizer":
        """Build from file contents by name (see `CARD_FILES`); raises `InvalidTokenizer`."""
        if "tokenizer.json" not in files:
            raise InvalidTokenizer("tokenizer.json is missing")
        try:
            backend = Backend.from_str(files["tokenizer.json"].decode())
        except Exception as error:  # the package raises bare Exception for whatever it cannot parse
            raise InvalidTokenizer(f"tokenizer.json: {error}") from error
        try:
            config: dict[str, Any] = orjson.loads(files.get("tokenizer_config.json", b"{}"))
            source = files["chat_template.jinja"].decode() if "chat_template.jinja" in files else _template_of(config)
            _add_missing(backend, config)
            template = None if source is None else ChatTemplate(source, _special_tokens_of(config))
        except TemplateError as error:
            raise InvalidTokenizer(str(error)) from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidTokenizer(f"tokenizer_config.json or chat_template.jinja: {error!r}") from error
        return cls(backend, template)

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Read the files of a model folder; raises `InvalidTokenizer`."""
        return cls.from_files({name: (folder / name).read_bytes() for name in CARD_FILES if (folder / name).is_file()})

    @property
    def has_template(self) -> bool:
        return self._template is not None

    @property
    def template_takes_tools(self) -> bool:
        """The chat template knows what to do with tools, their calls and results."""
        return self._template is not None and self._template.takes_tools

    def to_json(self) -> str:
        """Return the content of a tokenizer.json, tokens that only tokenizer_config.json knows included."""
        return self._backend.to_str()

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Return the ids of a raw prompt; special tokens spelled out in it count as such.

        `add_special` adds what the model's own post-processor adds (a leading bos, for one). Raises `InvalidText`.
        """
        _check_text(text)
        # The fast one counts no offsets, and other threads may run meanwhile.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special)[0].ids

    def decode(self, token_ids: Sequence[int], skip_special: bool = True) -> str:
        """Return the text of ids; ids beyond the vocabulary add nothing."""
        detokenizer = self.detokenizer(skip_special)
        return detokenizer.push(token_ids) + detokenizer.flush()

    def detokenizer(self, skip_special: bool = True) -> Detokenizer:
        """Return a fresh incremental decoder."""
        return self._new_detokenizer(skip_special)

    def render_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt that the model's chat template makes; raises `TemplateError`, `InvalidText`.

        `options` are further names that the template may ask for.
        """
        if self._template is None:
            raise TemplateError("this model has no chat template; send a plain prompt instead")
        rendered = self._template.render(messages, tools, add_generation_prompt, options)
        _check_text(rendered)
        return rendered

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the ids of a rendered chat; raises `TemplateError`, `InvalidText`.

        Only the template itself can open a role or end a turn: a special token spelled out in a message or a tool is
        encoded as plain text, together with the text around it up to the template's next special token.
        """
        seal = _Seal(self._special)
        rendered = self.render_chat(seal.close(messages), seal.close(tools), add_generation_prompt, seal.close(options))
        if seal.empty:
            return self._encode_trusted(rendered)
        ids: list[int] = []
        trusted = ""
        for piece in self._split_at_specials(rendered):
            opened = seal.open(piece)
            if opened == piece:
                trusted += piece
            else:
                ids += self._encode_trusted(trusted) + self._encode_literally(opened)
                trusted = ""
        return ids + self._encode_trusted(trusted)

    def _split_at_specials(self, text: str) -> list[str]:
        pieces: list[str] = []
        end = 0
        for match in self._special.finditer(text):
            pieces += [text[end : match.start()], match[0]]
            end = match.end()
        return [*pieces, text[end:]]

    def _encode_trusted(self, text: str) -> list[int]:
        return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids if text else []

    def _encode_literally(self, text: str) -> list[int]:
        """Return the ids of `text` with no special token among them."""
        if self._literal is None:
            # A second copy: the switch is a property of the instance, and the first is shared between threads.
            literal = Backend.from_str(self._backend.to_str())
            literal.encode_special_tokens = True
            self._literal = literal
        ids = self._literal.encode(text, add_special_tokens=False).ids
        if not set(ids).isdisjoint(self.special_tokens.values()):
            # A vocabulary that lists its special tokens as ordinary words: spell the text out.
            ids = [number for letter in text for number in self._literal.encode(letter, add_special_tokens=False).ids]
        return ids


class TextStream:
    """Turn produced ids into text that never has to be taken back.

    A character is given out once it is whole, and text that may begin a stop string is held until that is settled.
    The stop string that is complete first ends the text; it and all behind it are dropped. `skip` characters that were
    published before are swallowed, for a request that is taken over.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: tuple[str, ...] = (), skip: int = 0, skip_special: bool = True
    ) -> None:
        if "" in stop:
            raise ValueError("a stop string may not be empty")
        self._detokenizer = tokenizer.detokenizer(skip_special)
        self._stop = stop
        self._skip = skip
        self._held = ""
        self._stopped = False

    def push(self, token_ids: Sequence[int]) -> str:
        """Feed tokens; return the text that became certain."""
        if self._stopped:
            return ""
        certain = self._scan(self._detokenizer.push(token_ids))
        return self._swallow(certain)

    def flush(self) -> str:
        """Return what was held back; the stream has ended."""
        if self._stopped:
            return ""
        certain = self._scan(self._detokenizer.flush())
        rest, self._held = self._held, ""
        return self._swallow(certain + rest)

    @property
    def stopped(self) -> bool:
        """True once a stop string was seen; `push` returns nothing after it."""
        return self._stopped

    def _scan(self, text: str) -> str:
        self._held += text
        cut = find_stop(self._held, self._stop)
        if cut is not None:
            certain, self._held, self._stopped = self._held[:cut], "", True
            return certain
        keep = len(self._held) - _undecided(self._held, self._stop)
        certain, self._held = self._held[:keep], self._held[keep:]
        return certain

    def _swallow(self, text: str) -> str:
        swallowed = min(self._skip, len(text))
        self._skip -= swallowed
        return text[swallowed:]


def find_stop(text: str, stop: Sequence[str]) -> int | None:
    """Return where to cut `text`: at the stop string that is complete first (of several, the longest)."""
    found = [(start + len(word), start) for word in stop if (start := text.find(word)) >= 0]
    return min(found)[1] if found else None


def _undecided(text: str, stop: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that is a proper beginning of a stop string."""
    return max((_overlap(text, word) for word in stop), default=0)


def _overlap(text: str, word: str) -> int:
    longest = min(len(text), len(word) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(word[:length])), 0)


class _Seal:
    """Replace special tokens inside untrusted values by marks that nobody can guess, and back."""

    def __init__(self, special: re.Pattern[str]) -> None:
        self._special = special
        # Digits and brackets only: what a template does to text (case, JSON escapes) leaves them alone.
        self._key = str(secrets.randbelow(10**20))
        self._sealed: list[str] = []

    @property
    def empty(self) -> bool:
        return not self._sealed

    def close(self, value: Any) -> Any:
        """Return a copy of a JSON-like value with every special token in its strings sealed."""
        match value:
            case str():
                return self._special.sub(self._store, value)
            case Mapping():
                return {self.close(key): self.close(item) for key, item in value.items()}
            case list() | tuple():
                return [self.close(item) for item in value]
            case _:
                return value

    def open(self, text: str) -> str:
        return _MARK.sub(lambda match: self._sealed[int(match[2])] if match[1] == self._key else match[0], text)

    def _store(self, match: re.Match[str]) -> str:
        self._sealed.append(match[0])
        return f"[{self._key}:{len(self._sealed) - 1}]"


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidText(
            f"character {error.start} is a lone surrogate (U+{ord(text[error.start]):04X}), which is not text"
        ) from None


def _template_of(config: dict[str, Any]) -> str | None:
    """Return the chat template of tokenizer_config.json: a string, or the one named `default` in a list."""
    template = config.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _special_tokens_of(config: dict[str, Any]) -> dict[str, str]:
    """Return `bos_token`, `eos_token`, ... as text; the file has them as strings or as objects."""
    tokens = {name: value for name, value in config.items() if _SPECIAL_TOKEN_FIELD.fullmatch(name)}
    texts = {name: value["content"] if isinstance(value, dict) else value for name, value in tokens.items()}
    return {name: value for name, value in texts.items() if isinstance(value, str)}


def _add_missing(backend: Backend, config: dict[str, Any]) -> None:
    """Add the tokens that only tokenizer_config.json knows, at the ids that it gives them."""
    listed: dict[str, dict[str, Any]] = config.get("added_tokens_decoder", {})
    for number, token in sorted(listed.items(), key=lambda item: int(item[0])):
        if backend.token_to_id(token["content"]) is not None:
            continue
        options = {key: bool(token.get(key)) for key in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        backend.add_tokens([AddedToken(token["content"], **options)])
        if backend.token_to_id(token["content"]) != int(number):
            raise ValueError(f"{token['content']!r} cannot have the id {number}")
