"""`diffleet generate --infill`: a text with named holes, as it is written on a command line or in a file."""

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

HOLE_TOKENS = 8
"""Room of a hole that does not say, as in the playground."""

_MARK = re.compile(r"\{\{\s*([^{}:\s][^{}:]{0,63}?)\s*(?::\s*(\d+)\s*)?\}\}|___(\d*)")


@dataclass(frozen=True, slots=True)
class Hole:
    name: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Infill:
    """Texts and holes, in order."""

    pieces: tuple[str | Hole, ...]

    @property
    def template(self) -> list[str | dict[str, object]]:
        """The pieces in the form of the api."""
        return [
            {"hole": piece.name, "max_tokens": piece.tokens} if isinstance(piece, Hole) else piece
            for piece in self.pieces
        ]

    def split(self) -> tuple[str, "Infill"]:
        """Return the text before the first hole, and what follows it; raises ValueError if it begins with a hole."""
        before, *rest = self.pieces
        if isinstance(before, Hole):
            raise ValueError("the text begins with a hole: put some text before it, or a question as PROMPT")
        return before, Infill(tuple(rest))


def parse(text: str, rooms: Mapping[str, int]) -> Infill:
    """Read `{{name}}`, `{{name:12}}` (a hole of 12 tokens), `___` and `___12`; `rooms` are tokens by a hole's name.

    Holes without a name are called `hole 1`, `hole 2` and so on. Raises ValueError for a text without a hole, a name
    that comes twice, and a room for a hole that is not there.
    """
    pieces: list[str | Hole] = []
    end = unnamed = 0
    for mark in _MARK.finditer(text):
        if mark.start() > end:
            pieces.append(text[end : mark.start()])
        end = mark.end()
        name, named_room, room = mark.groups()
        if name is None:
            unnamed += 1
            name = f"hole {unnamed}"
        pieces.append(Hole(name, rooms.get(name) or int(named_room or room or HOLE_TOKENS)))
    if end < len(text):
        pieces.append(text[end:])
    names = [piece.name for piece in pieces if isinstance(piece, Hole)]
    if not names:
        raise ValueError("there is no hole: write {{name}}, {{name:12}} for one of 12 tokens, or ___")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"hole {twice!r} is there twice")
    if unknown := next((name for name in rooms if name not in names), None):
        raise ValueError(f"there is no hole {unknown!r}, only {', '.join(names)}")
    return Infill(tuple(pieces))


def rooms_of(options: Iterable[str]) -> dict[str, int]:
    """Read `name=12` of each; raises ValueError."""
    rooms: dict[str, int] = {}
    for option in options:
        name, equals, number = option.rpartition("=")
        if not equals or not name or not number.isdecimal() or int(number) < 1:
            raise ValueError(f"{option!r} is not NAME=TOKENS, as in sum=3")
        rooms[name] = int(number)
    return rooms


def text_of(argument: str) -> str:
    """Return the text itself if it has a hole, else that of the file of this name, `-` being standard input.

    A file's last line break is not part of the text. Raises ValueError.
    """
    if _MARK.search(argument):
        return argument
    try:
        data = sys.stdin.buffer.read() if argument == "-" else Path(argument).read_bytes()
        return data.decode().removesuffix("\n")
    except FileNotFoundError as error:
        raise ValueError(f"{argument!r} has no hole ({{{{name}}}} or ___), and is no file") from error
    except OSError as error:
        raise ValueError(f"{argument}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{argument}: not UTF-8: {error.reason}") from error
