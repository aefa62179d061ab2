"""Several blocks at once: the rule against its sentence, and the engine against an oracle without cache or batch."""

from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.commands import Generate, Limits, Preview, Sampling
from shared.decoding import MultiBlock, Threshold
from shared.events import Delta, Failed, Finished, Snapshot, is_terminal
from tests.goldens.folder import find_folders
from tests.worker.paper_model import (
    FILLER,
    MASK,
    STOP,
    Answer,
    _first,
    _proposal,
    _second,
    accept_blocks,
)
from tests.worker.test_engine import Bench, ask, check
from tests.worker.texts import NoText
from worker.decoding import decide
from worker.decoding.types import BlockView, TokenStats
from worker.engine.engine import Engine
from worker.engine.plan import Canvas, Plan, Row, visible_ends
from worker.engine.ports import Arrival, Inbox, Resume
from worker.engine.scheduler import BatchLimits, CacheShape
from worker.models import LoadedModel
from worker.runner import Runner

unhurried = settings(max_examples=150, deadline=None)
eighths = st.integers(0, 8).map(lambda n: n / 8)
rules = st.builds(
    MultiBlock,
    tau_add=st.integers(1, 8).map(lambda n: n / 8),
    tau_semi=st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0]),
    tau_acc=st.sampled_from([0.5, 0.7, 0.9]),
    max_blocks=st.integers(1, 5),
)


# --- the rule


@st.composite
def canvases(draw: st.DrawFn) -> tuple[int, list[bool], list[tuple[int, float]], MultiBlock]:
    block = draw(st.integers(1, 6))
    width = block * draw(st.integers(1, 4))
    masked = draw(st.lists(st.booleans(), min_size=width, max_size=width))
    proposals = draw(st.lists(st.tuples(st.integers(0, 3), eighths), min_size=width, max_size=width))
    rule = draw(rules).model_copy(update={"tau_acc": draw(eighths), "filler_rules": draw(st.booleans())})
    return block, masked, proposals, rule


@given(st.lists(canvases(), min_size=1, max_size=5))
@unhurried
def test_a_batch_of_windows_is_decided_as_the_rule_says_for_each(
    rows: list[tuple[int, list[bool], list[tuple[int, float]], MultiBlock]],
) -> None:
    width = max(len(masked) for _, masked, _, _ in rows)

    def padded(values: list, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([[*row, *[0] * (width - len(row))] for row in values], dtype=dtype)

    count, zeros = len(rows), torch.zeros(len(rows), width)
    confidence = padded([[c for _, c in proposals] for _, _, proposals, _ in rows], torch.float32)
    stats = TokenStats(padded([[t for t, _ in p] for _, _, p, _ in rows], torch.int64), confidence, zeros, zeros)
    number = torch.zeros(count, dtype=torch.int64)
    view = BlockView(
        masked=padded([masked for _, masked, _, _ in rows], torch.bool),
        step=number,
        length=torch.tensor([block for block, _, _, _ in rows]),
        seed=number,
        start=number,
        editable=zeros.bool(),
        current=zeros.long(),
        undecided_at_first=number,
    )

    accepted = decide(stats, view, [rule for _, _, _, rule in rows], None, torch.tensor([3])).tolist()

    for taken, (block, masked, proposals, rule) in zip(accepted, rows, strict=True):
        assert taken[: len(masked)] == accept_blocks(masked, proposals, rule, block, frozenset((3,)))
        assert any(taken) == any(masked), "a forward must decide something"
        assert not any(taken[len(masked) :])


# --- the engine


def decode_by_the_rule(request: Generate, block: int) -> Answer:
    """Decode by the definition: both layers of the paper model for the whole text before each step."""
    rule, prompt, limits = request.decoding, list(request.prompt), request.limits
    assert isinstance(rule, MultiBlock)
    rule = rule.model_copy(update={"filler_rules": not limits.ignore_eos})
    stops = set() if limits.ignore_eos else {STOP}
    limit, nfe = len(prompt) + limits.max_tokens, 0
    front = len(prompt) // block * block
    text: list[int | None] = [*prompt, *[None] * (front + block - len(prompt))]
    closed = limit

    def undecided(start: int) -> list[int]:
        return [p for p in range(start, start + block) if text[p] is None and p < min(limit, closed)]

    while True:
        end = len(text)
        decided = block - len(undecided(end - block))
        room = (end - front) // block < rule.max_blocks and end < limit and closed == limit
        if room and decided >= rule.tau_add * block and (nfe == 0 or nfe < (limits.max_nfe or nfe + 1)):
            text += [None] * block
            end += block
        first = [_first(MASK if token is None else token, p) for p, token in enumerate(text)]
        ends = [(p // block + 1) * block for p in range(end)]
        second = [_second(first[: ends[p]], p) for p in range(end)]
        proposals = [_proposal(second[: ends[p]], p, request.sampling.seed) for p in range(front, end)]
        masked = tuple(text[p] is None and p < min(limit, closed) for p in range(front, end))
        nfe += 1
        last = limits.max_nfe is not None and nfe >= limits.max_nfe
        for p, take in zip(range(front, end), accept_blocks(masked, proposals, rule, block), strict=True):
            if take or (last and masked[p - front]):
                text[p] = proposals[p - front][0]
        ended = [p for p in range(len(prompt), min(end, limit, closed + 1)) if text[p] in stops]
        if ended:
            closed = ended[0]
            text[closed + 1 :] = [FILLER] * (end - closed - 1)
        while front < end and not undecided(front):
            front += block
            if closed < min(front, limit):
                return Answer(_numbers(text[len(prompt) : closed]), "stop_token", nfe)
            if limit <= front:
                return Answer(_numbers(text[len(prompt) : limit]), "max_tokens", nfe)
        if last:
            return Answer(_numbers(text[len(prompt) : front]), "max_nfe", nfe)
        if front == end:
            text += [None] * block


def _numbers(tokens: list[int | None]) -> list[int]:
    assert None not in tokens
    return [token for token in tokens if token is not None]


requests = st.builds(
    ask,
    st.lists(st.integers(0, 59), min_size=1, max_size=30),
    st.integers(1, 40),
    seed=st.integers(0, 50),
    block_length=st.sampled_from([None, 1, 2, 3, 4]),
    decoding=rules,
    ignore_eos=st.booleans(),
    max_nfe=st.one_of(st.none(), st.integers(1, 12)),
)


def expected(bench: Bench, request: Generate) -> Answer | None:
    if isinstance(request.decoding, MultiBlock):
        return decode_by_the_rule(request, request.block_length or bench.spec.block_length)
    return None


@given(requests)
@unhurried
def test_a_request_alone_equals_the_oracle_in_tokens_end_and_forwards(request: Generate) -> None:
    bench = Bench()
    bench.run([request])

    answer = expected(bench, request)
    assert answer is not None
    check(bench, request, answer)
    end = bench.end(request)
    assert isinstance(end, Finished) and end.usage.nfe == answer.nfe


plain = st.builds(
    ask, st.lists(st.integers(0, 59), min_size=1, max_size=20), st.integers(1, 30), seed=st.integers(0, 9)
)


@given(st.lists(st.tuples(requests | plain, st.integers(0, 12)), min_size=1, max_size=8), st.integers(20, 40))
@settings(max_examples=80, deadline=None)
def test_late_arrivals_few_pages_and_other_strategies_change_no_token(
    arrivals: list[tuple[Generate, int]], pages: int
) -> None:
    bench = Bench(pages=max(pages, 24), rows=4, budget=32)
    for moment in range(13):
        bench.step(Inbox(arrivals=[Arrival(request, 1) for request, at in arrivals if at == moment]))
    bench.run()
    for request, _ in arrivals:
        check(bench, request, expected(bench, request))


def test_requests_that_lose_their_pages_in_mid_window_go_on_where_they_were() -> None:
    bench = Bench(pages=16, rows=6, budget=96)
    wanted = [ask([n, n + 1, n + 2], 40, seed=n, ignore_eos=True, decoding=MultiBlock(tau_acc=0.7)) for n in range(6)]
    bench.run(wanted)
    assert bench.engine.load().preemptions > 0
    for request in wanted:
        check(bench, request, expected(bench, request))


@given(requests, st.integers(1, 30))
@settings(max_examples=60, deadline=None)
def test_another_worker_begins_a_new_window_behind_what_is_committed(request: Generate, steps: int) -> None:
    limits = request.limits.model_copy(update={"max_nfe": None})
    request = request.model_copy(update={"limits": limits})
    first = Bench()
    first.step(Inbox(arrivals=[Arrival(request, 1)]))
    for _ in range(steps):
        first.step()
    log = first.events.get(request.id, [])
    if log and is_terminal(log[-1]):
        return
    seen = first.deltas(request) if log else []
    known = tuple(token for delta in seen for token in delta.token_ids)
    text = sum(len(delta.text) for delta in seen)
    last = seen[-1] if seen else None
    resume = Resume(known, text, last.seq, last.block + 1, last.nfe) if last else Resume()
    second = Bench()
    second.step(Inbox(arrivals=[Arrival(request, 2, resume)]))
    second.run()

    left = limits.model_copy(update={"max_tokens": limits.max_tokens - len(known)})
    rest = request.model_copy(update={"prompt": (*request.prompt, *known), "limits": left})
    answer = expected(second, rest)
    end = second.end(request)
    assert answer is not None and isinstance(end, Finished)
    assert second.tokens(request) == answer.tokens
    assert end.detail == answer.detail
    assert end.usage.completion_tokens == len(known) + len(answer.tokens)


def test_a_window_holds_several_blocks_and_commits_them_one_by_one() -> None:
    bench = Bench()
    request = ask([1], 39, ignore_eos=True, decoding=MultiBlock(tau_add=0.25, tau_semi=0.5, tau_acc=0.5))
    bench.run([request])

    canvases = [plan.rows[0].canvas for plan in bench.forward.plans]
    assert max(len(canvas.masked) for canvas in canvases if canvas is not None) == 16
    assert [len(delta.token_ids) for delta in bench.deltas(request)] == [3, *[4] * 9]
    assert [delta.block for delta in bench.deltas(request)] == list(range(10))
    alone = ask([1], 39, ignore_eos=True, decoding=Threshold(threshold=0.5))
    bench.run([alone])
    ends = bench.end(request), bench.end(alone)
    assert isinstance(ends[0], Finished) and isinstance(ends[1], Finished)
    assert ends[0].usage.nfe < ends[1].usage.nfe


def test_max_tokens_is_exact_for_every_value_around_a_block() -> None:
    for most in range(1, 14):
        bench = Bench()
        request = ask([5, 6], most, ignore_eos=True, decoding=MultiBlock(tau_acc=0.5))
        bench.run([request])
        assert len(bench.tokens(request)) == most


def test_a_deadline_fills_the_whole_window_and_ends() -> None:
    bench = Bench()
    request = ask([1], 60, ignore_eos=True, decoding=MultiBlock(tau_add=0.25, tau_acc=0.9))
    bench.step(Inbox(arrivals=[Arrival(request, 1)]))
    for _ in range(3):
        bench.step()
    bench.step(Inbox(hurries=[request.id]))
    bench.run()

    end = bench.end(request)
    assert isinstance(end, Finished) and end.detail == "deadline"
    tokens = bench.tokens(request)
    assert len(tokens) % 4 == 3 and MASK not in tokens


def test_a_snapshot_shows_the_whole_window_behind_what_is_published() -> None:
    bench = Bench()
    request = ask([1], 39, ignore_eos=True, decoding=MultiBlock(tau_add=0.25, tau_acc=0.7), preview=Preview())
    bench.run([request])

    published, widest = 0, 0
    for event in bench.events[request.id]:
        if isinstance(event, Delta):
            published += len(event.token_ids)
        elif isinstance(event, Snapshot):
            assert event.offset == published
            widest = max(widest, len(event.token_ids))
    assert widest > 4


def test_a_window_that_fits_no_step_is_refused() -> None:
    bench = Bench(budget=32)
    request = ask([1], 20, decoding=MultiBlock(max_blocks=8))
    bench.run([request])

    end = bench.end(request)
    assert isinstance(end, Failed) and end.param == "decoding"


# --- real layers


# Fused and seeded commits, logits read a row before, blocks behind the prompt, a causal context.
FAMILIES = ["sdar", "fastdllm_v2", "llada2", "nemotron_labs_diffusion"]


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> LoadedModel:
    return next(folder for folder in find_folders() if folder.name == request.param).model()


def decode_real(model: LoadedModel, request: Generate) -> tuple[list[int], int]:
    """The rule over real layers without cache: each step runs the whole text. No stops."""
    rule, block, spec = request.decoding, request.block_length, model.spec
    assert isinstance(rule, MultiBlock) and block is not None
    rule = rule.model_copy(update={"filler_rules": False})
    tokens, limit, nfe = list(request.prompt), len(request.prompt) + request.limits.max_tokens, 0
    origin = len(tokens) if spec.blocks_after_prompt else 0
    front = origin + (len(tokens) - origin) // block * block
    undecided: set[int] = set()

    def lengthen(end: int) -> None:
        undecided.update(range(len(tokens), min(end, limit)))
        tokens.extend([spec.mask_token_id] * (end - len(tokens)))

    lengthen(front + block)
    while True:
        end = len(tokens)
        decided = block - len(undecided & set(range(end - block, end)))
        if (end - front) // block < rule.max_blocks and end < limit and decided >= rule.tau_add * block:
            end += block
            lengthen(end)
        masked = tuple(p in undecided for p in range(front, end))
        canvas = Canvas(
            front,
            masked,
            nfe,
            False,
            request.sampling,
            rule,
            (),
            shift=spec.logit_shift,
            block_length=block,
        )
        before = visible_ends(spec.context or spec.attention, 0, front, block, front, origin)
        behind = visible_ends(spec.attention, front, end, block, end, origin)
        row = Row("naive", 0, tuple(tokens), before + behind, tuple(range(end)), canvas)
        decision = Runner(model, num_pages=end, page_size=1)(Plan((row,)))
        nfe += 1
        for i, taken in enumerate(decision.accepted[0]):
            if taken:
                tokens[front + i] = decision.tokens[0][i]
                undecided.discard(front + i)
        while front < end and not undecided & set(range(front, front + block)):
            front += block
        if front >= limit:
            return tokens[len(request.prompt) : limit], nfe
        if front == end:
            lengthen(end + block)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_batch_over_pages_gives_what_recomputing_everything_gives(model: LoadedModel, temperature: float) -> None:
    generator = torch.Generator().manual_seed(3)
    wanted = [
        Generate(
            id=f"r{n}",
            model="tiny",
            prompt=tuple(torch.randint(0, 60, (1 + 5 * n,), generator=generator).tolist()),
            sampling=Sampling(seed=n, temperature=temperature),
            limits=Limits(max_tokens=9 + 4 * n, ignore_eos=True),
            decoding=MultiBlock(tau_add=0.25, tau_semi=0.5 + n / 8, tau_acc=0.3, max_blocks=2 + n),
            block_length=4,
        )
        for n in range(4)
    ]
    cache = CacheShape(page_size=4, num_pages=64)
    engine = Engine(model.spec, cache, BatchLimits(8, 128), Runner(model, 64, 4), lambda request, resume: NoText())
    tokens, nfe = defaultdict[str, list[int]](list), dict[str, int]()
    pending = [wanted[:2], [], wanted[2:]]
    while pending or not engine.idle:
        joining = pending.pop(0) if pending else []
        for event in engine.step(Inbox(arrivals=[Arrival(request, 1) for request in joining])).events:
            if isinstance(event, Delta):
                tokens[event.id] += event.token_ids
            elif isinstance(event, Finished):
                nfe[event.id] = event.usage.nfe

    assert {r.id: (tokens[r.id], nfe[r.id]) for r in wanted} == {r.id: decode_real(model, r) for r in wanted}
