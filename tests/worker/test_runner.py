"""The runner: what a plan computes does not depend on how the work is cut up."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from shared.commands import Generate, Limits, Sampling
from shared.decoding import Decoding, EntropyBounded, LowConfidenceStatic, RandomOrder, Sequential, Threshold
from shared.events import Delta, Finished
from tests.worker.naive_decoder import decode_naively
from tests.worker.texts import NoText
from tests.worker.tiny_checkpoints import TINY, tiny_weights, write_checkpoint
from worker.engine.engine import Engine
from worker.engine.plan import UNDECIDED, Canvas, Fill, Guarded, Plan, Row, Scores, visible_ends
from worker.engine.ports import Arrival, Decision, Inbox
from worker.engine.scheduler import BatchLimits, CacheShape
from worker.logit_edits import edit_logits
from worker.models import LoadedModel, load_model
from worker.runner import Runner

BLOCK = 4
PAGE = 8
PAGES = 32
MASK = 60
PLAIN = Threshold(threshold=0.3, filler_rules=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(write_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def runner(model: LoadedModel) -> Runner:
    return Runner(model, PAGES, PAGE)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, MASK, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def row_of(
    model: LoadedModel, tokens: list[int], start: int, end: int, pages: tuple[int, ...], canvas: Canvas | None = None
) -> Row:
    ends = visible_ends(model.spec.attention, start, end, BLOCK, end)
    return Row("r", start, tuple(tokens[start:end]), ends, pages, canvas)


def canvas_of(start: int, **changes: object) -> Canvas:
    canvas = Canvas(start, (True,) * BLOCK, 0, False, Sampling(), PLAIN, ())
    return replace(canvas, **changes)


def denoise(model: LoadedModel, runner: Runner, length: int, pages: tuple[int, ...], seed: int = 0) -> Decision:
    """Decide the block behind a prompt of `length` whole blocks in one forward."""
    tokens = prompt_of(length, seed) + [MASK] * BLOCK
    return runner(Plan((row_of(model, tokens, 0, length + BLOCK, pages, canvas_of(length)),)))


@pytest.mark.parametrize("cuts", [[16], [4, 8, 12, 16, 20], [12]], ids=str)
def test_a_prefill_in_chunks_decides_as_one_forward_does(model: LoadedModel, runner: Runner, cuts: list[int]) -> None:
    tokens, pages = prompt_of(24) + [MASK] * BLOCK, (9, 2, 5, 30)
    whole = denoise(model, runner, 24, (0, 1, 3, 4))

    at = 0
    for cut in cuts:
        empty = runner(Plan((row_of(model, tokens, at, cut, pages),)))
        assert empty == Decision([[]], [[]], [[]], [None])
        at = cut
    chunked = runner(Plan((row_of(model, tokens, at, 28, pages, canvas_of(24)),)))

    assert chunked.tokens == whole.tokens
    assert chunked.accepted == whole.accepted
    assert chunked.confidence[0] == pytest.approx(whole.confidence[0], abs=1e-5)


def test_rows_of_every_kind_in_one_plan_decide_as_they_do_alone(model: LoadedModel, runner: Runner) -> None:
    alone = [denoise(model, Runner(model, PAGES, PAGE), length, tuple(range(8)), seed=length) for length in (4, 8, 24)]
    rows = []
    for i, length in enumerate((4, 8, 24)):
        tokens = prompt_of(length, seed=length) + [MASK] * BLOCK
        rows.append(row_of(model, tokens, 0, length + BLOCK, tuple(range(8 * i, 8 * i + 8)), canvas_of(length)))
    prefill = row_of(model, prompt_of(20, seed=1), 0, 20, tuple(range(24, 32)))

    together = runner(Plan((rows[0], prefill, rows[1], rows[2])))

    assert [together.tokens[i] for i in (0, 2, 3)] == [one.tokens[0] for one in alone]
    assert [together.accepted[i] for i in (0, 2, 3)] == [one.accepted[0] for one in alone]
    assert together.accepted[1] == []


@pytest.mark.parametrize(
    "decoding",
    [
        PLAIN,
        LowConfidenceStatic(steps=3, filler_rules=False),
        Sequential(filler_rules=False),
        RandomOrder(steps=2, filler_rules=False),
        EntropyBounded(bound=2.0, filler_rules=False),
    ],
    ids=lambda decoding: decoding.strategy,
)
@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=0.8, top_p=0.9, top_k=20, seed=5), Sampling(temperature=1.5, min_p=0.1, seed=6)],
    ids=["greedy", "nucleus", "min-p"],
)
def test_the_engine_over_pages_gives_what_recomputing_everything_gives(
    model: LoadedModel, decoding: Decoding, sampling: Sampling
) -> None:
    wanted = {1: 3, 5: 17, 12: 9, 22: 8}
    engine = Engine(
        model.spec,
        CacheShape(PAGE, PAGES),
        BatchLimits(3, 16),
        Runner(model, PAGES, PAGE),
        lambda request, resume: NoText(),
    )
    arrivals = [
        Generate(
            id=str(length),
            model="tiny",
            prompt=tuple(prompt_of(length, seed=length)),
            sampling=sampling,
            limits=Limits(max_tokens=count, ignore_eos=True),
            decoding=decoding,
        )
        for length, count in wanted.items()
    ]
    found: dict[str, list[int]] = {request.id: [] for request in arrivals}
    nfe: dict[str, int] = {}
    while arrivals or not engine.idle:
        joining = [Arrival(arrivals.pop(0), epoch=1)] if arrivals else []
        for event in engine.step(Inbox(arrivals=joining)).events:
            if isinstance(event, Delta):
                found[event.id] += event.token_ids
            elif isinstance(event, Finished):
                nfe[event.id] = event.usage.nfe

    for length, count in wanted.items():
        expected = decode_naively(model, prompt_of(length, seed=length), count, BLOCK, decoding, sampling)
        assert (found[str(length)], nfe[str(length)]) == expected


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_row_whose_logits_are_not_finite_fails_alone(poison: float, tmp_path: Path) -> None:
    weights = tiny_weights(TINY)
    weights["model.embed_tokens.weight"][7] = poison
    broken = load_model(write_checkpoint(tmp_path, weights=weights))
    runner = Runner(broken, PAGES, PAGE)
    good, bad = [1, 2, 3, 4] + [MASK] * BLOCK, [1, 7, 3, 4] + [MASK] * BLOCK

    decision = runner(
        Plan(
            (
                row_of(broken, bad, 0, 8, (0,), canvas_of(4)),
                row_of(broken, good, 0, 8, (1,), canvas_of(4)),
            )
        )
    )
    # The pages of the failed row go to another request, which must not inherit what it does not see.
    after = runner(Plan((row_of(broken, good, 0, 8, (0, 1), canvas_of(4)),)))

    assert decision.failed == ["the model's logits are not finite", None]
    assert decision.accepted[0] == [False] * BLOCK
    assert any(decision.accepted[1])
    assert after.failed == [None]
    assert after.tokens[0] == decision.tokens[1]


def test_only_wanted_positions_are_accepted_and_filled(model: LoadedModel, runner: Runner) -> None:
    tokens = prompt_of(6) + [MASK] * 2
    canvas = canvas_of(4, masked=(False, False, True, False), last=True)

    decision = runner(Plan((row_of(model, tokens, 0, 8, (0,), canvas),)))

    assert decision.accepted == [[False, False, True, False]]
    assert [decision.tokens[0][i] for i in (0, 1, 3)] == [0, 0, 0]


def test_mask_padding_and_forbidden_ids_are_never_proposed(model: LoadedModel) -> None:
    spec = replace(model.spec, text_vocab_size=40, never_sampled=(3,))
    runner = Runner(replace(model, spec=spec), PAGES, PAGE)
    hot = Sampling(temperature=5.0)
    forbidden = tuple(range(0, 40, 2))
    seen: set[int] = set()

    for seed in range(20):
        canvas = canvas_of(4, sampling=hot.model_copy(update={"seed": seed}), forbidden=forbidden)
        tokens = prompt_of(4) + [MASK] * BLOCK
        seen |= set(runner(Plan((row_of(model, tokens, 0, 8, (0,), canvas),))).tokens[0])

    assert seen <= set(range(1, 40, 2)) - {3}
    assert len(seen) > 8


@pytest.mark.parametrize("temperature", [1e-30, 0.1, 0.2, 0.7, 1.5])
def test_drawn_tokens_are_never_surer_than_the_best_ones_whatever_the_temperature(
    model: LoadedModel, runner: Runner, temperature: float
) -> None:
    for length in range(4, 60, BLOCK):
        tokens = prompt_of(length, length) + [MASK] * BLOCK
        pages = tuple(range(8))
        drawn = Sampling(temperature=temperature, seed=length)
        rows = [
            row_of(model, tokens, 0, length + BLOCK, pages, canvas_of(length, sampling=sampling))
            for sampling in (drawn, Sampling())
        ]
        cold, best = (runner(Plan((row,))) for row in rows)

        assert sum(cold.accepted[0]) <= sum(best.accepted[0])
        assert all(a <= b + 1e-6 for a, b in zip(cold.confidence[0], best.confidence[0], strict=True))


@pytest.mark.parametrize("at_once", [1, 3, 8, 11])
def test_logits_looked_at_in_parts_propose_the_same(
    model: LoadedModel, runner: Runner, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    tokens = prompt_of(8) + [MASK] * BLOCK
    sampled = canvas_of(8, sampling=Sampling(temperature=0.9, top_p=0.8, seed=3), forbidden=(5, 6))
    greedy = canvas_of(8, decoding=EntropyBounded(confidence="filtered"), sampling=Sampling(top_k=3))
    hot = canvas_of(8, sampling=Sampling(temperature=5.0, seed=4))
    rows = (
        row_of(model, tokens, 0, 12, (0, 1), sampled),
        row_of(model, tokens, 0, 12, (2, 3), greedy),
        row_of(model, tokens, 0, 12, (4, 5), hot),
    )
    whole = runner(Plan(rows))

    monkeypatch.setattr("worker.runner.LOGITS_AT_ONCE", at_once * model.spec.vocab_size)
    parts = runner(Plan(rows))

    # A product of other rows may round otherwise.
    for found, expected in zip(parts.confidence, whole.confidence, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    assert replace(parts, confidence=whole.confidence) == whole


class Counting:
    """A guard that takes what the model proposes, and asks `lying` each time how many positions' logits there are."""

    accepts = finished = False

    def __init__(self, lying: Callable[[], int]) -> None:
        self._lying = lying
        self.counts: list[int] = []

    def push(self, token_id: int) -> None:
        raise AssertionError("nothing is decided for good here")

    def fill(self, canvas: Guarded, wanted: Sequence[bool], scores: Scores) -> Fill:
        self.counts.append(self._lying())
        tokens = [scores.best(index) for index in range(len(wanted))]
        return Fill(tokens, [scores.probability(*pair) for pair in enumerate(tokens)], [*wanted])


@pytest.mark.parametrize("changes", [{}, {"edits": ((5, 1.0, 2.0),)}, {"logprobs": 2}], ids=["plain", "edits", "told"])
@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_logits_of_one_part_go_before_those_of_the_next_come_also_where_guards_see_them(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], at_once: int
) -> None:
    made: list[tuple[StorageWeakRef, int]] = []

    def lying() -> int:
        return sum({ref.cdata: rows for ref, rows in made if not ref.expired()}.values())

    def seen(found: torch.Tensor) -> torch.Tensor:
        made.append((StorageWeakRef(found.untyped_storage()), found.shape[0]))
        before.append(lying())
        return found

    before: list[int] = []
    guard = Counting(lying)
    tokens = prompt_of(8) + [MASK] * BLOCK
    free, guarded = (
        [
            row_of(model, tokens, 0, 12, (2 * i, 2 * i + 1), canvas_of(8, guarded=held, **changes))
            for i, held in enumerate(guards)
        ]
        for guards in ([None] * 6, [Guarded(guard, 0, (UNDECIDED,) * BLOCK, BLOCK, True)] * 6)
    )
    expected = Runner(model, PAGES, PAGE)(Plan(tuple(free)))
    monkeypatch.setattr("worker.runner.LOGITS_AT_ONCE", at_once * BLOCK * model.spec.vocab_size)
    monkeypatch.setattr(model.module, "logits", lambda hidden: seen(type(model.module).logits(model.module, hidden)))
    monkeypatch.setattr("worker.runner.edit_logits", lambda *given: seen(edit_logits(*given)))

    found = Runner(model, PAGES, PAGE)(Plan(tuple(guarded)))

    copies = 2 if "edits" in changes else 1
    assert max(before) <= copies * at_once * BLOCK and max(guard.counts) <= copies * at_once * BLOCK
    assert len(guard.counts) == 6
    assert found.tokens == expected.tokens
    assert found.logprobs.keys() == expected.logprobs.keys()
    for row, told in found.logprobs.items():
        pairs = zip(told, expected.logprobs[row], strict=True)
        assert all(a and b and a.logprob == pytest.approx(b.logprob, rel=1e-5) for a, b in pairs)


@pytest.mark.parametrize("most", range(1, 14))
def test_parts_of_the_wanted_positions_are_bounded_and_cut_only_the_canvases_that_are_longer(
    model: LoadedModel, runner: Runner, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    spans: list[int] = []

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        spans.append(hidden.shape[0])
        return type(model.module).logits(model.module, hidden)

    monkeypatch.setattr("worker.runner.LOGITS_AT_ONCE", most * model.spec.vocab_size)
    monkeypatch.setattr(model.module, "logits", logits)
    masks = [(True,) * 4, (True, False, True, True), (False, False, False, True), (True, True, False, False)]
    tokens = prompt_of(8) + [MASK] * BLOCK
    rows = [row_of(model, tokens, 0, 12, (2 * i, 2 * i + 1), canvas_of(8, masked=mask)) for i, mask in enumerate(masks)]

    runner(Plan(tuple(rows)))

    ends = {*accumulate(spans)}
    borders = [*accumulate(map(sum, masks))]
    assert sum(spans) == borders[-1] and max(spans) <= most
    for first, last in pairwise([0, *borders]):
        assert last - first > most or not any(first < end < last for end in ends)


def test_a_shifted_family_reads_the_row_before_each_position(model: LoadedModel) -> None:
    tokens, last = prompt_of(4) + [MASK] * BLOCK, {"last": True}
    straight = Runner(model, PAGES, PAGE)
    shifted = Runner(replace(model, spec=replace(model.spec, logit_shift=1)), PAGES, PAGE)

    plain = straight(Plan((row_of(model, tokens, 0, 8, (0,), canvas_of(4, **last)),)))
    moved = shifted(Plan((row_of(model, tokens, 0, 8, (0,), canvas_of(4, **last)),)))
    windowed = shifted(Plan((row_of(model, tokens, 4, 8, (0,), canvas_of(4, **last)),)))

    assert moved.tokens[0][1:] == plain.tokens[0][:-1]
    # Alone in its window, the first position has no row before it.
    assert windowed.tokens[0] == [plain.tokens[0][0], *plain.tokens[0][:-1]]
