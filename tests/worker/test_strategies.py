"""Every strategy against its rule in plain Python, and the properties that hold for all of them."""

from dataclasses import dataclass, fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.decoding import (
    AdaptiveParallel,
    Decoding,
    Entropy,
    EntropyBounded,
    Factor,
    JointThreshold,
    LinearSpeculation,
    LowConfidenceDynamic,
    LowConfidenceStatic,
    MaskgitPlus,
    Origin,
    RandomOrder,
    Sequential,
    StreamingWindow,
    SubBlock,
    Threshold,
    ThresholdQuota,
    Timed,
    TopkMargin,
)
from worker.decoding import decide, needs_entropy, needs_margin
from worker.decoding.types import BlockView, TokenStats

FILLER = 9
# No deadline: a shared machine may be slow, which proves nothing.
unhurried = settings(max_examples=100, deadline=None)


@dataclass(frozen=True)
class Position:
    """One position of a canvas, as a rule sees it."""

    index: int
    confidence: float
    entropy: float
    margin: float
    token: int


@dataclass(frozen=True)
class Row:
    length: int
    masked: tuple[bool, ...]
    confidence: tuple[float, ...]
    entropy: tuple[float, ...]
    tokens: tuple[int, ...]
    step: int
    seed: int
    decoding: Decoding
    margin: tuple[float, ...] = ()
    decided: int = 0
    """Masks that the block had beside those of its first step here."""
    opened: int = 0
    """Masks when the block was opened; 0: as many as now, and those decided."""

    @property
    def at_first(self) -> int:
        return self.opened or sum(self.masked) + self.decided

    @property
    def open(self) -> list[Position]:
        return [
            Position(i, self.confidence[i], self.entropy[i], (self.margin or self.confidence)[i], self.tokens[i])
            for i in range(self.length)
            if self.masked[i]
        ]


# Eighths are exact in float32 and make ties common.
eighths = st.integers(0, 8).map(lambda n: n / 8)
steps = st.none() | st.integers(1, 20)
flags = st.booleans()
times = st.sampled_from([1e-3, 0.01, 0.5])
BY_NAME: dict[str, st.SearchStrategy[Decoding]] = {
    "threshold": st.builds(Threshold, threshold=eighths, filler_rules=flags),
    "factor": st.builds(Factor, factor=st.integers(1, 24).map(lambda n: n / 8), filler_rules=flags),
    "threshold_quota": st.builds(ThresholdQuota, threshold=eighths, steps=steps, filler_rules=flags),
    "adaptive_parallel": st.builds(
        AdaptiveParallel, max_parallel=st.integers(1, 14), threshold=eighths, steps=steps, filler_rules=flags
    ),
    "sub_block": st.builds(SubBlock, threshold=eighths, filler_rules=flags),
    "origin": st.builds(Origin, steps=steps, eps=times, filler_rules=flags),
    "maskgit_plus": st.builds(MaskgitPlus, steps=steps, eps=times, filler_rules=flags),
    "topk_margin": st.builds(TopkMargin, steps=steps, eps=times, filler_rules=flags),
    "entropy": st.builds(Entropy, steps=steps, eps=times, filler_rules=flags),
    "low_confidence_static": st.builds(LowConfidenceStatic, steps=steps, filler_rules=flags),
    "low_confidence_dynamic": st.builds(
        LowConfidenceDynamic,
        threshold=eighths,
        steps=steps,
        fallback=st.sampled_from(["confidence", "leftmost"]),
        filler_rules=flags,
    ),
    "sequential": st.builds(Sequential, steps=steps, filler_rules=flags),
    "random": st.builds(RandomOrder, steps=steps, filler_rules=flags),
    "streaming_window": st.builds(
        StreamingWindow,
        bound=st.integers(1, 16).map(lambda n: n / 8),
        position_penalty=eighths,
        filler_rules=flags,
    ),
    "linear_speculation": st.builds(LinearSpeculation, threshold=eighths, filler_rules=flags),
    "entropy_bounded": st.builds(EntropyBounded, bound=st.integers(1, 24).map(lambda n: n / 8), filler_rules=flags),
}
# Random order has no closed form; it has tests of its own.
WITH_ORACLE = sorted(BY_NAME.keys() - {"random", "origin"})
decodings = st.one_of(*BY_NAME.values())


@st.composite
def rows_of(draw: st.DrawFn, kinds: st.SearchStrategy[Decoding] = decodings) -> Row:
    length = draw(st.integers(1, 12))

    def each(values: st.SearchStrategy) -> tuple:
        return tuple(draw(st.lists(values, min_size=length, max_size=length)))

    return Row(
        length=length,
        masked=each(st.booleans()),
        confidence=each(eighths),
        entropy=each(eighths),
        tokens=each(st.integers(0, FILLER)),
        step=draw(st.integers(0, 14)),
        seed=draw(st.integers(0, 2**63 - 1)),
        decoding=draw(kinds),
        margin=each(eighths),
        decided=draw(st.integers(0, 6)),
    )


def run(rows: list[Row], last: list[bool] | None = None) -> list[list[bool]]:
    """Return the accepted positions of each row, decided as one batch."""
    width = max(row.length for row in rows)

    def padded(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([[*getattr(row, name), *[0] * (width - row.length)] for row in rows], dtype=dtype)

    stats = TokenStats(
        token=padded("tokens", torch.int64),
        confidence=padded("confidence", torch.float32),
        entropy=padded("entropy", torch.float32),
        margin=padded("margin", torch.float32),
    )
    view = BlockView(
        masked=padded("masked", torch.bool),
        step=torch.tensor([row.step for row in rows]),
        length=torch.tensor([row.length for row in rows]),
        seed=torch.tensor([row.seed for row in rows]),
        start=torch.tensor([32] * len(rows)),
        editable=torch.zeros(len(rows), width, dtype=torch.bool),
        current=torch.zeros(len(rows), width, dtype=torch.int64),
        undecided_at_first=torch.tensor([row.at_first for row in rows]),
    )
    before = [getattr(view, field.name).clone() for field in fields(view)]
    accepted = decide(
        stats,
        view,
        [row.decoding for row in rows],
        None if last is None else torch.tensor(last),
        torch.tensor([FILLER]),
    )
    assert all(torch.equal(getattr(view, field.name), old) for field, old in zip(fields(view), before, strict=True))
    assert not accepted[:, :width].logical_and(~view.masked).any()
    return [taken[: row.length] for taken, row in zip(accepted.tolist(), rows, strict=True)]


def split_evenly(length: int, count: int | None, step: int) -> int:
    """The quota of a step: the schedule written out, where the code has a formula."""
    count = count or length
    schedule = [length // count] * count
    for i in range(length % count):
        schedule[i] += 1
    return max(1, schedule[step] if step < count else length // count)


def shares(steps: int, eps: float) -> list[torch.Tensor]:
    """Dream's schedule as its loop writes it."""
    time = torch.linspace(1, eps, steps + 1)
    return [1 - time[i + 1] / time[i] for i in range(steps)]


def by_time(found: list[Position], row: Row) -> int:
    """How many positions Dream's loop takes in this step."""
    assert isinstance(row.decoding, Timed)
    steps = row.decoding.steps or max(1, row.at_first)
    if row.step >= steps - 1:
        return len(found)
    return int(torch.tensor(float(len(found))) * shares(steps, row.decoding.eps)[row.step])


def factor_count(falling: list[float], factor: float) -> int:
    """Fast-dLLM's loop: where the first confidence falls below its limit."""
    at = 0
    for at, confidence in enumerate(falling):
        if confidence < (-1.0 if at == 0 else 1 - factor / (at + 2)):
            break
    return at + 1 if at in (0, len(falling) - 1) else at


def oracle(row: Row) -> set[int]:
    """The rule of each strategy, read from its publication, without filler."""
    found = row.open
    by_confidence = sorted(found, key=lambda p: (-p.confidence, p.index))
    match row.decoding:
        case Threshold(threshold=limit):
            chosen = [p for p in found if p.confidence >= limit] + by_confidence[:1]
        case LowConfidenceStatic(steps=count):
            chosen = by_confidence[: split_evenly(row.length, count, row.step)]
        case LowConfidenceDynamic(steps=count, threshold=limit, fallback=fallback):
            k = split_evenly(row.length, count, row.step)
            sure = [p for p in found if p.confidence > limit]
            fill = found if fallback == "leftmost" else by_confidence
            chosen = sure if len(sure) >= k else fill[:k]
        case Factor(factor=factor):
            chosen = by_confidence[: factor_count([p.confidence for p in by_confidence], factor)]
        case ThresholdQuota(threshold=limit, steps=count):
            count = count or max(1, row.at_first)
            schedule = [row.at_first // count] * (count - 1)
            schedule.append(row.at_first - sum(schedule))
            due = sum(schedule[: row.step + 1]) - (row.at_first - len(found))
            chosen = [p for p in by_confidence[: max(0, due)] if p.confidence >= limit] + by_confidence[:1]
        case AdaptiveParallel(max_parallel=most, threshold=limit, steps=count):
            k = len(found)
            if count is not None and count - row.step > 1:
                k //= count - row.step
            chosen = [p for p in by_confidence[: min(most, k)] if p.confidence >= limit] + by_confidence[:1]
        case SubBlock(threshold=limit):
            chosen = [p for p in found if p.confidence > limit] + by_confidence[:1]
        case MaskgitPlus():
            chosen = by_confidence[: by_time(found, row)]
        case TopkMargin():
            chosen = sorted(found, key=lambda p: (-p.margin, p.index))[: by_time(found, row)]
        case Entropy():
            chosen = sorted(found, key=lambda p: (p.entropy, p.index))[: by_time(found, row)]
        case Sequential(steps=count):
            k = split_evenly(row.length, count, row.step)
            chosen = [p for p in found if p.index < found[0].index + k]
        case StreamingWindow(bound=bound, position_penalty=penalty):
            scores = {p: p.entropy + penalty * (p.index - found[0].index) for p in found}
            chosen = [p for p in found if scores[p] < bound]
            chosen += sorted(found, key=lambda p: (scores[p], p.index))[:1]
        case LinearSpeculation(threshold=limit):
            chosen = [p for p in found if p.confidence >= (limit or 0)] + by_confidence[:1]
        case EntropyBounded(bound=bound):
            rising = sorted(found, key=lambda p: (p.entropy, p.index))
            sums = [sum(p.entropy for p in rising[: i + 1]) for i in range(len(rising))]
            chosen = rising[: max(1, sum(total < bound for total in sums))]
        case _:
            raise NotImplementedError("no closed form")
    return {p.index for p in chosen}


@pytest.mark.parametrize("name", WITH_ORACLE)
@unhurried
@given(data=st.data())
def test_a_strategy_accepts_what_its_rule_says(name: str, data: st.DataObject) -> None:
    row = data.draw(rows_of(BY_NAME[name]))
    row = replace(row, decoding=row.decoding.model_copy(update={"filler_rules": False}))

    (accepted,) = run([row])

    assert {i for i, taken in enumerate(accepted) if taken} == oracle(row)


@unhurried
@given(st.lists(rows_of(), min_size=1, max_size=6))
def test_accepted_is_a_subset_of_masked_and_never_empty_beside_masks(rows: list[Row]) -> None:
    for row, accepted in zip(rows, run(rows), strict=True):
        assert all(row.masked[i] for i, taken in enumerate(accepted) if taken)
        assert any(accepted) == any(row.masked) or isinstance(row.decoding, Timed)


@unhurried
@given(st.lists(rows_of(), min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_a_row_is_decided_alike_alone_in_a_batch_and_in_any_order(rows: list[Row], random) -> None:
    alone = [run([row])[0] for row in rows]
    order = list(range(len(rows)))
    random.shuffle(order)

    assert run(rows) == alone
    assert run([rows[i] for i in order]) == [alone[i] for i in order]


@unhurried
@given(rows_of())
def test_a_block_is_decided_within_its_length_in_steps(row: Row) -> None:
    masked, taken_steps = list(row.masked), 0
    most = row.length
    if isinstance(row.decoding, Timed):
        # Filler goes one step after the schedule's last.
        most = (row.decoding.steps or row.at_first) + 1
    while any(masked):
        (accepted,) = run([replace(row, masked=tuple(masked), step=taken_steps, opened=row.at_first)])
        masked = [m and not a for m, a in zip(masked, accepted, strict=True)]
        taken_steps += 1

    assert taken_steps <= most


@unhurried
@given(rows_of(), st.integers(1, 12))
def test_a_static_schedule_ends_with_its_steps(row: Row, steps: int) -> None:
    row = replace(row, decoding=LowConfidenceStatic(steps=steps, filler_rules=False))
    masked, count = [True] * row.length, 0
    while any(masked):
        (accepted,) = run([replace(row, masked=tuple(masked), step=count)])
        masked = [m and not a for m, a in zip(masked, accepted, strict=True)]
        count += 1

    assert count == min(steps, row.length)


@unhurried
@given(rows_of(), st.integers(1, 14), st.integers(1, 14))
def test_adaptive_parallelism_ends_with_its_steps_where_its_limit_lets_it(row: Row, steps: int, most: int) -> None:
    decoding = AdaptiveParallel(steps=steps, max_parallel=most, threshold=0, filler_rules=False)
    row = replace(row, decoding=decoding)
    masked, sizes = [True] * row.length, list[int]()
    while any(masked):
        (accepted,) = run([replace(row, masked=tuple(masked), step=len(sizes))])
        masked = [m and not a for m, a in zip(masked, accepted, strict=True)]
        sizes.append(sum(accepted))

    assert max(sizes) <= most
    assert len(sizes) == max(min(steps, row.length), -(-row.length // most))


@unhurried
@given(st.lists(rows_of(), min_size=1, max_size=4))
def test_the_last_forward_of_a_request_accepts_everything(rows: list[Row]) -> None:
    assert run(rows, last=[True] * len(rows)) == [list(row.masked) for row in rows]


@pytest.mark.parametrize("name", WITH_ORACLE)
@unhurried
@given(data=st.data())
def test_filler_takes_no_turn_before_text(name: str, data: st.DataObject) -> None:
    row = data.draw(rows_of(BY_NAME[name]))

    (accepted,) = run([row])

    text = [p for p in row.open if p.token != FILLER]
    ruled = row.decoding.filler_rules and not isinstance(row.decoding, Sequential)
    hidden = {p.index for p in row.open if p.token == FILLER} if ruled and text else set()
    left = tuple(m and i not in hidden for i, m in enumerate(row.masked))
    seen = replace(row, masked=left, opened=row.at_first - len(hidden))
    assert {i for i, taken in enumerate(accepted) if taken} == oracle(seen)


def test_a_strategy_that_accepts_nothing_is_helped_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.decoding.threshold.accept", lambda stats, view, limit: torch.zeros_like(view.masked))
    row = Row(3, (False, True, True), (1.0, 0.25, 0.5), (0.0,) * 3, (5,) * 3, 0, 0, Threshold())

    assert run([row]) == [[False, False, True]]


def test_confident_filler_waits_for_unsure_text() -> None:
    row = Row(3, (True,) * 3, (0.125, 1.0, 1.0), (0.0,) * 3, (5, FILLER, FILLER), 0, 0, Threshold(threshold=0.5))

    assert run([row]) == [[True, False, False]]


def test_nothing_but_filler_is_decided_at_once() -> None:
    row = Row(3, (True,) * 3, (0.75, 1.0, 1.0), (0.0,) * 3, (FILLER,) * 3, 0, 0, Threshold(threshold=0.5))

    assert run([row]) == [[True, True, True]]


@unhurried
@given(st.integers(0, 2**62), st.integers(0, 11))
def test_random_order_is_a_function_of_seed_and_step(seed: int, step: int) -> None:
    row = Row(12, (True,) * 12, (0.5,) * 12, (0.0,) * 12, (0,) * 12, step, seed, RandomOrder(steps=4))

    assert run([row]) == run([row])
    assert sum(run([row])[0]) == 3


def test_random_order_prefers_no_position() -> None:
    rows = [Row(8, (True,) * 8, (0.5,) * 8, (0.0,) * 8, (0,) * 8, 0, seed, RandomOrder()) for seed in range(4000)]

    counts = torch.tensor(run(rows)).sum(0)

    # 4000 draws of 1 in 8: 500 each, five standard deviations of 21.
    assert (counts - 500).abs().max() < 105


@pytest.mark.parametrize(
    ("decoding", "needed"), [(EntropyBounded(), True), (Threshold(), False)], ids=["entropy", "threshold"]
)
def test_entropy_is_computed_for_who_reads_it(decoding: Decoding, needed: bool) -> None:
    assert needs_entropy([Threshold(), decoding]) is needed


def test_margin_is_computed_for_who_reads_it() -> None:
    assert needs_margin([Threshold(), TopkMargin()])
    assert not needs_margin([Threshold(), Entropy()])


@pytest.mark.parametrize("eps", [1e-3, 0.01, 0.25])
@pytest.mark.parametrize("steps", [1, 2, 3, 7, 16, 33, 500])
def test_origin_takes_each_position_with_the_probability_of_the_step(steps: int, eps: float) -> None:
    step = steps // 2
    rows = [
        Row(64, (True,) * 64, (0.5,) * 64, (0.0,) * 64, (0,) * 64, step, seed, Origin(steps=steps, eps=eps))
        for seed in range(200)
    ]

    taken = torch.tensor(run(rows)).float().mean().item()

    expected = 1.0 if step == steps - 1 else shares(steps, eps)[step].item()
    # 12800 draws: five standard deviations of at most 0.0045.
    assert abs(taken - expected) < 0.0225
    assert taken == 1.0 or expected < 1.0


@unhurried
@given(rows_of(), eighths, eighths, st.integers(1, 5), st.data())
def test_joint_threshold_fills_masks_and_revises_what_it_may(
    row: Row, limit: float, editing: float, least: int, data: st.DataObject
) -> None:
    current = data.draw(st.lists(st.integers(0, 3), min_size=row.length, max_size=row.length))
    allowed = data.draw(st.lists(flags, min_size=row.length, max_size=row.length))
    editable = [may and not masked for may, masked in zip(allowed, row.masked, strict=True)]
    rule = JointThreshold(threshold=limit, editing_threshold=editing, num_to_transfer=least, filler_rules=False)
    stats = TokenStats(
        token=torch.tensor([row.tokens]),
        confidence=torch.tensor([row.confidence]),
        entropy=torch.zeros(1, row.length),
        margin=torch.zeros(1, row.length),
    )
    one = torch.zeros(1, dtype=torch.int64)
    view = BlockView(
        masked=torch.tensor([row.masked]),
        step=one,
        length=one + row.length,
        seed=one,
        start=one,
        editable=torch.tensor([editable]),
        current=torch.tensor([current]),
        undecided_at_first=one,
    )

    (accepted,) = decide(stats, view, [rule]).tolist()

    found = sorted(row.open, key=lambda p: (-p.confidence, p.index))
    sure = [p for p in found if p.confidence > limit]
    filled = {p.index for p in (sure if len(sure) >= least else found[:least])}
    revised = {
        i for i in range(row.length) if editable[i] and row.tokens[i] != current[i] and row.confidence[i] > editing
    }
    assert {i for i, taken in enumerate(accepted) if taken} == filled | revised
