"""One answer in the terminal: the drawing on stderr while it grows, the text once on stdout."""

import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator

from shared.cli.canvas import Canvas, CanvasScreen, Glyphs, footer, printable


async def show_answer(states: AsyncIterator[Canvas], *, watch: bool) -> Canvas:
    """Follow the states to their end, print the last one's text, and return it.

    Without a terminal on stderr there is no drawing. With `watch`, the costs are told on stderr afterwards.
    """
    canvas, started = Canvas(), time.monotonic()
    draws = watch and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    with contextlib.ExitStack() as stack:
        screen = stack.enter_context(CanvasScreen(sys.stderr)) if draws else None
        async for canvas in states:
            if screen is not None:
                screen.show(canvas)
    # A terminal must not obey what a model wrote; a file or a program gets the text as it is.
    text = printable(canvas.text) if sys.stdout.isatty() else canvas.text
    sys.stdout.write(text if text.endswith("\n") else text + "\n")
    sys.stdout.flush()
    if watch:
        print(footer(canvas, time.monotonic() - started, Glyphs.of(sys.stderr.encoding)), file=sys.stderr)
    return canvas
