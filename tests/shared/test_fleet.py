"""The client without asyncio: what it says before, in and after its block, whoever still waits then."""

import asyncio
import gc
import inspect
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shared.client import Fleet
from shared.events import Event
from shared.queue import WorkerQueue
from tests.cli.fleet_process import environment
from tests.shared.protocol_for_tests import MODEL, card_of, command_for

CALLS = [name for name, call in inspect.getmembers(Fleet, inspect.isfunction) if not name.startswith("_")]


@pytest.fixture
def url(redis_url: str, fleet_redis: Any) -> str:
    async def announce() -> None:
        queue = WorkerQueue.connect(redis_url, MODEL, "w1")
        await queue.publish_card(card_of())
        await queue.close()

    asyncio.run(announce())
    return redis_url


def call(fleet: Fleet, name: str) -> Any:
    """Call a method with arguments that would do; an iterator is asked for its first event."""
    given: dict[str, Any] = {"command": command_for(), "prompt": [1]}
    method = getattr(fleet, name)
    required = [one for one in inspect.signature(method).parameters.values() if one.default is one.empty]
    answer = method(**{one.name: given.get(one.name, MODEL) for one in required})
    return next(answer) if isinstance(answer, Iterator) else answer


def test_calls_are_found() -> None:
    assert {"generate", "stream", "submit", "models", "abort"} <= set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_every_call_outside_the_block_says_so(name: str, url: str) -> None:
    fleet = Fleet(url)
    with pytest.raises(RuntimeError, match="^use Fleet as a context manager$"):
        call(fleet, name)
    with fleet:
        pass
    with pytest.raises(RuntimeError, match="^this Fleet is closed$"):
        call(fleet, name)


def test_a_fleet_is_entered_once(url: str) -> None:
    fleet = Fleet(url)
    with fleet:
        with pytest.raises(RuntimeError, match="^this Fleet is open already$"):
            fleet.__enter__()
        assert fleet.models() == [MODEL]
    with pytest.raises(RuntimeError, match="^this Fleet is closed$"):
        fleet.__enter__()


def test_an_iterator_that_outlives_the_block_is_closed_with_it(url: str) -> None:
    with Fleet(url) as fleet:
        used, unused = fleet.generate(MODEL, [1, 2, 3]), fleet.generate(MODEL, [1, 2, 3])
        assert next(used).t == "queued"
    for events in (used, unused):
        with pytest.raises(RuntimeError, match="^this Fleet is closed$"):
            next(events)


def test_whoever_still_waits_at_the_end_of_the_block_is_told(url: str) -> None:
    told: list[BaseException] = []
    queued = threading.Event()

    def follow(events: Iterator[Event]) -> None:
        try:
            for _ in events:
                queued.set()
        except RuntimeError as error:
            told.append(error)

    with Fleet(url) as fleet:
        thread = threading.Thread(target=follow, args=(fleet.generate(MODEL, [1, 2, 3]),))
        thread.start()
        assert queued.wait(60)
    thread.join(60)
    assert [str(error) for error in told] == ["this Fleet is closed"]


def test_an_iterator_may_be_dropped_in_the_thread_of_the_loop_itself(url: str) -> None:
    """The garbage collector runs wherever it likes."""
    with Fleet(url) as fleet:
        kept = [fleet.generate(MODEL, [1, 2, 3])]
        next(kept[0])
        dropped = threading.Event()

        def drop() -> None:
            kept.clear()
            dropped.set()

        fleet._loop.call_soon_threadsafe(drop)  # pyright: ignore[reportPrivateUsage]
        assert dropped.wait(60)
        assert fleet.models() == [MODEL]


DROP = """
import sys
from shared.client import Fleet
fleet = Fleet(sys.argv[1])
with fleet:
    events = fleet.generate(sys.argv[2], [1, 2, 3])
    print(next(events).t)
del events
try:
    fleet.models()
except RuntimeError as error:
    print(error)
"""


def test_what_is_dropped_behind_the_block_prints_nothing(url: str) -> None:
    command = [sys.executable, "-X", "dev", "-c", DROP, url, MODEL]
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=100)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "queued\nthis Fleet is closed\n", "")


@pytest.mark.parametrize("build", [lambda: Fleet("redis://127.0.0.1:1/0"), lambda: Fleet("ftp://x")])
def test_a_fleet_that_could_not_be_entered_leaves_no_thread(build: Callable[[], Fleet]) -> None:
    before = threading.active_count()
    fleet = build()
    try:
        with fleet:
            pass
    except ValueError:
        pass
    gc.collect()
    assert threading.active_count() == before
