"""What must be free beside weights and pages: the plan against what captured steps take."""

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kernels
from tests.fleet.models import write_tiny_model
from tests.worker.test_adapters import Shelf
from worker import memory
from worker.adapters.bank import AdapterBank
from worker.adapters.targets import find_targets
from worker.adapters.weights import Adapter
from worker.ahead import AheadRunner, bucket_sizes, make_graphs
from worker.assembly import cache_shape
from worker.device import Placement
from worker.engine.scheduler import BatchLimits
from worker.graphs import StepGraphs
from worker.lanes import Lanes, make_lanes
from worker.memory import NO_NEEDS, Held, Needs, extrapolate, measure_needs, measure_steps
from worker.models import LoadedModel, ModelError, load_model
from worker.runner import Runner
from worker.settings import WorkerSettings

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
PAGE = 8
LIMITS = BatchLimits(40, 256, pages_ahead=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(write_tiny_model(tmp_path_factory.mktemp("model")), device=DEVICE)


def test_captured_steps_count_for_good_beside_what_a_plan_needs_while_it_runs():
    assert Needs(plan=5, logits=7, steps=11).total == 23


def test_what_the_first_steps_allocate_is_shared_and_each_other_adds_its_own():
    assert extrapolate(600, 30, first=2, tried=12, count=62) == 600 + 60 * 3
    assert extrapolate(600, 31, first=2, tried=12, count=62) == 600 + 60 * 4
    assert extrapolate(600, 0, first=2, tried=2, count=2) == 600


@given(
    shared=st.integers(0, 10**10),
    each=st.integers(0, 10**8),
    others=st.integers(1, 20),
    untried=st.integers(0, 100),
)
def test_equal_steps_are_told_exactly(shared: int, each: int, others: int, untried: int):
    assert extrapolate(shared, each * others, 2, 2 + others, 2 + others + untried) == shared + each * (others + untried)


size = st.integers(0, 10**11)


@given(size, size, size, size)
def test_neighbours_on_the_device_never_hide_what_the_allocator_knows_of(a: int, b: int, free: int, later: int):
    grown = Held(b, later).since(Held(a, free))
    assert grown >= max(0, b - a)
    assert grown == max(0, b - a, free - later)


def test_the_largest_layers_and_head_of_each_number_of_rows_are_captured_first(model: LoadedModel, monkeypatch):
    graphs = make_graphs(Runner(model, 8, PAGE, DEVICE), 40)
    leader = AheadRunner(Runner(model, 8, PAGE, DEVICE), graphs, bucket_sizes(40))
    order = list[tuple[str, int, int]]()
    monkeypatch.setattr(graphs, "capture", lambda rows, slots, adapted: order.append(("layers", rows, slots)))
    monkeypatch.setattr(graphs, "capture_head", lambda rows, room: order.append(("head", rows, room)))
    captures = leader.captures()
    for rows, capture in captures:
        capture()
        assert order[-1][1] == rows
    sizes = [rows for rows, _ in captures]
    assert sizes == sorted(sizes, reverse=True)
    for rows in bucket_sizes(40):
        mine = [each for each in order if each[1] == rows]
        first = {kind: max(size for what, _, size in mine if what == kind) for kind in ("layers", "head")}
        assert mine[:2] == [("layers", rows, first["layers"]), ("head", rows, first["head"])]
        assert first == {"layers": rows, "head": rows * model.spec.block_length}
    assert len(order) == len(set(order))
    told = list[tuple[int, int]]()
    leader.capture(lambda done, of: told.append((done, of)))
    assert told == [(done, len(captures)) for done in range(1, len(captures) + 1)]


@pytest.mark.parametrize("neighbour", (0, -(10**9)), ids=("alone", "beside one that leaves"))
def test_steps_of_the_most_rows_tell_what_all_of_them_take(model: LoadedModel, monkeypatch, neighbour: int):
    """A card of which the first layers and head take 1,000 bytes for all, and each other capture 7."""
    taken, captured = [0], list[tuple[int, ...]]()

    def take(graphs: StepGraphs, *size: int) -> None:
        captured.append(size)
        taken[0] += 500 if len(captured) <= 2 else 7

    monkeypatch.setattr(StepGraphs, "capture", take)
    monkeypatch.setattr(StepGraphs, "capture_head", take)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: taken[0])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**10 - taken[0] - neighbour * len(captured), 0))
    runner = Runner(model, 8, PAGE, DEVICE)
    graphs = make_graphs(runner, 40)
    count = len(AheadRunner(runner, graphs, bucket_sizes(40)).captures())
    assert measure_steps(runner, 40) == graphs.kept_bytes + 1000 + 7 * (count - 2)
    assert {size[0] for size in captured} == {40} and len(captured) < count


def test_steps_of_several_block_lengths_are_told_together(model: LoadedModel, monkeypatch):
    """A card on which a capture takes a byte for each row and position of its length, beyond what was there before."""
    taken, captured = [0], list[int]()

    def take(graphs: StepGraphs, rows: int, *_: object) -> None:
        captured.append(graphs.layout.block)
        size = rows * graphs.layout.block
        taken[0] = max(taken[0], size) + 1

    monkeypatch.setattr(StepGraphs, "capture", take)
    monkeypatch.setattr(StepGraphs, "capture_head", take)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: taken[0])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**10 - taken[0], 0))
    runner = Runner(model, 8, PAGE, DEVICE)
    told, largest = measure_steps(runner, 40, (4, 8)), 40 * 8
    lanes = make_lanes(runner, 40, (4, 8))
    kept = sum(lane.graphs.kept_bytes for lane in lanes)
    # The shorter blocks find all memory there that the longer ones have taken.
    assert told == kept + largest + sum(len(lane.captures()) for lane in lanes)
    assert captured == sorted(captured, reverse=True) and set(captured) == {4, 8}


def test_pages_get_what_is_free_once_the_needs_have_been_measured(model: LoadedModel):
    left = [10**6]

    def measure(page_size: int) -> int:
        left[0] -= 3 * 10**5
        return 2 * 10**5

    spec = replace(model.spec, max_model_len=10**6)
    settings, placement = WorkerSettings(), Placement(torch.device("cpu"), torch.float32, 1)
    cache = cache_shape(settings, spec, placement, measure, lambda: left[0])
    token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 4
    assert cache.num_pages == int(5 * 10**5 * 0.95) // (token * cache.page_size)


def test_needs_beyond_what_is_free_are_refused_with_a_message(model: LoadedModel):
    placement = Placement(torch.device("cpu"), torch.float32, 1)
    with pytest.raises(ModelError, match="do not hold one page"):
        cache_shape(WorkerSettings(), model.spec, placement, lambda _: 10**9, lambda: 10**6)


@pytest.mark.skipif(ON_GPU, reason="a GPU's memory is planned")
def test_the_memory_of_a_host_is_not_planned(model: LoadedModel):
    assert measure_needs(model, LIMITS, PAGE) == NO_NEEDS


@pytest.mark.parametrize("adapted", [True, False])
def test_the_largest_plan_is_measured_under_adapters_where_there_are_any(model: LoadedModel, monkeypatch, adapted):
    products, peaks = [0], iter([400, 700])

    def lora(y: torch.Tensor, *_: object) -> torch.Tensor:
        products[0] += 1
        return y

    def peak(device: torch.device, work: Callable[[], object]) -> int:
        work()
        return next(peaks)

    monkeypatch.setattr(kernels, "lora", lora)
    monkeypatch.setattr(memory, "_peak", peak)
    linears = [target.linear for target in find_targets(model).values()]
    bank = AdapterBank(linears, 1, 8, Shelf({}), DEVICE, model.dtype) if adapted else None
    plan, _ = memory._measure(model, replace(LIMITS, pages_ahead=False), 64, PAGE, bank)
    assert (plan, products[0] > 0) == ((700, True) if adapted else (400, False))


def test_what_stands_in_for_an_adapter_leaves_its_place(model: LoadedModel):
    linears = [target.linear for target in find_targets(model).values()]
    bank = AdapterBank(linears, 1, 8, Shelf({"fox": Adapter(8, 1.0, {})}), DEVICE, model.dtype)
    with bank.stand_in() as uses:
        assert bank.of([uses], [3]) is not None
    assert bank.of([uses], [3]) is None
    bank.bring([(("fox", 1.0),)])
    assert bank.find((("fox", 1.0),)) == (0, 1.0)


@pytest.mark.skipif(not ON_GPU, reason="captures need a GPU")
@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="other processes take and free memory of the same GPU")
@pytest.mark.parametrize("lengths", [(), (8,)], ids=["one length", "two"])
def test_captured_steps_take_what_the_plan_says(model: LoadedModel, lengths: tuple[int, ...]):
    needs = measure_needs(model, LIMITS, PAGE, lengths=lengths)
    runner = Runner(model, 64, PAGE, DEVICE)
    lanes = make_lanes(runner, LIMITS.max_rows, lengths)
    lanes[0].graphs.tidy()
    # Other processes may use the card meanwhile, so only the allocator's side is looked at.
    held = torch.cuda.memory_reserved(DEVICE)
    Lanes(runner, lanes).capture(lambda done, of: None)
    assert needs.steps >= torch.cuda.memory_reserved(DEVICE) - held - 2**26
    before = torch.cuda.memory_reserved(DEVICE)
    for lane in lanes:
        lane.graphs.launch(LIMITS.max_rows, LIMITS.max_rows)
    torch.cuda.synchronize(DEVICE)
    assert torch.cuda.memory_reserved(DEVICE) == before
