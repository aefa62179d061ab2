"""A model that processes share answers each kind of request as a whole one does."""

import struct
from base64 import b64decode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.commands import Generate, Limits, LogitEdits, Sampling
from shared.decoding import Entropy, LowConfidenceDynamic, Sequential, Threshold, TopkMargin
from shared.events import Delta, Event, Finished
from tests.worker.parallel.ranks import shared_model
from tests.worker.texts import NoText
from tests.worker.tiny_checkpoints import write_checkpoint
from worker.ahead import AheadRunner, make_graphs
from worker.engine.engine import Engine
from worker.engine.ports import Arrival, Forward, Inbox
from worker.engine.scheduler import BatchLimits, CacheShape
from worker.graphs import StepGraphs
from worker.lanes import Lanes, make_lanes
from worker.models import LoadedModel, load_model
from worker.parallel.graphs import LED
from worker.runner import Runner

WARM = Sampling(temperature=0.8, seed=5)
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"sampling": WARM},
    "cut": {"sampling": WARM.model_copy(update={"top_k": 9, "top_p": 0.8})},
    "entropy": {"decoding": Entropy(steps=4)},
    "margin": {"decoding": TopkMargin(steps=4)},
    "dynamic": {"decoding": LowConfidenceDynamic(threshold=0.5)},
    "guided": {"cfg_scale": 1.5},
    "edited": {"edits": LogitEdits(repetition_penalty=1.3, logit_bias=((40, 2.0),))},
    "told": {"logprobs": 3},
    "longer": {"limits": Limits(max_tokens=20, min_tokens=12), "sampling": WARM},
    "longer blocks": {"block_length": 8},
    "stops last": {"decoding": Sequential(stops_last=True)},
    "embedded": {"embed": True, "limits": Limits(max_tokens=1)},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "m")


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[LoadedModel]:
    with shared_model(folder) as model:
        yield model


def requests() -> list[Generate]:
    base: dict[str, Any] = {"decoding": Threshold(threshold=0.3), "limits": Limits(max_tokens=20)}
    return [
        Generate(id=name, model="tiny", prompt=(1, 2, 3, number), **(base | fields))
        for number, (name, fields) in enumerate(KINDS.items())
    ]


def plain(model: LoadedModel) -> Forward:
    return Runner(model, 96, 8)


def ahead(model: LoadedModel) -> Forward:
    runner = Runner(model, 96, 8)
    return AheadRunner(runner, make_graphs(runner, 16), [1, 16])


def lanes(model: LoadedModel) -> Forward:
    runner = Runner(model, 96, 8)
    # As the plan of the memory does it: those that come then take the others' place on all ranks.
    make_lanes(runner, 16, (8, 2))
    found = make_lanes(runner, 16, (8,))
    assert [lane.graphs.layout.block for lane in found] == [8, 4]
    return Lanes(runner, found)


def answers(model: LoadedModel, forward: Forward) -> dict[str, list[Event]]:
    engine = Engine(model.spec, CacheShape(8, 96), BatchLimits(16, 256), forward, lambda request, resume: NoText())
    found: dict[str, list[Event]] = {}
    inbox = Inbox(arrivals=[Arrival(request, 1) for request in requests()])
    while inbox.arrivals or not engine.idle:
        for event in engine.step(inbox).events:
            found.setdefault(event.id, []).append(event)
        inbox = Inbox()
    return found


def said(events: list[Event]) -> list[int]:
    assert isinstance(events[-1], Finished), events[-1]
    return [token for event in events if isinstance(event, Delta) for token in event.token_ids]


@pytest.mark.parametrize("how", [plain, ahead, lanes])
def test_each_kind_of_request_is_answered_as_by_a_whole_model(
    folder: Path, shared: LoadedModel, how: Callable[[LoadedModel], Forward]
) -> None:
    whole = load_model(folder)
    forward = how(shared)
    expected, found = answers(whole, plain(whole)), answers(shared, forward)
    assert not isinstance(forward, Lanes) or all(lane.asked > lane.postponed for lane in forward.lanes)

    assert {name: said(events) for name, events in found.items()} == {
        name: said(events) for name, events in expected.items()
    }
    for name, events in found.items():
        assert [*map(logprobs, events)] == [pytest.approx(logprobs(event), abs=1e-4) for event in expected[name]]
    assert any(map(logprobs, found["told"]))
    assert vector(found["embedded"][-1]) == pytest.approx(vector(expected["embedded"][-1]), abs=1e-5)


def logprobs(event: Event) -> list[float]:
    return [told.logprob for told in event.logprobs or ()] if isinstance(event, Delta) else []


def vector(event: Event) -> list[float]:
    assert isinstance(event, Finished) and event.embedding is not None
    content = b64decode(event.embedding)
    return [*struct.unpack(f"<{len(content) // 4}f", content)]


def test_all_that_touches_the_device_is_led() -> None:
    own = {"kept_bytes"}
    public = {name for name in vars(StepGraphs) if not name.startswith("_")}
    assert public - own == LED
