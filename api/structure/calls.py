"""Tool calls in a text that comes in pieces."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.grammar import CALL_START

_MARK = CALL_START.rstrip()
_END = "</tool_call>"
_HEAD = re.compile(r'<tool_call>\n\{"name": ?"([^"]*)", ?"arguments": ?')


@dataclass(slots=True)
class Call:
    """What is known of one call, or what has come of it: its arguments as JSON text."""

    index: int
    name: str = ""
    """Empty where it was told before."""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    text: str = ""
    calls: Sequence[Call] = ()


@dataclass(slots=True)
class CallReader:
    """Tells the text of an answer from its calls, which follow the grammar of `shared.grammar`."""

    calls: list[Call] = field(default_factory=list[Call])
    """Those so far, as a whole."""
    text: str = ""
    """What has been told outside of calls."""
    cut: bool = False
    """The text has ended within a call."""
    _rest: str = ""
    _depth: int = 0
    """Open brackets of the arguments."""
    _in_string: bool = False
    _escaped: bool = False
    _place: str = "text"

    @property
    def whole(self) -> bool:
        """No call is under way whose arguments are to come."""
        return self._place in ("text", "tail")

    def push(self, text: str) -> Piece:
        """Return what has become certain: never a part of a call as text."""
        self._rest += text
        told: dict[int, Call] = {}
        words = ""
        while True:
            before = (self._place, len(self._rest))
            match self._place:
                case "text":
                    words += self._read_text()
                case "head":
                    self._read_head(told)
                case "arguments":
                    self._read_arguments(told)
                case _:
                    self._read_tail()
            if (self._place, len(self._rest)) == before:
                self.text += words
                return Piece(words, tuple(told.values()))

    def end(self) -> Piece:
        """Return what was held back; the text has ended."""
        if self._place != "text":
            self.cut = not self.whole
            return Piece()
        rest, self._rest = self._rest, ""
        if self.calls and not rest.strip():
            return Piece()
        self.text += rest
        return Piece(rest)

    def _read_text(self) -> str:
        found = self._rest.find(_MARK)
        if found >= 0:
            words, self._rest, self._place = self._rest[:found].rstrip(), self._rest[found:], "head"
            return words
        # Spaces before a call are no part of the text, and the mark comes in pieces as well.
        keep = next((size for size in range(len(_MARK) - 1, 0, -1) if self._rest.endswith(_MARK[:size])), 0)
        certain = self._rest[: len(self._rest) - keep].rstrip()
        self._rest = self._rest[len(certain) :]
        return certain

    def _read_head(self, told: dict[int, Call]) -> None:
        found = _HEAD.match(self._rest)
        # A space of the layout may follow with the next piece.
        if found is None or found.end() == len(self._rest):
            return
        index = len(self.calls)
        self.calls.append(Call(index, found[1]))
        told[index] = Call(index, found[1])
        self._rest, self._place = self._rest[found.end() :], "arguments"
        self._depth, self._in_string, self._escaped = 0, False, False

    def _read_arguments(self, told: dict[int, Call]) -> None:
        call = self.calls[-1]
        size = next((size for size, letter in enumerate(self._rest, 1) if self._closes(letter)), len(self._rest))
        part, self._rest = self._rest[:size], self._rest[size:]
        call.arguments += part
        if part:
            told.setdefault(call.index, Call(call.index)).arguments += part
        if call.arguments and self._depth == 0 and not self._in_string:
            self._place = "tail"

    def _closes(self, letter: str) -> bool:
        """Follow one letter of JSON; True if it closes the outermost bracket."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif letter == "\\":
                self._escaped = True
            elif letter == '"':
                self._in_string = False
            return False
        self._in_string = letter == '"'
        self._depth += (letter in "{[") - (letter in "}]")
        return letter in "}]" and self._depth == 0

    def _read_tail(self) -> None:
        found = self._rest.find(_END)
        if found >= 0:
            self._rest, self._place = self._rest[found + len(_END) :], "text"
