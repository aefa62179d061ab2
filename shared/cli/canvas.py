"""A canvas being denoised, as terminal text.

`Canvas` is what is known of one answer; `draw` turns it into lines for a given width and height, without touching a
terminal; `CanvasScreen` shows it in place. The drawing goes to standard error and is removed at the end: the final
text is printed once, on standard output, by whoever asked.
"""

import io
import os
import time
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

REDRAW_INTERVAL_S = 0.12
_DEFAULT_SIZE = (80, 24)

# Least confidence of each shade. Blue to yellow is told apart by colour-blind readers as well.
_SHADES = ((0.95, "bold bright_white"), (0.8, "bright_yellow"), (0.5, "yellow"), (0.0, "bright_blue"))
_MASK_STYLE = "bright_black"
_FRAME_STYLE = "cyan"
_FOOT_STYLE = "dim"


@dataclass(frozen=True, slots=True)
class Cell:
    """One position of the active block: `text` is None while it is masked."""

    text: str | None
    confidence: float = 0.0


@dataclass(frozen=True, slots=True)
class Canvas:
    """Committed blocks, the active block, the costs so far, and at the end the reason for it."""

    blocks: tuple[str, ...] = ()
    active: tuple[Cell, ...] = ()
    step: int = 0
    nfe: int = 0
    tokens: int = 0
    finish: str | None = None
    holes: Mapping[str, str] | None = None
    """What was put into the holes of a template, at the end."""

    def committed(self, text: str, tokens: int, nfe: int) -> "Canvas":
        """Return the canvas after a block was committed; `tokens` counts its tokens, `nfe` all forwards so far."""
        return replace(
            self,
            blocks=(*self.blocks, text),
            active=(),
            step=0,
            nfe=max(nfe, self.nfe),
            tokens=self.tokens + tokens,
        )

    def denoised(self, active: tuple[Cell, ...], step: int, nfe: int) -> "Canvas":
        """Return the canvas with a newer view of the active block."""
        return replace(self, active=active, step=step, nfe=max(nfe, self.nfe))

    def finished(self, reason: str, tokens: int | None = None, nfe: int | None = None) -> "Canvas":
        """Return the canvas at its end; the fleet's own counts, where it gave them, replace the summed ones."""
        return replace(
            self,
            active=(),
            finish=reason,
            tokens=self.tokens if tokens is None else tokens,
            nfe=self.nfe if nfe is None else nfe,
        )

    @property
    def text(self) -> str:
        return "".join(self.blocks)

    @property
    def decided(self) -> int:
        """Tokens known so far, committed or not."""
        return self.tokens + sum(cell.text is not None for cell in self.active)


@dataclass(frozen=True, slots=True)
class Glyphs:
    mask: str
    edge: str
    opening: str
    closing: str
    newline: str
    dot: str

    @classmethod
    def of(cls, encoding: str | None) -> "Glyphs":
        """Return the characters that a terminal of this encoding can show."""
        fancy = cls("░", "╎", "▐", "▌", "⏎", "·")
        try:
            "".join((fancy.mask, fancy.edge, fancy.opening, fancy.closing, fancy.newline)).encode(encoding or "ascii")
        except (UnicodeEncodeError, LookupError):
            return cls("_", "|", "[", "]", "\\n", "-")
        return fancy


def draw(canvas: Canvas, width: int, height: int, elapsed_s: float, glyphs: Glyphs | None = None) -> list[Text]:
    """Return at most `height` lines of at most `width` cells: the end of the text, then one line of costs."""
    glyphs = glyphs or Glyphs.of("utf-8")
    body = Text(no_wrap=False, overflow="fold")
    for number, block in enumerate(canvas.blocks):
        if number:
            body.append(glyphs.edge, _FOOT_STYLE)
        body.append(printable(block))
    if canvas.active:
        body.append(glyphs.opening, _FRAME_STYLE)
        for cell in canvas.active:
            _append_cell(body, cell, glyphs)
        body.append(glyphs.closing, _FRAME_STYLE)
    console = Console(width=width, force_terminal=False, color_system=None, file=io.StringIO())
    lines: list[Text] = list(body.wrap(console, width, overflow="fold")) if body.plain else []
    for line in lines:
        line.rstrip()
    foot = Text(footer(canvas, elapsed_s, glyphs), _FOOT_STYLE, no_wrap=True)
    foot.truncate(width)
    return [*lines[max(0, len(lines) - height + 1) :], foot][-height:]


def footer(canvas: Canvas, elapsed_s: float, glyphs: Glyphs) -> str:
    """Return the line of costs: block, step in the block, tokens, forwards, tokens per forward, time."""
    parts = [f"block {len(canvas.blocks) + bool(canvas.active)}"]
    if canvas.active:
        parts.append(f"step {canvas.step}")
    parts += [_counted(canvas.decided, "token"), _counted(canvas.nfe, "forward")]
    if canvas.nfe:
        parts.append(f"{canvas.decided / canvas.nfe:.2f} tokens/forward")
    parts.append(f"{elapsed_s:.1f} s")
    return f" {glyphs.dot} ".join(parts)


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def shade(confidence: float) -> str:
    """Return the style of a token accepted with this probability."""
    return next(style for least, style in _SHADES if confidence >= least or least == 0.0)


def printable(text: str) -> str:
    """Return the text without what could steer a terminal: control and formatting characters but newline."""
    return "".join(char for char in text.replace("\t", "    ") if char == "\n" or _is_safe(char))


def _is_safe(char: str) -> bool:
    # Cc holds ESC and its like, Cs lone surrogates, Cf the direction overrides; joiners in Cf build emoji.
    return unicodedata.category(char) not in {"Cc", "Cs"} and char not in "\u202a\u202b\u202c\u202d\u202e"


def _append_cell(body: Text, cell: Cell, glyphs: Glyphs) -> None:
    if cell.text is None:
        body.append(glyphs.mask, _MASK_STYLE)
    elif not cell.text:
        # Decided, and nothing to read: the answer ends before it.
        body.append(glyphs.dot, _FOOT_STYLE)
    else:
        body.append(printable(cell.text.replace("\n", glyphs.newline)), shade(cell.confidence))


class CanvasScreen:
    """Shows a canvas in place on `file`, which must be a terminal; redraws at most every `REDRAW_INTERVAL_S`."""

    def __init__(self, file: TextIO, *, no_color: bool = False) -> None:
        self._file = file
        self._console = Console(file=file, force_terminal=True, no_color=no_color, highlight=False)
        self._glyphs = Glyphs.of(file.encoding)
        self._live = Live(console=self._console, auto_refresh=False, transient=True, redirect_stdout=False)
        self._started = time.monotonic()
        self._drawn = float("-inf")

    def __enter__(self) -> "CanvasScreen":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, canvas: Canvas) -> None:
        """Draw the canvas, unless the last drawing is too young: the next call will show this one's news too."""
        now = time.monotonic()
        if now - self._drawn < REDRAW_INTERVAL_S:
            return
        self._drawn = now
        width, height = terminal_size(self._file)
        self._console.size = (width, height)  # pyright: ignore[reportAttributeAccessIssue]
        lines = draw(canvas, width, height - 1, now - self._started, self._glyphs)
        self._live.update(Text("\n").join(lines), refresh=True)


def terminal_size(file: TextIO) -> tuple[int, int]:
    """Return columns and lines of the terminal behind `file` itself: another stream may be another terminal."""
    try:
        size = os.get_terminal_size(file.fileno())
    except (OSError, ValueError):
        return _DEFAULT_SIZE
    return (size.columns or _DEFAULT_SIZE[0], size.lines or _DEFAULT_SIZE[1])
