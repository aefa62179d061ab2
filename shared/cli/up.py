"""`diffleet up`: start a local fleet, answer one prompt, tell how to use it, serve until a signal."""

import asyncio
import json
import os
import shutil
import signal
import sys
import time

from redis.exceptions import RedisError

from shared.cli.answer import show_answer
from shared.cli.exits import Exit, Stop
from shared.cli.http_fleet import ask, chats
from shared.cli.local_fleet import LocalFleet, LocalFleetOptions
from shared.cli.progress import Reporter
from shared.cli.question import Question
from shared.connection import TurnedAway, open_sync_client, translate
from shared.settings import queue_url

_REDIS_WAIT_S = 3.0
_EXAMPLE = "What is 12 + 30?"


async def serve(options: LocalFleetOptions, prompt: str) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP, then stop in order; a second SIGINT or SIGTERM stops at once.

    Raises `Stop` if the fleet cannot start or cannot be kept alive.
    """
    started = time.monotonic()
    if options.redis_url is not None:
        await asyncio.to_thread(_check_redis, options.redis_url)
    reporter = Reporter(sys.stderr)
    fleet = LocalFleet(options, reporter)
    with _Signals(fleet) as signals:
        try:
            async with fleet:
                raw = await _continues(options)
                if prompt:
                    await _answer(options, prompt, raw, reporter)
                print(welcome(options, raw), flush=True)
                reporter.line(f"serving after {time.monotonic() - started:.1f} s; Ctrl-C stops")
                await fleet.watch()
        except asyncio.CancelledError:
            if not signals.received:
                raise
            reporter.line("stopped")


def _check_redis(url: str) -> None:
    """Raise `Stop` if Redis does not answer now: each process would wait for it, and tell of it in its own log."""
    client = open_sync_client(queue_url(url), timeout_s=_REDIS_WAIT_S)
    try:
        client.ping()  # pyright: ignore[reportUnknownMemberType]
    except (RedisError, OSError) as error:
        given = "DIFFLEET_REDIS_URL" if os.environ.get("DIFFLEET_REDIS_URL") == url else "--redis-url"
        cause = translate(error)
        if isinstance(cause, TurnedAway):
            raise Stop(Exit.NOT_STARTED, f"{given}: {cause}") from error
        raise Stop(Exit.NOT_STARTED, f"no Redis answers at the given {given}: {cause}") from error
    finally:
        client.close()


async def _continues(options: LocalFleetOptions) -> bool:
    """Return whether the model only continues texts; not where nobody can tell, as without workers or a key."""
    try:
        return not await chats(options.url, options.served_name)
    except Stop:
        return False


async def _answer(options: LocalFleetOptions, prompt: str, raw: bool, reporter: Reporter) -> None:
    """Show one answer. A fleet that serves but cannot answer this prompt goes on serving."""
    reporter.line(f"> {prompt}")
    try:
        question = Question(prompt, model=options.served_name, max_tokens=256, raw=raw)
        async with ask(options.url, question, frames=True) as states:
            await show_answer(states, watch=True)
    except Stop as problem:
        reporter.line(f"the first prompt was not answered: {problem}")


def welcome(options: LocalFleetOptions, raw: bool) -> str:
    """Return what a newcomer needs next: addresses and commands that can be pasted.

    `raw` is for a model without a chat template, which continues texts.
    """
    asked = {"prompt": _EXAMPLE} if raw else {"messages": [{"role": "user", "content": _EXAMPLE}]}
    body, route = json.dumps({"model": options.served_name, **asked}), "completions" if raw else "chat/completions"
    where = "" if options.url == "http://127.0.0.1:8000" else f" --url {options.url}"
    return f"""
Diffleet serves {options.served_name} at {options.url}   docs: {options.url}/docs   logs: {options.data_dir / "logs"}

  curl {options.url}/v1/{route} -H 'Content-Type: application/json' \\
    -d '{body}'
  {_program()} generate --watch{" --raw" if raw else ""}{where} "{_EXAMPLE}"
"""


def _program() -> str:
    """Return what to type for this program: it may not be on the PATH."""
    return "diffleet" if shutil.which("diffleet") else sys.argv[0]


class _Signals:
    """While entered: the first signal cancels the current task, the next one kills what is still stopping.

    SIGHUP is never the next one: a terminal that closes sends it twice, by its shell and by the kernel.
    """

    _NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self, fleet: LocalFleet) -> None:
        self.received = False
        self._fleet = fleet

    def __enter__(self) -> "_Signals":
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        for number in self._NUMBERS:
            self._loop.add_signal_handler(number, self._receive, number)
        return self

    def __exit__(self, *_: object) -> None:
        for number in self._NUMBERS:
            self._loop.remove_signal_handler(number)

    def _receive(self, number: signal.Signals) -> None:
        if self.received or self._fleet.stopping:
            if number is not signal.SIGHUP:
                self._fleet.kill()
        elif self._task is not None:
            self._task.cancel()
        self.received = True
