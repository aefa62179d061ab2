"""Adapters at run time: peft's merged weights for every family, and rows of a batch that do not see each other's."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from shared.adapters import WEIGHTS, InvalidAdapter, UnreadableAdapter, digest_of
from shared.commands import Generate, Limits, LoraUse
from shared.events import Delta, Event, Failed, Finished
from tests.goldens.folder import find_folders
from tests.goldens.passes import Pass, run_pass
from tests.worker.adapter_folders import read_weights, write_adapter, write_merged
from tests.worker.test_families import DENSE, MOE, QWEN3, TOKENS, load_with_mask, write_oracle
from tests.worker.test_metrics import samples
from tests.worker.texts import NoText
from worker.adapters.ports import AdapterFaulty, AdaptersFull, AdapterUnavailable
from worker.adapters.sides import Sides, of_text
from worker.adapters.stack import AdapterStack
from worker.adapters.store import AdapterStore
from worker.adapters.targets import find_targets, shapes_of
from worker.adapters.weights import Adapter, load_adapter, stacked_size
from worker.engine.engine import Engine
from worker.engine.plan import visible_ends
from worker.engine.ports import Arrival, Inbox
from worker.engine.scheduler import BatchLimits, CacheShape
from worker.metrics import Metrics
from worker.models import LoadedModel, load_checkpoint
from worker.models.checkpoint import read_checkpoint
from worker.models.layers import Linear, LowRank
from worker.runner import Runner

TOLERANCE = 1e-4
# What text and canvas of DiffusionGemma take is in test_diffusion_gemma_adapters.
GOLDENS = {folder.name: folder for folder in find_folders() if folder.family != "diffusion_gemma"}
MADE = {
    "qwen3": ("Qwen3", QWEN3, "ForCausalLM", None),
    "llama": ("Llama", DENSE, "ForCausalLM", None),
    "sdar_moe": ("Qwen3Moe", MOE, "ForCausalLM", "SDARMoeForCausalLM"),
    "stable_diffcoder": ("Llama", DENSE | {"head_dim": 16}, "ForCausalLM", "StableDiffcoderForCausalLM"),
    "bert": (
        "Bert",
        {key: DENSE[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
        | {"num_attention_heads": 4, "max_position_embeddings": 256, "eos_token_id": 62, "pad_token_id": 0},
        "ForMaskedLM",
        None,
    ),
    "modernbert": (
        "ModernBert",
        {key: DENSE[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
        | {"num_attention_heads": 4, "max_position_embeddings": 256, "eos_token_id": 62, "pad_token_id": 0}
        | {"layer_types": ["full_attention", "full_attention"], "sep_token_id": 62, "cls_token_id": 1},
        "ForMaskedLM",
        None,
    ),
}


class Shelf:
    """Adapters by name, all of them in use."""

    def __init__(self, adapters: Mapping[str, Adapter]) -> None:
        self.adapters = adapters

    def get(self, digest: str) -> Adapter | None:
        return self.adapters.get(digest)

    def held(self) -> set[str]:
        return set(self.adapters)


def base_model(name: str, tmp_path: Path) -> tuple[Path, LoadedModel]:
    if name in GOLDENS:
        return GOLDENS[name].path, GOLDENS[name].model()
    kind, config, task, architecture = MADE[name]
    write_oracle(tmp_path / "base", kind, config, architecture, task)
    return tmp_path / "base", load_with_mask(tmp_path / "base")


def logits(model: LoadedModel, lora: LowRank | None = None) -> torch.Tensor:
    length = len(TOKENS)
    ends = tuple(min(end, length) for end in visible_ends(model.spec.attention, 0, length, 4, length))
    ids = torch.tensor(TOKENS)
    wanted = Pass(ids, torch.arange(length), ends, torch.zeros(length, model.spec.vocab_size))
    return run_pass(model, wanted, lora=lora)


@pytest.mark.parametrize("rslora", [False, True], ids=["plain", "rank-stabilised"])
@pytest.mark.parametrize("name", [*GOLDENS, *MADE])
def test_an_adapter_beside_the_weights_is_what_peft_merges_into_them(tmp_path: Path, name: str, rslora: bool) -> None:
    folder, base = base_model(name, tmp_path)
    targets = find_targets(base)
    merged = write_adapter(tmp_path / "adapter", read_weights(folder), shapes_of(targets), rslora=rslora)
    checkpoint = read_checkpoint(write_merged(tmp_path / "merged", folder, merged))
    # As `tests.goldens.folder` does: some have their mask in no config file.
    known = load_checkpoint(replace(checkpoint, config={"mask_token_id": base.spec.mask_token_id, **checkpoint.config}))

    adapter = load_adapter(tmp_path / "adapter", targets, base.device, base.dtype)
    stack = AdapterStack(Shelf({"x": adapter}), base.device)
    found = logits(base, stack.of([(("x", 1.0),)], [len(TOKENS)]))

    wanted = logits(known)
    assert (found - wanted).abs().max() < TOLERANCE * max(1.0, float(wanted.abs().max()))
    assert (logits(base) - wanted).abs().max() > 0.1, "an adapter that changes nothing proves nothing"


@pytest.fixture
def model(tmp_path: Path) -> LoadedModel:
    write_oracle(tmp_path / "base", "Qwen3", QWEN3, "SDARForCausalLM")
    return load_with_mask(tmp_path / "base")


@pytest.fixture
def shelf(model: LoadedModel, tmp_path: Path) -> Shelf:
    weights, targets = read_weights(tmp_path / "base"), find_targets(model)
    shapes = shapes_of(targets)
    write_adapter(tmp_path / "a", weights, shapes, rank=3, seed=1)
    write_adapter(tmp_path / "b", weights, shapes, rank=6, seed=2, leaves=["q_proj", "v_proj", "down_proj"])
    load = {name: load_adapter(tmp_path / name, targets, model.device, model.dtype) for name in "ab"}
    return Shelf({digest_of(tmp_path / name): adapter for name, adapter in load.items()})


def use(tmp_path: Path, name: str, scale: float = 1.0) -> LoraUse:
    return LoraUse(name=name, scale=scale, path=name, digest=digest_of(tmp_path / name))


def run(
    model: LoadedModel, shelf: Shelf, requests: Sequence[Generate], apart: bool = False
) -> tuple[dict[str, list[int]], Engine]:
    runner = Runner(model, 128, 8, model.device, adapters=shelf)
    engine = Engine(model.spec, CacheShape(8, 128), BatchLimits(16, 64), runner, lambda *_: NoText())
    events: list[Event] = []
    for waves in [[each] for each in requests] if apart else [requests]:
        events += engine.step(Inbox(arrivals=[Arrival(each, epoch=1) for each in waves])).events
        while not engine.idle:
            events += engine.step(Inbox()).events
    assert not any(isinstance(event, Failed) for event in events)
    return {
        each.id: [t for e in events if isinstance(e, Delta) and e.id == each.id for t in e.token_ids]
        for each in requests
    }, engine


def ask(name: str, uses: Sequence[LoraUse] = (), prompt: Sequence[int] = TOKENS) -> Generate:
    limits = Limits(max_tokens=16, ignore_eos=True)
    return Generate(id=name, model="m", prompt=tuple(prompt), limits=limits, lora=tuple(uses))


def test_rows_with_other_adapters_and_scales_get_what_they_get_alone(
    model: LoadedModel, shelf: Shelf, tmp_path: Path
) -> None:
    a, b = use(tmp_path, "a"), use(tmp_path, "b")
    asked = {
        "base": (),
        "a": (a,),
        "half": (use(tmp_path, "a", 0.5),),
        "b": (b,),
        "less": (use(tmp_path, "b", -0.7),),
        "both": (a, use(tmp_path, "b", 0.3)),
        "zero": (use(tmp_path, "a", 0.0),),
    }
    requests = [ask(name, uses) for name, uses in asked.items()]

    together, _ = run(model, shelf, requests)

    for each in requests:
        assert together[each.id] == run(model, shelf, [each])[0][each.id]
    assert together["zero"] == together["base"]
    assert len({tuple(tokens) for name, tokens in together.items() if name != "zero"}) == len(asked) - 1


def test_a_text_read_under_one_adapter_is_not_shared_with_another(
    model: LoadedModel, shelf: Shelf, tmp_path: Path
) -> None:
    uses = [(), (use(tmp_path, "a"),), (use(tmp_path, "a", 0.5),), (use(tmp_path, "b"),)]
    requests = [ask(f"r{i}", each) for i, each in enumerate(uses)]
    alone = {each.id: run(model, shelf, [each])[0][each.id] for each in requests}

    one_by_one, engine = run(model, shelf, requests, apart=True)
    assert one_by_one == alone
    assert engine.load().cached_tokens == 0

    again, engine = run(model, shelf, [ask(f"s{i}", each) for i, each in enumerate(uses * 2)], apart=True)
    assert list(again.values()) == [*alone.values()] * 2
    assert engine.load().cached_tokens > 0


def test_the_stack_is_built_once_for_a_batch_that_stays(model: LoadedModel, shelf: Shelf) -> None:
    stack = AdapterStack(shelf, model.device)
    first, second = shelf.adapters
    for _ in range(3):
        stack.of([((first, 1.0),), ((second, 2.0),)], [2, 3])
        # One that sits a step out stays stacked.
        stack.of([((second, 1.0),)], [4])
    assert stack.built == 1


def test_an_adapter_that_was_gone_when_others_were_stacked_counts_again_once_it_is_back(
    model: LoadedModel, shelf: Shelf
) -> None:
    first, second = shelf.adapters
    rows, counts = [((first, 1.0),), ((second, 2.0),)], [len(TOKENS) - 2, 2]
    expected = logits(model, AdapterStack(shelf, model.device).of(rows, counts))
    here = dict(shelf.adapters)
    gone = here.pop(second)
    stack = AdapterStack(Shelf(here), model.device)

    assert stack.of([((second, 1.0),)], [3]) is None
    for _ in range(2):
        without = logits(model, stack.of(rows, counts))
    assert stack.built == 1 and not torch.equal(without, expected)

    here[second] = gone
    assert torch.equal(logits(model, stack.of(rows, counts)), expected)
    assert stack.built == 2


@given(
    chosen=st.lists(
        st.tuples(st.integers(1, 9), st.sets(st.integers(0, 3), min_size=1), st.booleans()), min_size=1, max_size=4
    )
)
@settings(max_examples=40, deadline=None)
def test_a_stack_of_adapters_takes_what_was_counted_for_it(chosen: list[tuple[int, set[int], bool]]) -> None:
    linears = [Linear(4 + n, 6 + n, False, device=torch.device("cpu"), dtype=torch.float32) for n in range(4)]
    adapters: dict[str, Adapter] = {}
    for number, (rank, places, sided) in enumerate(chosen):
        pairs = {linears[n]: (torch.ones(rank, 4 + n), torch.ones(6 + n, rank)) for n in sorted(places)}
        adapters[str(number)] = Adapter(rank, 1.0, pairs, pairs if sided else {})
    sides = any(sided for _, _, sided in chosen)
    stack = AdapterStack(Sides(Shelf(adapters)) if sides else Shelf(adapters), torch.device("cpu"))
    rows = [((name, 1.0),) for name in adapters]
    rows += [of_text(uses) for uses in rows] if sides else []

    lora = stack.of(rows, [1] * len(rows))

    assert lora is not None
    taken = sum(adapted.factors.a.nbytes + adapted.factors.b.nbytes for adapted in lora.stacks.values())
    assert taken <= stacked_size(adapters.values()) <= taken + 1


@pytest.mark.parametrize("embed", [False, True])
def test_weights_that_overflow_are_the_fault_of_the_requests_own_adapter(
    model: LoadedModel, shelf: Shelf, tmp_path: Path, embed: bool
) -> None:
    hot = shelf.get(digest_of(tmp_path / "a"))
    assert hot is not None
    with torch.inference_mode():
        for pair in hot.factors.values():
            for factor in pair:
                factor.fill_(1e30)
    runner = Runner(model, 128, 8, model.device, adapters=shelf)
    engine = Engine(model.spec, CacheShape(8, 128), BatchLimits(16, 64), runner, lambda *_: NoText())
    asked = [ask("bad", [use(tmp_path, "a")]), ask("other", [use(tmp_path, "b")]), ask("base")]
    asked = [each.model_copy(update={"embed": embed}) for each in asked]
    events = engine.step(Inbox(arrivals=[Arrival(each, epoch=1) for each in asked])).events
    while not engine.idle:
        events += engine.step(Inbox()).events
    ends = {event.id: event for event in events if isinstance(event, Failed | Finished)}
    assert isinstance(ends["other"], Finished) and isinstance(ends["base"], Finished)
    bad = ends["bad"]
    assert isinstance(bad, Failed) and (bad.code, bad.param) == ("unsupported", "lora")
    assert bad.message.endswith("are not finite under this request's adapters: a")


# --- the store


class Loader:
    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = sizes
        self.loads: list[str] = []
        self.linear = torch.nn.Identity()
        self.ranks: dict[str, int] = {}
        self.errors: dict[str, Exception] = {}

    def __call__(self, folder: Path) -> Adapter:
        self.loads.append(folder.name)
        if folder.name in self.errors:
            raise self.errors[folder.name]
        factors = {self.linear: (torch.zeros(self.sizes[folder.name] // 8), torch.zeros(self.sizes[folder.name] // 8))}
        return Adapter(self.ranks.get(folder.name, 1), 1.0, factors)  # type: ignore[arg-type]


def stored(
    tmp_path: Path, clock: Callable[[], float] = time.monotonic, /, **sizes: int
) -> tuple[AdapterStore, Loader, dict[str, LoraUse]]:
    for number, name in enumerate(sizes):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "adapter_config.json").write_text("{}")
        save_file({"x": torch.full((1,), float(number))}, folder / WEIGHTS)
    loader = Loader(sizes)
    return AdapterStore(tmp_path, loader, 1000, clock), loader, {name: use(tmp_path, name) for name in sizes}


def test_the_least_recently_used_adapter_goes_first_and_never_one_in_use(tmp_path: Path) -> None:
    store, loader, uses = stored(tmp_path, a=400, b=400, c=400, d=400)
    for name in "ab":
        store.hold([uses[name]])
        store.release([uses[name]])
    store.hold([uses["a"]])
    store.hold([uses["c"]])
    assert (store.names(), store.evictions, store.size) == (["a", "c"], 1, 800)
    for _ in range(2):
        with pytest.raises(AdaptersFull, match="d: no room"):
            store.hold([uses["d"]])
    assert store.held() == {uses["a"].digest, uses["c"].digest}
    store.release([uses["a"]])
    store.hold([uses["d"]])
    assert (store.names(), loader.loads) == (["c", "d"], ["a", "b", "c", "d", "d"])


def test_what_becomes_of_adapters_is_told(tmp_path: Path) -> None:
    store, _, uses = stored(tmp_path, a=600, b=600, c=1200)
    metrics = Metrics("m")
    store.tell(metrics)
    for name in "ab":
        store.hold([uses[name]])
        store.release([uses[name]])
    with pytest.raises(AdapterUnavailable):
        store.hold([uses["c"]])
    found = samples(metrics)
    assert found["diffleet_adapter_load_seconds_count", ""] == 2
    # For one that is too large in any case nothing has to go.
    assert found["diffleet_adapter_evictions_total", ""] == store.evictions == 1
    assert found["diffleet_adapter_load_failures_total", ""] == 1
    assert (found["diffleet_adapters_resident", ""], found["diffleet_adapter_bytes", ""]) == (1, 600)


def test_of_several_adapters_either_all_are_held_or_none(tmp_path: Path) -> None:
    store, _, uses = stored(tmp_path, a=400, b=900)
    with pytest.raises(AdapterUnavailable, match="^the adapters a, b of this request: .* are needed for them") as told:
        store.hold([uses["a"], uses["b"]])
    assert not isinstance(told.value, AdaptersFull), "no wait would help"
    assert store.held() == set()
    store.hold([uses["b"]])


def test_an_adapter_that_is_too_large_alone_is_blamed_alone(tmp_path: Path) -> None:
    store, _, uses = stored(tmp_path, a=400, c=1200)
    for asked in ([uses["c"]], [uses["a"], uses["c"]]):
        with pytest.raises(AdapterUnavailable, match="^adapter c: .* MiB are needed, and this worker has"):
            store.hold(asked)


def test_what_has_no_room_is_not_read_again_until_something_goes_out_of_use(tmp_path: Path) -> None:
    store, loader, uses = stored(tmp_path, a=400, b=400, c=400)
    for name in "aab":
        store.hold([uses[name]])
    for name in ("a", "c", "c"):
        with pytest.raises(AdaptersFull):
            store.hold([uses["c"]])
        if name == "a":
            store.release([uses["a"]])  # another request runs under it still
    assert loader.loads == ["a", "b", "c"]
    store.release([uses["a"]])
    store.hold([uses["c"]])
    assert (store.names(), loader.loads) == (["b", "c"], ["a", "b", "c", "c"])


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def full(store: AdapterStore, use: LoraUse) -> bool:
    """Hold an adapter, or tell that it has to wait."""
    try:
        store.hold([use])
    except AdaptersFull:
        return True
    return False


def test_adapters_that_are_always_in_use_make_room_for_one_that_waits(tmp_path: Path) -> None:
    clock = Clock()
    store, _, uses = stored(tmp_path, clock, a=400, b=400, c=400, d=400)
    store.hold([uses["a"]])
    store.hold([uses["b"]])
    assert full(store, uses["c"])
    clock.now += 1
    # At first nobody is kept from going on.
    assert not full(store, uses["a"]) and not full(store, uses["b"])
    clock.now += 1.5
    assert full(store, uses["c"])
    # Now the one that was asked for least recently ends, the other goes on, and nobody takes the room of who waits.
    assert full(store, uses["a"]) and full(store, uses["d"])
    assert not full(store, uses["b"])
    store.release([uses["a"]])
    assert full(store, uses["a"]), "it is in use by one request still"
    store.release([uses["a"]])
    assert full(store, uses["a"]) and full(store, uses["d"])
    assert not full(store, uses["c"])
    assert store.held() == {uses["b"].digest, uses["c"].digest}


def test_room_that_nobody_waits_for_is_taken_beside_one_that_waits(tmp_path: Path) -> None:
    clock = Clock()
    store, _, uses = stored(tmp_path, clock, a=300, b=300, c=300, d=300, e=300, f=300)
    for name in "abc":
        store.hold([uses[name]])
    assert full(store, uses["d"])
    clock.now += 3
    store.release([uses["a"]])
    store.release([uses["b"]])
    assert not full(store, uses["e"])
    assert full(store, uses["f"]), "the last room is kept"
    assert not full(store, uses["d"])


def test_who_waits_and_does_not_come_back_keeps_nobody_out(tmp_path: Path) -> None:
    clock = Clock()
    store, _, uses = stored(tmp_path, clock, a=400, b=400, c=400)
    store.hold([uses["a"]])
    store.hold([uses["b"]])
    assert full(store, uses["c"])
    clock.now += 3
    assert full(store, uses["a"])
    clock.now += 6
    assert not full(store, uses["a"]) and not full(store, uses["b"])


@given(
    popular=st.integers(2, 4),
    lasts=st.lists(st.floats(0.1, 6), min_size=1, max_size=9),
    others=st.integers(1, 4),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_adapter_has_its_turn_whatever_is_in_use(
    tmp_path: Path, popular: int, lasts: list[float], others: int
) -> None:
    """Requests of popular adapters overlap without end; each comes back after a refusal as the queue brings it."""
    clock, names = Clock(), [f"n{number}" for number in range(popular + others)]
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    folder.mkdir()
    store, _, uses = stored(folder, clock, **dict.fromkeys(names, 1000 // popular))
    ends: list[tuple[float, str]] = []
    served: dict[str, float] = {}
    for turn in range(600):
        clock.now += 0.1
        for end, name in [each for each in ends if each[0] <= clock.now]:
            ends.remove((end, name))
            store.release([uses[name]])
        asking = names[:popular] + (names if turn % 5 == 0 else [])
        for name in asking:
            if (name in names[:popular] or name not in served) and not full(store, uses[name]):
                served.setdefault(name, clock.now)
                ends.append((clock.now + lasts[turn % len(lasts)], name))
    assert served.keys() == set(names)


def test_adapters_of_other_ranks_count_with_the_room_they_take_side_by_side(tmp_path: Path) -> None:
    # One of rank 8 beside others of rank 1: in the batch each of them has the room of rank 8.
    store, loader, uses = stored(tmp_path, wide=400, a=48, b=48)
    loader.ranks = {"wide": 8}
    store.hold([uses["wide"]])
    store.hold([uses["a"]])
    with pytest.raises(AdaptersFull):
        store.hold([uses["b"]])
    store.release([uses["wide"]])
    store.hold([uses["b"]])
    with pytest.raises(AdaptersFull):
        store.hold([uses["wide"]])


def test_a_value_that_the_workers_numbers_cannot_hold_is_refused_by_its_tensor(
    model: LoadedModel, shelf: Shelf, tmp_path: Path
) -> None:
    weights = load_file(tmp_path / "b" / WEIGHTS)
    faulty = sorted(weights)[-1]
    weights[faulty][0, 0] = 1e6
    save_file(weights, tmp_path / "b" / WEIGHTS)
    load_adapter(tmp_path / "b", find_targets(model), model.device, torch.bfloat16)
    with pytest.raises(InvalidAdapter, match=f"{faulty} holds values that are not finite in float16"):
        load_adapter(tmp_path / "b", find_targets(model), model.device, torch.float16)


def test_an_adapter_whose_files_have_changed_or_gone_is_not_loaded(tmp_path: Path) -> None:
    store, loader, uses = stored(tmp_path, a=8, b=8)
    (tmp_path / "a" / "adapter_config.json").write_text("{} ")
    (tmp_path / "b" / WEIGHTS).unlink()
    with pytest.raises(AdapterUnavailable, match="a: its files are not those"):
        store.hold([uses["a"]])
    with pytest.raises(AdapterUnavailable, match=f"b: {WEIGHTS}"):
        store.hold([uses["b"]])
    assert loader.loads == []


def test_a_fault_of_the_registered_files_is_told_from_one_that_may_pass(tmp_path: Path) -> None:
    store, loader, uses = stored(tmp_path, a=8, b=8, c=8)
    loader.errors = {"a": InvalidAdapter("r", "is 8"), "b": UnreadableAdapter(WEIGHTS, "stale"), "c": MemoryError()}
    with pytest.raises(AdapterFaulty, match="adapter a: r: is 8"):
        store.hold([uses["a"]])
    for name in "bc":
        with pytest.raises(AdapterUnavailable) as told:
            store.hold([uses[name]])
        assert not isinstance(told.value, AdapterFaulty)
        # The field at fault is the one that named it.
        assert told.value.param == "lora"
        with pytest.raises(AdapterUnavailable) as told:
            store.hold([uses[name].model_copy(update={"param": "model"})])
        assert told.value.param == "model"


def test_an_adapter_outside_the_store_is_a_fault(tmp_path: Path) -> None:
    store, loader, _ = stored(tmp_path)
    outside = LoraUse(name="x", path="../x", digest="0" * 64)
    with pytest.raises(AdapterFaulty, match="path: must name a folder inside"):
        store.hold([outside])
    assert loader.loads == []
