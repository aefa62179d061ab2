"""`diffleet chat`: what is typed, what is asked, what is remembered."""

import io
import subprocess

import pytest

from shared.cli.chat import Conversation, Misuse, chat, command
from shared.cli.exits import Exit, Stop
from shared.cli.http_fleet import request_of
from shared.cli.question import Question
from tests.cli.fleet_process import DIFFLEET, Up, diffleet, environment


def messages(conversation: Conversation, prompt: str) -> object:
    return request_of(conversation.ask(prompt), frames=False)[1]["messages"]


def test_a_question_carries_everything_before_it() -> None:
    conversation = Conversation(system="Be kind.").answered("One?", "1").answered("Two?", "2")
    assert messages(conversation, "Three?") == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "Three?"},
    ]


def test_set_changes_how_the_next_answer_is_made_and_unsets() -> None:
    conversation, _, question = command(Conversation(), "/set threshold 0.5")
    assert question is None and conversation.settings.threshold == 0.5
    conversation, _, _ = command(conversation, "/set max_tokens=7")
    assert request_of(conversation.ask("hi"), frames=False)[1]["max_tokens"] == 7
    conversation, _, _ = command(conversation, "/set threshold")
    assert conversation.settings.threshold is None


MISUSES = [
    "/set colour blue",
    "/set seed many",
    "/set seed -1",
    "/set threshold 7",
    "/set threshold nan",
    "/set temperature 5.1",
    "/set max_tokens 0",
    "/set max_tokens 1.5",
    "/set block_length 0",
    "/set strategy luck",
    "/nonsense",
    "/again",
]


@pytest.mark.parametrize("line", MISUSES)
def test_what_is_no_command_is_told(line: str) -> None:
    with pytest.raises(Misuse):
        command(Conversation(), line)


def test_again_asks_the_last_question_as_if_it_had_no_answer_yet() -> None:
    conversation = Conversation().answered("One?", "1").answered("Two?", "2")
    again, _, question = command(conversation, "/again")
    assert question == "Two?" and again.turns == (("One?", "1"),)


def test_again_asks_a_question_whose_answer_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Question] = []

    async def answer(_: str, question: Question) -> str:
        asked.append(question)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return "ok"

    lines = ["One?", "Two?", "/again", "/again"]
    monkeypatch.setattr("shared.cli.chat._answer", answer)
    monkeypatch.setattr("shared.cli.chat._lines", lambda: iter(lines))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    chat("http://nowhere", Conversation())
    assert [question.prompt for question in asked] == ["One?", "Two?", "Two?", "Two?"]
    assert [len(question.before) for question in asked] == [0, 2, 2, 2]


def test_the_strategy_that_was_set_is_asked_for() -> None:
    conversation, _, _ = command(Conversation(), "/set strategy sequential")
    assert request_of(conversation.ask("hi"), frames=False)[1]["diffusion"] == {"strategy": "sequential"}
    assert any(line.split() == ["strategy", "sequential"] for line in conversation.shown_settings())


def test_reset_forgets_what_was_said_and_keeps_the_settings() -> None:
    conversation = Conversation(system="Be kind.").set("seed", "3").answered("One?", "1")
    fresh, _, _ = command(conversation, "/reset")
    assert (fresh.turns, fresh.settings.seed, fresh.system) == ((), 3, "Be kind.")


def test_quit_ends_it() -> None:
    with pytest.raises(EOFError):
        command(Conversation(), "/quit")


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_bytes_from_a_pipe_that_are_not_utf_8_end_it_in_one_line(errors: str) -> None:
    ended = subprocess.run(
        [*DIFFLEET, "chat", "--url", "http://127.0.0.1:1"],
        input=b"\xff\xfe bad\n",
        env=environment(PYTHONIOENCODING=f"utf-8:{errors}"),
        capture_output=True,
        timeout=60,
    )
    assert ended.returncode == Exit.USAGE
    assert ended.stderr == b"diffleet: standard input is not UTF-8\n"


def test_a_line_of_a_terminal_that_is_not_utf_8_loses_nothing_that_was_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Question] = []

    async def answer(_: str, question: Question) -> str:
        asked.append(question)
        return "ok"

    monkeypatch.setattr("shared.cli.chat._answer", answer)
    monkeypatch.setattr("shared.cli.chat._lines", lambda: iter(["One?", "\udcff\udcfe bad", "/system \udcff", "Two?"]))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    chat("http://nowhere", Conversation())
    assert [(question.prompt, len(question.before)) for question in asked] == [("One?", 0), ("Two?", 2)]
    assert capsys.readouterr().err.count("diffleet: this line is not UTF-8\n") == 2


@pytest.mark.parametrize("misuse", MISUSES)
def test_a_command_from_a_pipe_that_fails_ends_it_before_anything_is_asked_wrongly(
    misuse: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"/set seed 3\n\n{misuse}\nWho?\n"))
    with pytest.raises(Stop, match=r"^line 3: ") as caught:
        chat("http://nowhere", Conversation())
    assert caught.value.exit_code is Exit.USAGE


def test_a_command_of_a_terminal_that_fails_does_not_end_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    async def answer(_: str, question: Question) -> str:
        asked.append(question.prompt)
        return "ok"

    monkeypatch.setattr("shared.cli.chat._answer", answer)
    monkeypatch.setattr("shared.cli.chat._lines", lambda: iter(["/set seed x", "", "Who?"]))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    chat("http://nowhere", Conversation())
    assert asked == ["Who?"]
    assert "diffleet: seed: 'x' is not a whole number\n" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["input", "_answer"])
def test_ctrl_c_ends_lines_from_a_pipe(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> str:
        raise KeyboardInterrupt

    async def answer(*_: object) -> str:
        return interrupt()

    target, wanted = ("builtins.input", interrupt) if where == "input" else ("shared.cli.chat._answer", answer)
    monkeypatch.setattr(target, wanted)
    monkeypatch.setattr("sys.stdin", io.StringIO("One?\nTwo?\n"))
    with pytest.raises(KeyboardInterrupt):
        chat("http://nowhere", Conversation())


@pytest.mark.slow
def test_lines_from_a_pipe_are_answered_one_after_the_other(live_fleet: Up) -> None:
    lines = "Where?\n\n/set seed 3\nWho?\n/history\n"
    done = diffleet("chat", "--url", live_fleet.url, "-n", "6", stdin=lines)
    assert done.returncode == 0
    assert len(done.stdout.strip().splitlines()) >= 2
    assert "> Where?" in done.stderr and "> Who?" in done.stderr
    failed = diffleet("chat", "--url", live_fleet.url, "-n", "6", stdin=f"Where?\n/set seed x\n{lines}")
    assert failed.returncode == Exit.USAGE
    assert failed.stdout and "diffleet: line 2: seed: 'x' is not a whole number" in failed.stderr
    assert "\x1b" not in done.stdout + done.stderr


@pytest.mark.slow
def test_without_a_fleet_it_ends_with_3() -> None:
    done = diffleet("chat", "--url", "http://127.0.0.1:1", stdin="Where?\n")
    assert done.returncode == 3 and "no fleet answers" in done.stderr
