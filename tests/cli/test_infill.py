"""Texts with holes on the command line: how they are read, sent, and answered."""

import json
from functools import reduce
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from shared.cli import commands
from shared.cli.canvas import Canvas, Cell
from shared.cli.exits import Exit
from shared.cli.http_fleet import after_completion, request_of
from shared.cli.infill import Hole, Infill, parse, rooms_of, text_of
from shared.cli.question import Question
from tests.cli.fleet_process import Up, diffleet

TEXT = "Once {{who}}, then ___3 and {{ the end : 12 }}."


def test_holes_have_names_and_rooms() -> None:
    holes = (Hole("who", 5), Hole("hole 1", 3), Hole("the end", 12))
    assert parse(TEXT, {"who": 5}) == Infill(("Once ", holes[0], ", then ", holes[1], " and ", holes[2], "."))
    assert parse("a {{x}}", {}).pieces == ("a ", Hole("x", 8))
    assert parse("a {{x:2}}", {"x": 4}).pieces[1] == Hole("x", 4)


WORDS = st.text(st.characters(exclude_characters="{}_", exclude_categories=["Cs"]), min_size=1)


@given(st.lists(WORDS, min_size=2, max_size=6), st.data())
def test_the_text_around_the_holes_is_kept_whole(texts: list[str], data: st.DataObject) -> None:
    rooms = [data.draw(st.integers(1, 4096)) for _ in texts[1:]]
    marks = [f"{{{{h{number}:{room}}}}}" for number, room in enumerate(rooms)]
    written = "".join(text + mark for text, mark in zip(texts, [*marks, ""], strict=True))
    pieces = parse(written, {}).pieces
    assert [piece for piece in pieces if isinstance(piece, str)] == texts
    assert [piece.tokens for piece in pieces if isinstance(piece, Hole)] == rooms


@pytest.mark.parametrize(
    ("text", "rooms", "complaint"),
    [
        ("nothing", {}, "no hole"),
        ("a {{x}} b {{x}}", {}, "twice"),
        ("a {{x}}", {"y": 2}, "no hole 'y', only x"),
        ("a {{}} {x}", {}, "no hole"),
    ],
)
def test_what_is_no_text_with_holes_is_refused(text: str, rooms: dict[str, int], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse(text, rooms)


@pytest.mark.parametrize("option", ["sum", "=3", "sum=", "sum=0", "sum=-1", "sum=x"])
def test_a_room_is_a_name_and_a_number(option: str) -> None:
    assert rooms_of(["a=b=12"]) == {"a=b": 12}
    with pytest.raises(ValueError, match="NAME=TOKENS"):
        rooms_of([option])


def test_a_text_comes_from_a_file_unless_it_has_a_hole(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("a {{x}}\n\n")
    assert text_of(str(file)) == "a {{x}}\n"
    assert text_of("{{x}}") == "{{x}}"
    file.write_bytes(b"\xff")
    for argument, complaint in ((str(file), "UTF-8"), (str(tmp_path), "directory"), ("nothing", "has no hole")):
        with pytest.raises(ValueError, match=complaint):
            text_of(argument)


def test_a_text_that_stands_for_itself_must_begin_with_text() -> None:
    assert parse("a {{x}} b", {}).split() == ("a ", Infill((Hole("x", 8), " b")))
    with pytest.raises(ValueError, match="begins with a hole"):
        parse("{{x}} b", {}).split()


def test_a_template_goes_to_a_chat_or_raw_to_completions() -> None:
    infill = parse("a {{x:3}}", {})
    template = ["a ", {"hole": "x", "max_tokens": 3}]
    path, body = request_of(Question("hi", infill=infill), frames=False)
    assert (path, body["diffusion"]) == ("/v1/chat/completions", {"template": template})
    path, body = request_of(Question("hi", infill=infill, raw=True, threshold=0.5), frames=True)
    shown = {"stream": "frames", "frame_detail": "full"}
    assert (path, body["diffusion"]) == ("/v1/completions", {"threshold": 0.5, "template": template, **shown})
    assert body["prompt"] == "hi" and "stream_mode" not in body


def test_edits_replay_to_the_canvas_and_its_holes() -> None:
    def chunk(edits: list[list[object]], full: bool) -> dict[str, object]:
        view = {"step": 1, "offset": 4, "full": full, "edits": edits}
        return {"choices": [{"text": "", "finish_reason": None}], "diffusion": view, "usage": {"nfe": 2}}

    canvas = reduce(
        after_completion,
        [
            chunk([[4, 7, "a", "tentative", 0.9], [5, None, "░", "masked", 0.0]], full=True),
            chunk([[5, 8, "b", "tentative", 0.8]], full=False),
        ],
        Canvas(),
    )
    assert canvas.active == (Cell("a", 0.9), Cell("b", 0.8)) and canvas.nfe == 2
    committed = {"choices": [{"text": "ab"}], "diffusion": {"step": None}, "usage": {"completion_tokens": 2}}
    ended = {"finish_reason": "stop", "finish_detail": "filled", "diffusion": {"holes": {"x": "b"}}}
    canvas = reduce(after_completion, [committed, {"choices": [{"text": "", **ended}]}], canvas)
    assert (canvas.text, canvas.tokens, canvas.finish, canvas.holes) == ("ab", 2, "filled", {"x": "b"})


@pytest.mark.slow
def test_holes_are_filled_over_the_api(live_fleet: Up, tmp_path: Path) -> None:
    where = ("generate", "--url", live_fleet.url)
    text = "Once {{who:3}} and {{what}} the end."
    alone = diffleet(*where, "--infill", text, "--hole", "what=2", "--watch")
    assert alone.returncode == 0, alone.stderr
    assert alone.stdout.startswith("Once ") and alone.stdout.endswith(" the end.\n")
    assert "forwards" in alone.stderr
    file = tmp_path / "text"
    file.write_text(text + "\n")
    told = diffleet(*where, "--infill", str(file), "--hole", "what=2", "--holes")
    holes = json.loads(told.stdout)
    assert list(holes) == ["who", "what"]
    assert alone.stdout == f"Once {holes['who']} and {holes['what']} the end.\n"
    piped = diffleet(*where, "Where is the mouse?", "--infill", "-", stdin="{{where}} it is.\n")
    assert piped.returncode == 0 and piped.stdout.endswith(" it is.\n")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--infill", "nothing"), "--infill"),
        (("--infill", "{{a}} b"), "--infill"),
        (("--infill", "a {{a}}", "--hole", "b=1"), "--infill"),
        (("--infill", "a {{a}}", "--hole", "a"), "--hole"),
        (("--infill", "a {{a}}", "--redis-url", "redis://127.0.0.1:1/0"), "--infill"),
        (("hi", "--hole", "a=1"), "--hole"),
        (("hi", "--holes"), "--holes"),
        (("-", "--infill", "-"), "--infill"),
        ((), "PROMPT"),
    ],
)
def test_what_cannot_be_filled_ends_with_2_and_names_the_option(arguments: tuple[str, ...], named: str) -> None:
    ended = CliRunner().invoke(commands.app, ["generate", *arguments])
    assert ended.exit_code == Exit.USAGE
    assert f"Invalid value for {named}:" in ended.stderr


@pytest.mark.slow
def test_what_the_fleet_refuses_of_a_text_ends_with_4(live_fleet: Up) -> None:
    ended = diffleet("generate", "--url", live_fleet.url, "--infill", "a {{a}}{{b}}")
    assert ended.returncode == 4
    assert "text between two holes" in ended.stderr
