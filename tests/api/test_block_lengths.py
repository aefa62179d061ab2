"""What fronts tell of block lengths: those that a worker chooses from, and the one that an answer was made with."""

import dataclasses
from collections.abc import Iterator

import pytest

from shared.commands import Generate
from shared.events import Delta, Finished, Queued, Usage
from tests.api.scripted import CARD, Caller, Script, ScriptedFleet, Step

MESSAGES = [{"role": "user", "content": "x"}]


def blocks_of(*lengths: int) -> Script:
    """Answer with two blocks of the next of these lengths; 0: its worker does not tell."""
    left = list(lengths)

    def script(command: Generate) -> Iterator[Step]:
        usage = Usage(1, 1, 3, 2, block_length=left.pop(0))
        yield Queued(command.id)
        yield Delta(command.id, 2, 1, 0, 0, [65], "a", 3)
        yield Finished(command.id, 3, 1, "stop", "stop_token", usage)

    return script


@pytest.mark.parametrize(("told", "length"), [(8, 8), (0, CARD.block_length)])
async def test_a_report_tells_the_length_that_was_used_and_counts_the_canvas_by_it(
    caller: Caller, fleet: ScriptedFleet, told: int, length: int
) -> None:
    fleet.script = blocks_of(told)
    body = {"messages": MESSAGES, "diffusion": {"report": True}}
    (report,) = (await caller.post("/v1/chat/completions", body)).json()["diffusion"]
    assert (report["block_length"], report["canvas_tokens"]) == (length, 2 * length)


async def test_usage_has_the_length_where_a_worker_tells_it(caller: Caller, fleet: ScriptedFleet) -> None:
    for told, expected in ((8, 8), (0, None)):
        fleet.script = blocks_of(told)
        usage = (await caller.post("/generate", {"prompt": "x"})).json()["usage"]
        assert usage.get("block_length") == expected


async def test_several_choices_have_a_length_in_common_or_none(caller: Caller, fleet: ScriptedFleet) -> None:
    for told, expected in (((8, 8), 8), ((8, 16), None)):
        fleet.script = blocks_of(*told)
        body = {"messages": MESSAGES, "n": 2}
        usage = (await caller.post("/v1/chat/completions", body)).json()["usage"]
        assert usage.get("block_length") == expected and usage["blocks"] == 4


async def test_a_model_lists_the_lengths_that_are_chosen_from(caller: Caller, fleet: ScriptedFleet) -> None:
    own = (await caller.get(f"/v1/models/{CARD.name}")).json()
    assert own["block_lengths"] == [CARD.block_length]
    fleet.cards = {CARD.name: dataclasses.replace(CARD, block_lengths=(4, 8), digest="")}
    told = (await caller.get(f"/v1/models/{CARD.name}")).json()
    assert (told["block_lengths"], told["block_length"]) == ([4, 8], CARD.block_length)
