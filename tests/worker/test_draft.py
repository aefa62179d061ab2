"""Drafts of the output: what is kept is what the model would have said, and the rest is decided as ever."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.commands import Generate, Limits, Sampling
from shared.decoding import Decoding, LowConfidenceStatic, Sequential, Threshold
from shared.events import Delta, Event, Failed, Finished, Usage
from shared.holes import HOLE
from tests.goldens.folder import find_folders
from tests.worker.paper_model import paper_spec
from tests.worker.texts import NoText
from tests.worker.tiny_checkpoints import write_checkpoint
from worker.engine.draft import PHASES, count_kept, drafted, on_trial, place_in
from worker.engine.engine import Engine
from worker.engine.plan import Plan
from worker.engine.ports import Arrival, Decision, Inbox, Resume
from worker.engine.scheduler import BatchLimits, CacheShape
from worker.models import LoadedModel, load_model
from worker.runner import Runner

TOKENS = st.lists(st.integers(0, 4), max_size=14)
ONE = Sequential(filler_rules=False)


@pytest.fixture(scope="module", params=["causal", "llada"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    if request.param == "causal":
        return load_model(write_checkpoint(tmp_path_factory.mktemp("tiny")))
    return next(folder for folder in find_folders() if folder.name == request.param).model()


def run(model: LoadedModel, *requests: Generate, resume: Resume | None = None) -> dict[str, tuple[list[int], Usage]]:
    runner, shape = Runner(model, 64, 8), CacheShape(8, 64)
    engine = Engine(model.spec, shape, BatchLimits(4, 256), runner, lambda request, resume: NoText())
    events: list[Event] = []
    inbox = Inbox(arrivals=[Arrival(request, 1, resume or Resume()) for request in requests])
    for _ in range(500):
        events += engine.step(inbox).events
        inbox = Inbox()
        if engine.idle:
            break
    told: dict[str, list[int]] = {request.id: [] for request in requests}
    for event in events:
        if isinstance(event, Delta):
            told[event.id] += event.token_ids
    return {event.id: (told[event.id], event.usage) for event in events if isinstance(event, Finished)}


def ask(name: str, draft: list[int] | None, decoding: Decoding = ONE, **fields: object) -> Generate:
    base: dict[str, object] = {"limits": Limits(max_tokens=16, ignore_eos=True), "block_length": 4} | fields
    return Generate(
        id=name,
        model="tiny",
        prompt=(9, 8, 7, 6),
        draft=None if draft is None else tuple(draft),
        decoding=decoding,
        **base,  # pyright: ignore[reportArgumentType]
    )


@settings(max_examples=200)
@given(TOKENS, TOKENS)
def test_the_place_in_a_draft_is_ones_own_or_the_nearest_behind_the_same_words(
    draft: list[int], made: list[int]
) -> None:
    place = place_in(draft, made)
    assert 0 <= place <= max(len(draft), len(made))
    tail = made[-3:]
    if place != len(made):
        assert draft[place - len(tail) : place] == tail
    if tail and tail in [draft[i : i + len(tail)] for i in range(len(draft))] and len(tail) <= len(draft):
        assert draft[place - len(tail) : place] == tail
    assert place_in(draft, draft) == len(draft)
    assert drafted(draft, made, 5) == draft[place : place + 5]


@settings(max_examples=100)
@given(st.sets(st.integers(10, 22)), st.lists(st.booleans(), min_size=1, max_size=12))
def test_two_phases_test_each_drafted_mask_once(positions: set[int], masked: list[bool]) -> None:
    tokens = dict.fromkeys(positions, 1)
    phases = [on_trial(tokens, masked, 10, phase) for phase in range(PHASES)]
    for index, is_masked in enumerate(masked):
        assert sum(phase[index] for phase in phases) == (is_masked and 10 + index in positions)


def test_a_draft_that_a_test_finds_right_costs_two_forwards_a_block(model: LoadedModel) -> None:
    plain, before = run(model, ask("plain", None))["plain"]
    told, usage = run(model, ask("r", plain))["r"]
    assert len(told) == 16 and before.nfe == 16
    assert usage.accepted_draft_tokens + usage.rejected_draft_tokens == 16
    assert usage.accepted_draft_tokens == sum(a == b for a, b in zip(told, plain, strict=True))
    # What one's own draft has wins its test or is decided one by one.
    assert usage.nfe <= 16 + 2 * 4


class Oracle:
    """Proposes one text, whatever it reads, and accepts what comes first."""

    def __init__(self, text: list[int]) -> None:
        self.text = text
        self.plans: list[Plan] = []

    def __call__(self, plan: Plan) -> Decision:
        self.plans.append(plan)
        decision = Decision([], [], [], [None] * len(plan.rows))
        for row in plan.rows:
            canvas = row.canvas
            assert canvas is not None
            first = next(index for index, masked in enumerate(canvas.masked) if masked)
            decision.accepted.append([index == first for index in range(len(canvas.masked))])
            decision.tokens.append([self.text[canvas.start + index] for index in range(len(canvas.masked))])
            decision.confidence.append([0.5] * len(canvas.masked))
        return decision


@settings(max_examples=60, deadline=None)
@given(st.lists(st.booleans(), min_size=16, max_size=16))
def test_each_block_costs_two_tests_and_a_forward_for_each_wrong_token(wrong: list[bool]) -> None:
    text = [20 + position for position in range(20)]
    draft = [token + 100 * miss for token, miss in zip(text[4:], wrong, strict=True)]
    oracle = Oracle(text)
    spec = replace(paper_spec(4), vocab_size=200)
    engine = Engine(spec, CacheShape(8, 64), BatchLimits(4, 256), oracle, lambda request, resume: NoText())
    events = engine.step(Inbox(arrivals=[Arrival(ask("r", draft), 1)])).events
    while not engine.idle:
        events += engine.step(Inbox()).events
    assert [token for event in events if isinstance(event, Delta) for token in event.token_ids] == text[4:]
    assert isinstance(end := events[-1], Finished)
    assert end.usage.accepted_draft_tokens == 16 - sum(wrong)
    assert end.usage.nfe == sum(2 + sum(wrong[block : block + 4]) for block in range(0, 16, 4))
    for plan in oracle.plans:
        (row,) = plan.rows
        canvas = row.canvas
        assert canvas is not None
        read = row.token_ids[-4:]
        masks = [token == spec.mask_token_id for token in read]
        # What is tested is never seen, and in the first test only that is masked.
        assert all(masked <= is_mask for masked, is_mask in zip(canvas.masked, masks, strict=True))
        if canvas.tests_draft and canvas.step == 0:
            assert masks == list(canvas.masked)


def test_a_wrong_draft_changes_costs_and_a_foreign_one_counts_as_rejected(model: LoadedModel) -> None:
    plain, _ = run(model, ask("plain", None))["plain"]
    absent = next(token for token in range(10, 50) if token not in plain)
    told, usage = run(model, ask("r", [absent] * 16))["r"]
    assert len(told) == 16
    assert usage.accepted_draft_tokens == told.count(absent)
    assert usage.rejected_draft_tokens == 16 - told.count(absent)
    assert usage.nfe <= 16 + 2 * 4


def test_a_draft_longer_or_shorter_than_the_output_and_none_at_all(model: LoadedModel) -> None:
    plain, before = run(model, ask("plain", None))["plain"]
    for draft in ([], plain[:5], [*plain, 11, 12, 13]):
        told, usage = run(model, ask("r", draft))["r"]
        assert len(told) == 16
        assert usage.accepted_draft_tokens + usage.rejected_draft_tokens == len(draft)
    assert run(model, ask("r", []))["r"] == (plain, before)


@pytest.mark.parametrize("decoding", [Threshold(threshold=0.03, filler_rules=False), LowConfidenceStatic(steps=2)])
def test_neighbours_and_a_change_of_worker_change_nothing(model: LoadedModel, decoding: Decoding) -> None:
    plain, _ = run(model, ask("plain", None, decoding))["plain"]
    draft = [*plain[:6], 33, *plain[6:]]
    warm = Sampling(temperature=0.7, seed=3)
    alone = run(model, ask("r", draft, decoding, sampling=warm))["r"]
    others = (ask("a", None), ask("b", plain, decoding), ask("c", [5] * 9))
    assert run(model, ask("r", draft, decoding, sampling=warm), *others)["r"] == alone
    half = Resume(token_ids=tuple(alone[0][:8]), seq=3, block=2, nfe=1)
    told, usage = run(model, ask("r", draft, decoding, sampling=warm), resume=half)["r"]
    assert told == alone[0][8:]
    assert usage.accepted_draft_tokens == alone[1].accepted_draft_tokens
    assert count_kept(draft, draft[:4], 0, 4) == 4


def test_forwards_stay_bounded_and_other_company_is_refused(model: LoadedModel) -> None:
    for most in (1, 2, 3):
        limits = Limits(max_tokens=16, ignore_eos=True, max_nfe=most)
        assert run(model, ask("r", [5] * 16, limits=limits))["r"][1].nfe <= most
    engine = Engine(
        model.spec, CacheShape(8, 64), BatchLimits(4, 256), Runner(model, 64, 8), lambda request, resume: NoText()
    )
    for fields in ({"template": (HOLE, 5), "block_length": None}, {"embed": True}, {"draft": (10**6,)}):
        request = ask("r", [5]).model_copy(update=fields)
        (end,) = engine.step(Inbox(arrivals=[Arrival(request, 1)])).events
        assert isinstance(end, Failed) and end.param == "draft"
