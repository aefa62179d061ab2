"""Strategies that look ahead over several blocks, when their worker dies: no gap, no repeat; and what may differ."""

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from shared.client import FleetClient
from shared.commands import Generate, Sampling
from shared.decoding import LinearSpeculation, MultiBlock, StreamingWindow
from shared.events import Delta, Event
from tests.fleet.conftest import SpawnWorker
from tests.fleet.faulty_worker import TAKES_ITS_TIME
from tests.fleet.models import write_tiny_model
from tests.fleet.requests_for_tests import assert_whole, collect, sequential, text_of, tokens_of
from tests.goldens.folder import find_folders

LENGTHS = {"sdar": 300, "wedlm": 300, "nemotron_labs_diffusion": 110}
"""Tokens; of the last one as many as its context leaves."""
AHEAD: dict[str, Any] = {
    "sdar": MultiBlock(tau_add=0.25, tau_semi=0.5, tau_acc=0.9),
    "wedlm": StreamingWindow(bound=0.4),
    "nemotron_labs_diffusion": LinearSpeculation(),
}


@pytest.fixture(scope="module", params=AHEAD)
def tiny_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(tmp_path_factory.mktemp(request.param))
    if request.param != "sdar":
        golden = next(found for found in find_folders() if found.name == request.param)
        for name in ("config.json", "model.safetensors"):
            shutil.copyfile(golden.path / name, folder / name)
    return folder


@pytest.fixture
def family(tiny_model: Path) -> str:
    return tiny_model.name.rstrip("0123456789")


def ask(name: str, family: str) -> Generate:
    # The most probable tokens: draws count the forwards of a request, and a new window takes other ones.
    prompt = (TAKES_ITS_TIME, 41, 42, 43, 44)
    return sequential(name, LENGTHS[family], decoding=AHEAD[family], sampling=Sampling(), prompt=prompt)


async def interrupted(
    fleet: FleetClient, spawn_worker: SpawnWorker, request: Generate, number: signal.Signals
) -> list[Event]:
    """Follow a request whose worker, which is slow, gets a signal in mid-stream; another one then comes."""
    first = spawn_worker(request.model, program="tests.fleet.faulty_worker").wait_ready()
    events: list[Event] = []
    async for event in fleet.run(request):
        events.append(event)
        if isinstance(event, Delta) and event.block == 2:
            first.send(number)
            spawn_worker(request.model).wait_ready()
    return events


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_a_window_that_is_lost_with_its_worker_leaves_no_gap_and_no_repeat(
    fleet: FleetClient, spawn_worker: SpawnWorker, family: str, number: signal.Signals
) -> None:
    name = f"{family}-{number.name}"
    events = await interrupted(fleet, spawn_worker, ask(name, family), number)
    end = assert_whole(events)
    assert end.usage.completion_tokens == LENGTHS[family] and end.detail == "max_tokens"
    deltas = [event for event in events if isinstance(event, Delta)]
    assert {event.epoch for event in deltas} == {1, 2}

    # Its text is that of its tokens, also across the seam.
    tokenizer = await fleet.tokenizer(await fleet.card(name))
    assert text_of(events) == tokenizer.decode(tokens_of(events))

    calm = await collect(fleet.run(ask(name, family)))
    assert_whole(calm)
    kept = sum(len(event.token_ids) for event in deltas if event.epoch == 1)
    assert kept > 0 and tokens_of(events)[:kept] == tokens_of(calm)[:kept], "what was committed is what it would be"
    if family == "nemotron_labs_diffusion":
        # A draft changes nothing of the tokens, wherever it begins.
        assert tokens_of(events) == tokens_of(calm)
        return
    # What comes then is what a request gets that begins behind it.
    rest = ask(name, family)
    limits = rest.limits.model_copy(update={"max_tokens": LENGTHS[family] - kept})
    rest = rest.model_copy(update={"prompt": (*rest.prompt, *tokens_of(events)[:kept]), "limits": limits})
    assert tokens_of(events)[kept:] == tokens_of(await collect(fleet.run(rest)))
