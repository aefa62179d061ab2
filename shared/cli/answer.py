"""One answer in the terminal: the drawing on stderr while it grows, the text once on stdout."""

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable

from shared.cli.canvas import Canvas, CanvasScreen, Glyphs, footer, printable

_CUT = {
    "max_tokens": "the answer has as many tokens as it may (--max-tokens, or /set max_tokens, allows more)",
    "max_model_len": "the model's context is full",
    "max_nfe": "it was allowed no more forwards",
    "deadline": "its time was over",
}
"""What is told of an answer that did not end by itself, by the reason for its end."""


def text_of(canvas: Canvas) -> str:
    return canvas.text


def holes_of(canvas: Canvas) -> str:
    """Return what was put into the holes of a template, as JSON."""
    return json.dumps(dict(canvas.holes or {}), ensure_ascii=False)


async def show_answer(states: AsyncIterator[Canvas], *, watch: bool, tell: Callable[[Canvas], str] = text_of) -> Canvas:
    """Follow the states to their end, print what is to be told of the last one (its text), and return it.

    Without a terminal on stderr there is no drawing. With `watch`, the costs are told on stderr afterwards. If it is
    cancelled, what was committed by then is still printed.
    """
    canvas, started = Canvas(), time.monotonic()
    draws = watch and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    try:
        with contextlib.ExitStack() as stack:
            screen = stack.enter_context(CanvasScreen(sys.stderr)) if draws else None
            async for canvas in states:
                if screen is not None:
                    screen.show(canvas)
    except asyncio.CancelledError:
        if canvas.text:
            _print(tell(canvas))
        raise
    _print(tell(canvas))
    if canvas.finish in _CUT:
        print(f"diffleet: cut: {_CUT[canvas.finish]}", file=sys.stderr)
    if watch:
        glyphs = Glyphs.of(sys.stderr.encoding)
        print(footer(canvas, time.monotonic() - started, glyphs), file=sys.stderr)
    return canvas


def _print(text: str) -> None:
    # A terminal must not obey what a model wrote; a file or a program gets the text as it is.
    if sys.stdout.isatty():
        text = printable(text)
    sys.stdout.write(text if text.endswith("\n") else text + "\n")
    sys.stdout.flush()
