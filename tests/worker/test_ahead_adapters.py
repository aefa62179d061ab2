"""What the device does not lead by itself, adapters and embeddings, beside rows that it leads; adapters over 8 bits."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from shared.commands import Generate, Limits, LoraUse
from shared.events import Delta, Event, Failed, Finished
from tests.fleet.models import write_tiny_model
from tests.worker.adapter_folders import read_weights, write_adapter
from tests.worker.test_adapters import Shelf, logits
from tests.worker.test_ahead import MAX_LEN
from tests.worker.texts import NoText
from worker.adapters.stack import AdapterStack
from worker.adapters.targets import find_targets, shapes_of
from worker.adapters.weights import Adapter, load_adapter
from worker.ahead import AheadRunner, bucket_sizes, make_graphs
from worker.engine.engine import Engine
from worker.engine.ports import Arrival, Forward, Inbox
from worker.engine.scheduler import BatchLimits, CacheShape
from worker.foresight import Offer
from worker.models import LoadedModel, load_model
from worker.models.fp8 import quantize
from worker.runner import Runner

PAGE, PAGES, ROWS = 8, 128, 8
FOX = LoraUse(name="fox", path="fox", digest="f" * 64)
PROMPT = tuple(range(20, 41))


@pytest.fixture
def model(tmp_path: Path) -> LoadedModel:
    loaded = load_model(write_tiny_model(tmp_path / "model"))
    return replace(loaded, spec=replace(loaded.spec, max_model_len=MAX_LEN))


@pytest.fixture
def fox(model: LoadedModel, tmp_path: Path) -> Adapter:
    targets = find_targets(model)
    write_adapter(tmp_path / "fox", read_weights(tmp_path / "model"), shapes_of(targets))
    return load_adapter(tmp_path / "fox", targets, model.device, model.dtype)


def run(model: LoadedModel, forward: Forward, requests: Sequence[Generate], ahead: bool) -> dict[str, list[Event]]:
    limits = BatchLimits(ROWS, 64, pages_ahead=ahead)
    engine = Engine(model.spec, CacheShape(PAGE, PAGES), limits, forward, lambda *_: NoText())
    events: dict[str, list[Event]] = {each.id: [] for each in requests}
    inbox = Inbox(arrivals=[Arrival(each, epoch=1) for each in requests])
    for _ in range(500):
        for event in engine.step(inbox).events:
            events[event.id].append(event)
        inbox = Inbox()
        if engine.idle:
            break
    assert not any(isinstance(event, Failed) for told in events.values() for event in told)
    return events


def told(events: list[Event]) -> tuple[list[int], str | None]:
    end = events[-1]
    assert isinstance(end, Finished)
    return [token for event in events if isinstance(event, Delta) for token in event.token_ids], end.embedding


@pytest.mark.parametrize("slots", [0, 1])
def test_adapters_and_embeddings_beside_rows_that_the_device_leads(
    model: LoadedModel, fox: Adapter, slots: int
) -> None:
    shelf = Shelf({FOX.digest: fox})
    limits = Limits(max_tokens=14, ignore_eos=True)
    asked = [
        Generate(id="base", model="m", prompt=PROMPT, limits=limits),
        Generate(id="fox", model="m", prompt=PROMPT, limits=limits, lora=(FOX,)),
        Generate(id="short", model="m", prompt=PROMPT[:5], limits=limits),
        Generate(id="vector", model="m", prompt=PROMPT, embed=True),
        Generate(id="foxes", model="m", prompt=PROMPT, embed=True, lora=(FOX,)),
    ]
    runner = Runner(model, PAGES, PAGE, adapters=shelf)
    leader = AheadRunner(runner, make_graphs(runner, ROWS), bucket_sizes(ROWS), Offer(slots=(slots,)))

    led = run(model, leader, asked, ahead=True)
    plain = run(model, Runner(model, PAGES, PAGE, adapters=shelf), asked, ahead=False)

    for each in asked[:3]:
        assert told(led[each.id]) == told(plain[each.id])
    assert told(led["fox"]) != told(led["base"])
    assert told(led["vector"])[1] != told(led["foxes"])[1] != told(plain["vector"])[1]
    assert leader.asked > 0


def test_a_row_with_an_adapter_is_an_error_where_there_are_none(model: LoadedModel) -> None:
    request = Generate(id="fox", model="m", prompt=PROMPT, limits=Limits(max_tokens=4), lora=(FOX,))
    with pytest.raises(ValueError, match="has none"):
        run(model, Runner(model, PAGES, PAGE), [request], ahead=False)


def test_an_adapter_works_beside_weights_of_8_bits(model: LoadedModel, fox: Adapter) -> None:
    def seen(scale: float | None) -> torch.Tensor:
        lora = None
        if scale is not None:
            lora = AdapterStack(Shelf({"fox": fox}), model.device).of([(("fox", scale),)], [22])
        return logits(model, lora)

    exact = seen(1.0) - seen(None)
    module = model.module
    assert isinstance(module, nn.Module) and quantize(module)
    rounded = seen(1.0) - seen(None)
    assert (rounded - exact).norm() < 0.2 * exact.norm()
    assert (seen(0.0) - seen(None)).norm() < 0.05 * exact.norm()
