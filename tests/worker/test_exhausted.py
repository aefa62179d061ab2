"""Memory that gives out in the middle of a step, at every operation in turn: the next step finds what it should."""

from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared.commands import Generate, Limits
from shared.decoding import Renoise
from tests.goldens.test_goldens import run
from tests.worker.exhausted import Shaky, gives_out
from tests.worker.test_adapters import Shelf
from tests.worker.test_diffusion_gemma import CANVAS, PAGE, PROMPTS, make_oracle
from tests.worker.texts import NoText
from worker.adapters.bank import AdapterBank
from worker.adapters.stack import AdapterStack, Uses
from worker.adapters.weights import Adapter
from worker.canvas_runner import CanvasRunner
from worker.engine.engine import Engine
from worker.engine.ports import Forward
from worker.engine.scheduler import BatchLimits, CacheShape
from worker.models import load_model
from worker.models.layers import Linear, LowRank

CPU = torch.device("cpu")
FOX, OWL = "fox", "owl"
ROWS: list[Uses] = [((FOX, 1.0),), ((OWL, 0.5),), (), ((FOX, 1.0), (OWL, 2.0))]
COUNTS = [2, 1, 1, 3]

Seen = Callable[[LowRank | None], list[Tensor]]


def a_linear(inputs: int, outputs: int) -> Linear:
    linear = Linear(inputs, outputs, False, device=CPU, dtype=torch.float32)
    linear.weight.data.normal_()
    linear.pieces["whole"] = (0, outputs)
    return linear


@pytest.fixture
def linears() -> list[Linear]:
    return [a_linear(8, 12), a_linear(8, 6), a_linear(8, 4)]


@pytest.fixture
def shelf(linears: list[Linear]) -> Shelf:
    def adapter(rank: int, factor: float, of: list[Linear]) -> Adapter:
        return Adapter(rank, factor, {each: (torch.randn(rank, 8), torch.randn(len(each.weight), rank)) for each in of})

    return Shelf({FOX: adapter(2, 1.5, linears[:2]), OWL: adapter(3, 0.5, linears)})


@pytest.fixture
def seen(linears: list[Linear]) -> Seen:
    """Return what all linears make of a batch's tokens."""
    x = torch.randn(sum(COUNTS), 8)

    def see(lora: LowRank | None) -> list[Tensor]:
        assert lora is not None
        return [lora.apply(linear, x) for linear in linears]

    return see


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def test_adapters_that_found_no_memory_side_by_side_are_stacked_by_the_next_step(shelf: Shelf, seen: Seen):
    expected = seen(AdapterStack(shelf, CPU).of(ROWS, COUNTS))
    for passes in count():
        stack = AdapterStack(shelf, CPU)
        stack.of(ROWS[1:2], COUNTS[1:2])
        gave_out = gives_out(partial(stack.of, ROWS, COUNTS), passes)
        assert same(seen(stack.of(ROWS, COUNTS)), expected), f"memory gave out behind {passes} operations"
        if not gave_out:
            break
    assert passes > 20


@pytest.mark.parametrize("uses", [ROWS[0], ROWS[3]], ids=["one", "two"])
def test_a_place_that_found_no_memory_half_way_is_filled_by_the_next_step(
    linears: list[Linear], shelf: Shelf, seen: Seen, uses: Uses
):
    rows, counts = [uses, ()], [5, 2]

    def a_bank() -> AdapterBank:
        return AdapterBank(linears, 1, 8, shelf, CPU, torch.float32)

    bank = a_bank()
    bank.bring(rows)
    expected = seen(bank.of(rows, counts))
    for passes in count():
        bank = a_bank()
        bank.bring(ROWS[1:2])
        gave_out = gives_out(partial(bank.bring, rows), passes)
        assert gave_out or bank.find(uses)
        bank.bring(rows)
        assert same(seen(bank.of(rows, counts)), expected), f"memory gave out behind {passes} operations"
        if not gave_out:
            break
    assert passes > 10


def test_canvases_of_noise_go_on_as_if_memory_had_never_given_out(tmp_path: Path):
    make_oracle(tmp_path)
    model = load_model(tmp_path)
    decoding, limits = Renoise(bound=1.0, max_denoising_steps=3, stability_threshold=2), Limits(max_tokens=CANVAS)
    requests = [
        Generate(id=name, model="m", prompt=PROMPTS[name], limits=limits, decoding=decoding)
        for name in ("short", "a-canvas")
    ]

    def engine_of(forward: Forward) -> Engine:
        return Engine(model.spec, CacheShape(PAGE, 64), BatchLimits(4, 64), forward, lambda request, resume: NoText())

    expected = run(engine_of(CanvasRunner(model, 64, PAGE)), [requests])
    shaky = Shaky(CanvasRunner(model, 64, PAGE))
    assert run(engine_of(shaky), [requests]) == expected
    assert shaky.gave_out >= 6
