"""Adapters at fixed places: what captured steps run under is what the plain runner runs under."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.commands import Generate, Limits, LoraUse
from shared.decoding import LowConfidenceStatic
from tests.fleet.models import write_tiny_model
from tests.worker.adapter_folders import read_weights, write_adapter
from tests.worker.test_adapters import Shelf
from tests.worker.test_ahead import DEVICE, MAX_LEN, PAGE, VOCAB, a_request, make_engine, run, waves_of
from worker.adapters.bank import AdapterBank
from worker.adapters.stack import AdapterStack, Uses
from worker.adapters.targets import find_targets, shapes_of
from worker.adapters.weights import Adapter, load_adapter
from worker.ahead import AheadRunner, bucket_sizes, make_graphs
from worker.engine.plan import Plan
from worker.engine.ports import Decision
from worker.foresight import NO_SLOTS, Offer
from worker.graphs import Answer, StepGraphs
from worker.models import LoadedModel, load_model
from worker.models.layers import Linear
from worker.runner import Runner

RANK = 8
FOX, OWL, ELK, YAK, CAT = (letter * 64 for letter in "f0eac")
KINDS = {FOX: (2, None), OWL: (6, ["q_proj", "v_proj", "down_proj"]), ELK: (8, None), YAK: (9, None)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("bank") / "model")


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    loaded = load_model(folder, device=DEVICE)
    return replace(loaded, spec=replace(loaded.spec, max_model_len=MAX_LEN))


@pytest.fixture(scope="module")
def shelf(folder: Path, model: LoadedModel) -> Shelf:
    targets = find_targets(model)
    found: dict[str, Adapter] = {}
    for number, (name, (rank, leaves)) in enumerate(KINDS.items()):
        path = folder.parent / name[0]
        write_adapter(path, read_weights(folder), shapes_of(targets), rank=rank, leaves=leaves, seed=number)
        found[name] = load_adapter(path, targets, model.device, model.dtype)
    return Shelf(found)


def make_bank(model: LoadedModel, shelf: Shelf, places: int) -> AdapterBank:
    linears = [target.linear for target in find_targets(model).values()]
    return AdapterBank(linears, places, RANK, shelf, model.device, model.dtype)


class Watched(StepGraphs):
    """Counts the steps with adapters and without."""

    def launch(self, rows: int, slots: int = 0, room: int | None = None, adapted: bool = False) -> Answer:
        self.counts[adapted] += 1
        return super().launch(rows, slots, room, adapted)

    counts: dict[bool, int]


def make_leader(model: LoadedModel, shelf: Shelf, places: int, offer: Offer) -> tuple[AheadRunner, Watched]:
    runner = Runner(model, 96, PAGE, DEVICE, adapters=shelf, bank=make_bank(model, shelf, places))
    graphs = make_graphs(runner, 6)
    graphs.__class__ = Watched
    assert isinstance(graphs, Watched)
    graphs.counts = {True: 0, False: 0}
    leader = AheadRunner(runner, graphs, bucket_sizes(6), offer)
    leader.capture(lambda done, of: None)
    return leader, graphs


def under(request: Generate, *uses: tuple[str, float]) -> Generate:
    lora = tuple(LoraUse(name=name[0], scale=scale, path=name[0], digest=name) for name, scale in uses)
    return request.model_copy(update={"lora": lora})


def a_choice(draw: random.Random) -> list[tuple[str, float]]:
    names = draw.sample([*KINDS], draw.choice([0, 0, 1, 1, 1, 2, 3]))
    return [(name, draw.choice([1.0, 0.5, -0.7])) for name in names]


@pytest.mark.parametrize("offer", [Offer(), NO_SLOTS], ids=["slots", "none"])
@pytest.mark.parametrize("places", [1, 2, 4])
def test_rows_under_adapters_that_the_device_leads_get_the_plain_runners_tokens(model, shelf, places, offer):
    draw = random.Random(places)
    requests = [under(a_request(number, draw), *a_choice(draw)) for number in range(14)]
    waves = waves_of(requests, draw)
    plain = make_engine(model, Runner(model, 96, PAGE, DEVICE, adapters=shelf), 96, 6, ahead=False)
    leader, graphs = make_leader(model, shelf, places, offer)
    assert run(make_engine(model, leader, 96, 6), waves) == run(plain, waves)
    assert graphs.counts[True] > 0
    assert leader.asked > leader.postponed


def test_steps_of_base_rows_alone_run_without_adapters(model, shelf):
    draw = random.Random(5)
    leader, graphs = make_leader(model, shelf, 2, Offer())
    run(make_engine(model, leader, 96, 6), waves_of([a_request(number, draw) for number in range(6)], draw))
    assert graphs.counts[True] == 0 < graphs.counts[False]


@contextmanager
def no_waits() -> Iterator[None]:
    """Let it be an error to wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="only a GPU can be waited for")
def test_neither_prompts_nor_steps_under_adapters_wait_for_the_device_but_at_the_answer(model, shelf):
    leader, graphs = make_leader(model, shelf, 3, Offer())

    def strict(plan: Plan) -> Decision:
        with no_waits():
            return leader(plan)

    draw = random.Random(3)
    # As many adapters as there are places: a row without one would be decided by the plain runner, and waited for.
    uses = [(), ((FOX, 1.0),), ((OWL, 0.5),), ((ELK, -0.7),), ((FOX, 0.5),), ()]
    requests = [
        under(
            Generate(
                id=f"g-{number}",
                model="tiny",
                prompt=tuple(draw.randrange(10, VOCAB - 10) for _ in range(7 * number)),
                limits=Limits(max_tokens=17, ignore_eos=True),
                decoding=LowConfidenceStatic(steps=2),
            ),
            *each,
        )
        for number, each in enumerate(uses, 1)
    ]
    answers = run(make_engine(model, strict, 96, 6), waves_of(requests, draw))
    assert len(answers) == len(requests)
    assert graphs.counts[True] > 0


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="only a GPU can be waited for")
def test_adapters_are_stacked_and_assigned_without_waiting_for_the_device(model, shelf):
    stack = AdapterStack(shelf, model.device)
    batches: list[list[Uses]] = [[((FOX, 1.0),), ()], [((FOX, 1.0), (OWL, 0.5)), ((YAK, 1.0),)]]
    with no_waits():
        for rows in batches:
            stack.of(rows, [40, 3])
    assert stack.built == 2


def uses_of(bank: AdapterBank, rows: Sequence[Uses]) -> list[int | None]:
    return [None if found is None else found[0] for found in map(bank.find, rows)]


def test_the_least_recently_used_adapter_gives_its_place_and_never_one_of_the_batch(model, shelf):
    bank = make_bank(model, shelf, 2)
    fox, owl, elk = (((FOX, 1.0),), ((OWL, 1.0),), ((ELK, 1.0),))
    bank.bring([fox, owl])
    there = uses_of(bank, [fox, owl])
    bank.bring([fox, elk])
    assert uses_of(bank, [fox, owl, elk]) == [there[0], None, there[1]]
    bank.bring([fox, elk, owl])
    assert uses_of(bank, [fox, owl, elk]) == [there[0], None, there[1]]
    assert bank.written == 3


def test_one_adapter_in_two_scales_has_one_place_and_a_sum_has_its_own(model, shelf):
    bank = make_bank(model, shelf, 3)
    rows: list[Uses] = [((FOX, 1.0),), ((FOX, 0.5),), ((FOX, 1.0), (OWL, 0.5)), ((OWL, 0.5), (ELK, 1.0))]
    bank.bring(rows)
    found = [bank.find(uses) for uses in rows]
    factor = shelf.adapters[FOX].factor
    assert found[0] is not None and found[1] is not None and found[2] is not None
    assert found[0][0] == found[1][0] != found[2][0]
    assert (found[0][1], found[1][1], found[2][1]) == (factor, 0.5 * factor, 1.0)
    assert found[3] is None, "14 ranks have no room in 8"


def test_an_adapter_of_a_higher_rank_and_one_that_is_gone_have_no_place(model, shelf):
    bank = make_bank(model, shelf, 2)
    rows: list[Uses] = [((YAK, 1.0),), ((CAT, 1.0),)]
    bank.bring(rows)
    assert uses_of(bank, rows) == [None, None]
    assert bank.of(rows, [1, 1]) is None
    assert bank.of([(), ()], [1, 1]) is not None


@settings(deadline=None)
@given(data=st.data())
def test_a_place_holds_what_the_batch_asks_for_whatever_was_there_before(model, shelf, data):
    bank = make_bank(model, shelf, 2)
    one = st.tuples(st.sampled_from([FOX, OWL, ELK]), st.sampled_from([1.0, 0.5, -2.0]))
    row = st.lists(one, max_size=2, unique_by=lambda use: use[0]).map(tuple)
    for rows in data.draw(st.lists(st.lists(row, min_size=1, max_size=3), min_size=1, max_size=4)):
        bank.bring(rows)
        for uses in rows:
            found = bank.find(uses)
            if not uses or found is None:
                continue
            place, scale = found
            for linear, adapted in bank.stacks.items():
                stack = adapted.factors
                held = scale * product(stack.a[place], stack.b[place], linear)
                assert (held - summed(shelf, uses, linear)).abs().max() < 1e-4


def product(a: torch.Tensor, b: torch.Tensor, linear: Linear) -> torch.Tensor:
    """Return what factors add to a linear's weight [outputs, inputs]."""
    ends = sorted({end for _, end in linear.pieces.values()})
    pieces = a.unflatten(0, (len(ends), -1))
    return torch.cat([b[first:end] @ pieces[i] for i, (first, end) in enumerate(zip([0, *ends], ends, strict=False))])


def summed(shelf: Shelf, uses: Uses, linear: Linear) -> torch.Tensor:
    total = torch.zeros_like(linear.weight)
    for name, scale in uses:
        adapter = shelf.adapters[name]
        if linear in adapter.factors:
            total += scale * adapter.factor * product(*adapter.factors[linear], linear)
    return total
