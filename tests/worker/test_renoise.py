"""The rule for canvases of noise, against its sentence written out; the engine's part of it; windows of sight."""

import math
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.attention import attention, plan_attention
from shared.commands import Generate, Limits, Sampling
from shared.decoding import Renoise, Threshold
from shared.events import Delta, Event, Failed, Finished
from tests.worker.paper_model import paper_spec
from tests.worker.texts import NoText
from worker.decoding.renoise import HashedNoise, is_settled, keep, temperature
from worker.engine.engine import Engine
from worker.engine.plan import Plan, near_view
from worker.engine.ports import Arrival, Decision, Inbox
from worker.engine.scheduler import BatchLimits, CacheShape
from worker.models.spec import NO_MASK, Attention, Commit, ModelSpec

ENTROPIES = st.lists(st.floats(0, 8, width=32), min_size=1, max_size=24)
NOISE = HashedNoise()


@given(ENTROPIES, st.floats(0, 20, width=32))
def test_kept_are_those_with_at_most_the_bound_of_entropy_before_them(entropies: list[float], bound: float) -> None:
    kept = keep(torch.tensor(entropies), bound).tolist()

    order = sorted(range(len(entropies)), key=lambda i: (entropies[i], i))
    before, expected = 0.0, set[int]()
    close = False
    for i in order:
        # What float32 sums may round either way proves nothing.
        close = close or math.isclose(before, bound, rel_tol=1e-4, abs_tol=1e-4)
        expected |= {i} if before <= bound else set()
        before += entropies[i]
    assert close or {i for i, taken in enumerate(kept) if taken} == expected


@given(ENTROPIES)
def test_the_surest_position_is_always_kept(entropies: list[float]) -> None:
    kept = keep(torch.tensor(entropies), 0.0)

    assert kept[torch.tensor(entropies).argmin()]


@given(ENTROPIES, st.floats(0, 20, width=32), st.randoms(use_true_random=False))
def test_what_is_kept_does_not_depend_on_the_order_of_positions(
    entropies: list[float], bound: float, random: Random
) -> None:
    order = list(range(len(entropies)))
    random.shuffle(order)

    straight, shuffled = keep(torch.tensor(entropies), bound), keep(torch.tensor(entropies)[order], bound)

    # Equal entropies may change places.
    values = torch.tensor(entropies)
    assert torch.equal(values[straight].sort().values, values[order][shuffled].sort().values)


@given(st.integers(1, 64), st.floats(0.1, 1), st.floats(0, 1))
def test_the_temperature_falls_from_the_highest_and_stays_above_the_lowest(steps: int, low: float, more: float) -> None:
    decoding = Renoise(max_denoising_steps=steps, t_min=low, t_max=low + more)
    warmth = [temperature(decoding, step) for step in range(steps)]

    assert warmth[0] == pytest.approx(low + more)
    assert warmth == sorted(warmth, reverse=True)
    assert temperature(decoding, steps) == pytest.approx(low)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=8), st.integers(0, 3), st.booleans())
def test_a_canvas_is_settled_when_its_best_tokens_stood_still_and_are_sure(
    history: list[int], asked: int, sure: bool
) -> None:
    decoding = Renoise(stability_threshold=asked, confidence_threshold=0.5)
    canvases = [torch.tensor([token, 7]) for token in history]
    entropy = torch.tensor([0.2, 0.2] if sure else [0.2, 0.9])

    settled = is_settled(decoding, canvases[-1], canvases[:-1], entropy)

    still = len(history) > asked and len(set(history[len(history) - asked - 1 :])) == 1
    assert settled == (still and sure)


@given(st.integers(0, 2**63 - 1), st.integers(0, 4096), st.integers(0, 48))
def test_noise_is_the_same_for_the_same_seed_position_and_step(seed: int, first: int, step: int) -> None:
    positions = torch.arange(first, first + 8)

    ids = NOISE.ids(seed, positions, step, 61)

    assert torch.equal(ids[3:5], NOISE.ids(seed, positions[3:5], step, 61))
    assert ((ids >= 0) & (ids < 61)).all()


def test_noise_is_uniform_over_the_vocabulary_and_differs_from_step_to_step() -> None:
    drawn = torch.stack([NOISE.ids(5, torch.arange(4000), step, 16) for step in range(-1, 3)])

    counts = torch.stack([row.bincount(minlength=16) for row in drawn])

    # Binomial with a mean of 250 and a deviation of 15: five of them are never left.
    assert ((counts - 250).abs() < 78).all()
    assert all((drawn[i] == drawn[j]).float().mean() < 0.1 for i in range(4) for j in range(i))


def test_samples_follow_the_tempered_distribution_and_leave_barred_ids_out() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 9.0]).repeat(8000, 1)
    barred = torch.tensor([False, False, False, True])
    warmth = torch.full((8000,), 2.0)

    tokens = NOISE.sample(logits, barred, warmth, 3, torch.arange(8000), 0)

    shares = tokens.bincount(minlength=4) / 8000
    expected = torch.tensor([0.0, 0.5, 1.0]).softmax(0)
    assert shares[3] == 0
    assert (shares[:3] - expected).abs().max() < 0.03


# --- in the engine


SPEC = paper_spec()


def canvas_spec() -> ModelSpec:
    return replace(
        SPEC,
        attention=Attention.BLOCK_CAUSAL,
        context=Attention.CAUSAL,
        commit=Commit.ENCODED,
        mask_token_id=NO_MASK,
        block_length=4,
        fixed_block_length=True,
        blocks_after_prompt=True,
        sliding_window=3,
        decoding=Renoise(),
    )


class Scripted:
    """Decides each canvas in its third step; before that it asks for [step, step, ...] as the next input."""

    def __init__(self) -> None:
        self.plans = list[Plan]()

    def __call__(self, plan: Plan) -> Decision:
        self.plans.append(plan)
        decision = Decision.open(len(plan.rows))
        for i, row in enumerate(plan.rows):
            if row.canvas is not None:
                over = row.canvas.step == 2 or row.canvas.last
                decision.accepted[i], decision.confidence[i] = [over] * 4, [0.5] * 4
                decision.tokens[i] = [40 + row.canvas.step] * 4
        return decision


def play(request: Generate, token_budget: int = 64) -> tuple[Scripted, list[Event]]:
    forward, events = Scripted(), list[Event]()
    limits = BatchLimits(4, token_budget)
    engine = Engine(canvas_spec(), CacheShape(4, 32), limits, forward, lambda request, resume: NoText())
    arrivals = [Arrival(request, epoch=1)]
    while arrivals or not engine.idle:
        events += engine.step(Inbox(arrivals=arrivals)).events
        arrivals = []
    return forward, events


def ask(prompt: int = 6, max_tokens: int = 8, **limits: int) -> Generate:
    return Generate(
        id="r",
        model="m",
        prompt=tuple(range(prompt)),
        sampling=Sampling(seed=1),
        limits=Limits(max_tokens=max_tokens, **limits),  # pyright: ignore[reportArgumentType]
    )


def test_the_next_forward_reads_what_the_one_before_asked_for_and_nothing_is_published_before_the_last() -> None:
    forward, events = play(ask())

    canvases = [row.token_ids for plan in forward.plans for row in plan.rows if row.canvas is not None]
    assert canvases == [(NO_MASK,) * 4, (40,) * 4, (41,) * 4] * 2
    deltas = [event for event in events if isinstance(event, Delta)]
    assert [delta.token_ids for delta in deltas] == [[42] * 4, [42] * 4]
    assert [delta.nfe for delta in deltas] == [3, 6]


def test_text_is_written_causally_before_the_canvas_that_sees_all_of_itself() -> None:
    forward, _ = play(ask())

    first, second = forward.plans[0].rows[0], forward.plans[1].rows[0]
    assert first.canvas is None
    assert (first.start, first.visible_end) == (0, (1, 2, 3, 4, 5, 6))
    assert (second.start, second.visible_end) == (6, (10,) * 4)
    # The window holds 3: a text's token and the two before it; a canvas and the two before it.
    assert first.near == ((0, 1), (0, 2), (0, 3), (1, 4), (2, 5), (3, 6))
    assert second.near == ((4, 10),) * 4


def test_every_request_under_way_is_named_in_the_plan() -> None:
    forward, _ = play(ask())

    assert {plan.running for plan in forward.plans} == {frozenset({"r"})}


@pytest.mark.parametrize("most", [1, 2, 4])
def test_a_canvas_is_decided_at_once_where_the_budget_of_forwards_ends(most: int) -> None:
    _, events = play(ask(max_nfe=most))

    tokens = [token for event in events if isinstance(event, Delta) for token in event.token_ids]
    (end,) = [event for event in events if isinstance(event, Finished)]
    assert end.usage.nfe == most
    assert NO_MASK not in tokens


def test_a_canvas_that_the_limit_cuts_is_published_up_to_it() -> None:
    _, events = play(ask(max_tokens=6))

    assert [len(event.token_ids) for event in events if isinstance(event, Delta)] == [4, 2]


def test_a_strategy_for_masks_is_refused_where_there_are_none() -> None:
    request = ask().model_copy(update={"decoding": Threshold()})

    _, events = play(request)

    (failed,) = [event for event in events if isinstance(event, Failed)]
    assert (failed.code, failed.param) == ("unsupported", "decoding")


# --- what layers with a window see


@given(st.integers(1, 9), st.integers(1, 24), st.integers(0, 23))
def test_windows_are_what_their_sentences_say(window: int, length: int, place: int) -> None:
    position = place % length
    causal = near_view(Attention.CAUSAL, position, window, 0, length)
    both = near_view(Attention.BIDIRECTIONAL, position, window, 0, length)
    canvas = near_view(Attention.BLOCK_CAUSAL, position, window, position, length)

    assert [*range(*causal)] == [j for j in range(length) if 0 <= position - j < window]
    assert [*range(*both)] == [j for j in range(length) if abs(position - j) <= window // 2]
    assert [*range(*canvas)] == [j for j in range(length) if position - j < window]


@given(st.data())
def test_attention_within_windows_equals_hiding_everything_else(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    pages_of, views, taken = list[list[int]](), list[list[tuple[int, int]]](), 0
    starts = [data.draw(st.integers(0, 7)) for _ in lengths]
    for start, length in zip(starts, lengths, strict=True):
        end = start + length
        count = -(-end // 4)
        pages_of.append(list(reversed(range(taken, taken + count))))
        taken += count
        views.append(
            [(data.draw(st.integers(0, start + i)), data.draw(st.integers(start + i + 1, end))) for i in range(length)]
        )
    tokens = sum(lengths)
    q = torch.randn(tokens, 4, 8, generator=generator)
    k, v = torch.randn(2, taken, 4, 2, 8, generator=generator)
    plan = plan_attention(
        starts,
        [[end for _, end in view] for view in views],
        pages_of,
        4,
        device=torch.device("cpu"),
        dtype=torch.float32,
        visible_start=[[start for start, _ in view] for view in views],
    )

    mixed = attention(q, k, v, plan, 0.5)

    row = 0
    for view, pages in zip(views, pages_of, strict=True):
        keys, values = k[pages].flatten(0, 1), v[pages].flatten(0, 1)
        for start, end in view:
            for head in range(4):
                weights = (0.5 * keys[start:end, head // 2] @ q[row, head]).softmax(0)
                assert torch.allclose(mixed[row, head], weights @ values[start:end, head // 2], atol=1e-5)
            row += 1
