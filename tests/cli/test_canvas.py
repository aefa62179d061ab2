"""The terminal view of a canvas, as a pure function of what is known and of the room there is."""

import io
import os
import pty
import select

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from shared.cli.canvas import (
    REDRAW_INTERVAL_S,
    Canvas,
    CanvasScreen,
    Cell,
    Glyphs,
    draw,
    footer,
    printable,
    shade,
    terminal_size,
)

FANCY = Glyphs.of("utf-8")
PLAIN = Glyphs.of("ascii")
EXAMPLE = (
    Canvas()
    .committed("Once upon a time ", tokens=5, nfe=3)
    .denoised((Cell("there", 0.99), Cell(None), Cell("a", 0.6), Cell(None)), step=2, nfe=5)
)


def plain_lines(canvas: Canvas, width: int = 80, height: int = 10, glyphs: Glyphs = FANCY) -> list[str]:
    return [line.plain for line in draw(canvas, width, height, 1.25, glyphs)]


def test_masks_stand_where_tokens_are_missing_and_blocks_have_an_edge() -> None:
    body, foot = plain_lines(EXAMPLE)
    assert body == "Once upon a time ▐there░a░▌"
    assert foot == "block 2 · step 2 · 7 tokens · 5 forwards · 1.40 tokens/forward · 1.2 s"


def test_committed_blocks_are_told_apart() -> None:
    canvas = Canvas().committed("one", 1, 1).committed(" two", 1, 2)
    assert plain_lines(canvas)[0] == "one╎ two"


def test_an_ascii_terminal_gets_ascii() -> None:
    assert all(line.isascii() for line in plain_lines(EXAMPLE, glyphs=PLAIN))
    assert plain_lines(EXAMPLE, glyphs=PLAIN)[0] == "Once upon a time [there_a_]"


def test_a_long_text_shows_its_end_and_the_costs() -> None:
    canvas = Canvas()
    for number in range(100):
        canvas = canvas.committed(f"line {number}\n", 3, number + 1)
    lines = plain_lines(canvas, height=5)
    assert len(lines) == 5
    assert any("line 99" in line for line in lines)
    assert not any("line 1\n" in line for line in lines)
    assert lines[-1].startswith("block 100")


def test_nothing_yet_is_one_line_of_costs() -> None:
    assert plain_lines(Canvas()) == ["block 0 · 0 tokens · 0 forwards · 1.2 s"]


def test_a_commit_ends_the_active_block_and_never_lowers_the_forwards() -> None:
    canvas = EXAMPLE.committed("there was a frog", tokens=4, nfe=4)
    assert canvas.active == ()
    assert canvas.nfe == 5
    assert canvas.text == "Once upon a time there was a frog"


def test_the_end_takes_the_counts_of_the_fleet() -> None:
    canvas = EXAMPLE.finished("stop", tokens=9, nfe=6)
    assert (canvas.tokens, canvas.nfe, canvas.finish, canvas.active) == (9, 6, "stop", ())


def test_a_surer_token_is_never_shown_as_a_less_sure_one() -> None:
    styles = [shade(number / 100) for number in range(101)]
    changes = [style for before, style in zip(styles, styles[1:], strict=False) if style != before]
    assert len(changes) == len(set(changes)) == 3


def test_text_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2Jb\rc\u202ed\ud800e\tf\ng") == "a[2Jbcde    f\ng"
    cells = (Cell("\x1b[31mred", 0.9), Cell("\n", 0.9))
    assert plain_lines(Canvas().denoised(cells, 1, 1))[0] == "▐[31mred⏎▌"


texts = st.text(max_size=40)
canvases = st.builds(
    Canvas,
    blocks=st.lists(texts, max_size=6).map(tuple),
    active=st.lists(st.builds(Cell, st.none() | texts, st.floats(0, 1)), max_size=20).map(tuple),
    step=st.integers(0, 99),
    nfe=st.integers(0, 9999),
    tokens=st.integers(0, 9999),
)


@given(canvas=canvases, width=st.integers(4, 120), height=st.integers(1, 30))
def test_a_drawing_fits_its_room(canvas: Canvas, width: int, height: int) -> None:
    lines = draw(canvas, width, height, 0.0, FANCY)
    assert 1 <= len(lines) <= height
    assert all(line.cell_len <= width for line in lines)
    assert all(char.isprintable() or char in "\u200d\ufeff" or ord(char) > 127 for line in lines for char in line.plain)


@given(canvas=canvases)
def test_the_costs_never_count_masks_as_tokens(canvas: Canvas) -> None:
    masks = sum(cell.text is None for cell in canvas.active)
    assert canvas.decided == canvas.tokens + len(canvas.active) - masks
    noun = "token" if canvas.decided == 1 else "tokens"
    assert f" {canvas.decided} {noun} - " in footer(canvas, 0.0, PLAIN)


def test_one_forward_is_not_several() -> None:
    assert " 1 token - 1 forward - " in footer(Canvas(tokens=1, nfe=1), 0.0, PLAIN)
    assert " 2 tokens - 2 forwards - " in footer(Canvas(tokens=2, nfe=2), 0.0, PLAIN)


def test_colour_follows_confidence_and_can_be_switched_off() -> None:
    def rendered(no_color: bool) -> str:
        out = io.StringIO()
        console = Console(file=out, force_terminal=True, color_system="standard", no_color=no_color, width=60)
        for line in draw(EXAMPLE, 60, 10, 0.0, FANCY):
            console.print(line)
        return out.getvalue()

    assert "\x1b[33m" in rendered(no_color=False)
    assert not any(f"\x1b[{code}m" in rendered(no_color=True) for code in (33, 36, 90, 93, 94, 97))


def test_the_screen_leaves_nothing_behind_and_skips_drawings_that_come_too_soon() -> None:
    master, slave = pty.openpty()
    try:
        with os.fdopen(slave, "w", encoding="utf-8") as terminal:
            with CanvasScreen(terminal) as screen:
                screen.show(EXAMPLE)
                for _ in range(50):
                    screen.show(EXAMPLE)
            terminal.flush()
            written = ""
            # A terminal gives at most some four thousand bytes at a time.
            while select.select([master], [], [], 0.2)[0]:
                written += os.read(master, 1_000_000).decode()
        assert REDRAW_INTERVAL_S >= 0.12
        assert written.count("Once upon") < 5
        # Ends by clearing each drawn line and showing the cursor again.
        after = written.rpartition("Once upon")[2]
        assert "\x1b[2K" in after
        assert after.rstrip().endswith("\x1b[2K") or "\x1b[?25h" in after
    finally:
        os.close(master)


def test_the_size_is_that_of_the_stream_itself() -> None:
    assert terminal_size(io.StringIO()) == (80, 24)
