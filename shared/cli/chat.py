"""`diffleet chat`: a conversation in the terminal.

Each answer is drawn while it is denoised and printed once. Ctrl-C ends the answer, Ctrl-D the conversation. Lines may
come from a pipe: then the first that fails, or Ctrl-C, ends it all.
"""

import asyncio
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from shared.cli.answer import show_answer
from shared.cli.exits import Exit, Stop
from shared.cli.http_fleet import ask
from shared.cli.numbers import Reader, between, number, whole
from shared.cli.question import Question
from shared.cli.reporting import tell
from shared.decoding import STRATEGIES

HELP = """\
/set                   show the settings
/set NAME VALUE        change one: max_tokens, temperature, seed, strategy, threshold, block_length, model
/set NAME              back to the fleet's own choice
/system TEXT           what the model is told before everything
/again                 ask the last question again, with the settings as they are now; also one that was stopped
/reset                 forget the conversation
/history               show the conversation
/help                  this
/quit                  end (or Ctrl-D)"""

_NUMBERS: dict[str, Reader] = {
    "max_tokens": between(whole, 1),
    "temperature": between(number, 0, 5),
    "seed": between(whole, 0, 2**63 - 1),
    "threshold": between(number, 0, 1),
    "block_length": between(whole, 1),
}
_SETTINGS = ("model", "max_tokens", "temperature", "seed", "strategy", "threshold", "block_length")


class Misuse(Exception):
    """What was typed is no command."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What was said, and how the next answer is asked for."""

    settings: Question = field(default_factory=lambda: Question(""))
    system: str = ""
    turns: tuple[tuple[str, str], ...] = ()
    """Questions with their answers."""
    unanswered: str = ""
    """The last question, if its answer was stopped or refused."""

    def ask(self, prompt: str) -> Question:
        """Return the next question with everything before it."""
        before = [("system", self.system)] if self.system else []
        for question, answer in self.turns:
            before += [("user", question), ("assistant", answer)]
        return replace(self.settings, prompt=prompt, before=tuple(before))

    def answered(self, prompt: str, answer: str) -> "Conversation":
        return replace(self, turns=(*self.turns, (prompt, answer)), unanswered="")

    def set(self, name: str, value: str) -> "Conversation":
        """Return the conversation with a setting changed, or unset if `value` is empty; raises `Misuse`."""
        if name not in _SETTINGS:
            raise Misuse(f"no setting {name!r}; there are {', '.join(_SETTINGS)}")
        if name == "strategy" and value and value not in STRATEGIES:
            raise Misuse(f"no strategy {value!r}; there are {', '.join(STRATEGIES)}")
        chosen: str | int | float | None = value or None
        if value and name in _NUMBERS:
            try:
                chosen = _NUMBERS[name](value)
            except ValueError as error:
                raise Misuse(f"{name}: {error}") from None
        return replace(self, settings=replace(self.settings, **{name: chosen}))

    def shown_settings(self) -> list[str]:
        values = {name: getattr(self.settings, name) for name in _SETTINGS}
        return [f"{name:14}{'the fleet decides' if value is None else value}" for name, value in values.items()]


def command(conversation: Conversation, line: str) -> tuple[Conversation, Sequence[str], str | None]:
    """Return the conversation after a line that begins with a slash, what to print, and a question to ask, if any.

    Raises `Misuse`, and EOFError for /quit.
    """
    word, _, rest = line[1:].strip().partition(" ")
    rest = rest.strip()
    match word:
        case "help" | "?":
            return conversation, HELP.splitlines(), None
        case "quit" | "exit" | "q":
            raise EOFError
        case "reset":
            return replace(conversation, turns=(), unanswered=""), ["forgotten"], None
        case "system":
            return replace(conversation, system=rest), ["set" if rest else "unset"], None
        case "set" if not rest:
            return conversation, conversation.shown_settings(), None
        case "set":
            name, _, value = rest.replace("=", " ", 1).partition(" ")
            return conversation.set(name, value.strip()), [], None
        case "history":
            said = [line for question, answer in conversation.turns for line in (f"> {question}", answer)]
            return conversation, said or ["nothing was said yet"], None
        case "again" if conversation.unanswered:
            return conversation, [], conversation.unanswered
        case "again":
            if not conversation.turns:
                raise Misuse("nothing was asked yet")
            return replace(conversation, turns=conversation.turns[:-1]), [], conversation.turns[-1][0]
        case _:
            raise Misuse(f"no command /{word}; /help lists them")


def chat(url: str, conversation: Conversation) -> None:
    """Read questions and print answers until the end of the input.

    On a terminal errors of one line do not end it. From a pipe the first one does, with `Stop`: what follows would be
    asked otherwise than was meant.
    """
    if sys.stdin.isatty():
        print(f"Chatting with {url}. /help: commands, Ctrl-C: end an answer, Ctrl-D: leave.", file=sys.stderr)
    for nth, line in enumerate(_lines(), start=1):
        question: str | None = line
        try:
            _check_text(line)
            if line.startswith("/"):
                conversation, told, question = command(conversation, line)
                for text in told:
                    print(text, file=sys.stderr)
        except Misuse as misuse:
            if not sys.stdin.isatty():
                raise Stop(Exit.USAGE, f"line {nth}: {misuse}") from None
            print(f"diffleet: {misuse}", file=sys.stderr)
            continue
        except EOFError:
            return
        if question:
            conversation = _turn(url, conversation, question)


def _check_text(line: str) -> None:
    """Raises `Misuse` for bytes that are no text if somebody can type them again, `Stop` if not."""
    try:
        line.encode()
    except UnicodeEncodeError:
        if sys.stdin.isatty():
            raise Misuse("this line is not UTF-8") from None
        raise Stop(Exit.USAGE, "standard input is not UTF-8") from None


def _turn(url: str, conversation: Conversation, prompt: str) -> Conversation:
    try:
        return conversation.answered(prompt, asyncio.run(_answer(url, conversation.ask(prompt))))
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        print("stopped", file=sys.stderr)
    except Stop as stop:
        if stop.exit_code is Exit.UNREACHABLE or not sys.stdin.isatty():
            raise
        tell(stop)
    return replace(conversation, unanswered=prompt)


async def _answer(url: str, question: Question) -> str:
    async with ask(url, question, frames=True) as states:
        return (await show_answer(states, watch=sys.stderr.isatty())).text


def _lines() -> Iterator[str]:
    """Yield what is typed, line by line, stripped; with line editing and history on a terminal."""
    reconfigure = getattr(sys.stdin, "reconfigure", None)
    if reconfigure is not None:
        # One line that is no text must not end the reading of all.
        reconfigure(errors="surrogateescape")
    if sys.stdin.isatty():
        import readline  # noqa: F401  # pyright: ignore[reportUnusedImport]
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            if sys.stdin.isatty():
                print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            print(file=sys.stderr)
        else:
            yield line.strip()
