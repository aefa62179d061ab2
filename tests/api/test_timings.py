"""`timings` are those of the request, not those of whoever reads it."""

from collections.abc import Iterator

from api.transcript import Transcript
from shared.commands import Generate
from shared.events import Delta, Finished, Queued, Started, Usage
from tests.api.scripted import Caller, ScriptedFleet, Step


def test_the_time_in_the_queue_is_what_the_claim_says() -> None:
    transcript = Transcript(0.0, lambda: 9.0)
    transcript.observe(Started("r", 1, "w", queued_ms=25))
    transcript.observe(Started("r", 2, "w", queued_ms=4000))
    assert transcript.timings["queue_ms"] == 25


def test_a_claim_at_once_is_no_missing_claim() -> None:
    transcript = Transcript(0.0, lambda: 9.0)
    transcript.observe(Started("r", 1, "w", queued_ms=0))
    assert transcript.timings["queue_ms"] == 0


async def test_each_time_is_that_of_its_event_although_the_answer_waits_for_news(
    caller: Caller, fleet: ScriptedFleet
) -> None:
    def script(command: Generate) -> Iterator[Step]:
        yield Queued(command.id)
        yield Started(command.id, 1, "w1")
        yield 0.2
        yield Delta(command.id, 2, 1, 0, 0, [5], "a", 1)
        yield 0.2
        yield Finished(command.id, 3, 1, "stop", "stop_token", Usage(1, 1, 1, 1))

    fleet.script = script
    timings = (await caller.post("/generate", {"prompt": "x"})).json()["timings"]
    assert timings["queue_ms"] + 150 < timings["first_block_ms"]
    assert timings["first_block_ms"] + 150 < timings["total_ms"]
