"""The engine against an oracle that knows no cache, no batch and no scheduler."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.commands import Generate, Limits, LoraUse, Preview, Sampling
from shared.decoding import Decoding, Threshold
from shared.events import Delta, Event, Failed, Finished, Snapshot, is_terminal
from shared.keys import new_request_id
from tests.worker.paper_model import FILLER, MASK, STOP, VOCAB, Answer, PaperForward, decode_alone, paper_spec
from worker.engine.engine import Engine
from worker.engine.plan import Plan
from worker.engine.ports import Arrival, Decision, DeviceFull, Inbox, Outbox, Resume
from worker.engine.scheduler import BatchLimits, CacheShape


class NumberText:
    """Text decoder of the paper model: token 7 reads "7 ", a stop string is looked for in the text."""

    def __init__(self, stop: Sequence[str] = (), skip: int = 0) -> None:
        self._stop, self._skip, self.stopped, self._text = stop, skip, False, ""

    def push(self, token_ids: Iterable[int]) -> str:
        if self.stopped:
            return ""
        text = "".join(f"{token} " for token in token_ids)
        self._text += text
        for stop in self._stop:
            if stop in self._text:
                self.stopped = True
                text = text[: max(0, len(text) - (len(self._text) - self._text.index(stop)))]
        swallowed = min(self._skip, len(text))
        self._skip -= swallowed
        return text[swallowed:]

    def flush(self) -> str:
        return ""


def make_text(request: Generate, resume: Resume) -> NumberText:
    return NumberText(request.limits.stop, resume.text_length)


class Bench:
    """An engine, the events of each request, and a step that checks what must hold after every step."""

    def __init__(self, pages: int = 200, page_size: int = 4, rows: int = 8, budget: int = 64, block: int = 4) -> None:
        self.spec = paper_spec(block)
        self.forward = PaperForward(pages, page_size)
        cache = CacheShape(page_size, pages)
        self.engine = Engine(self.spec, cache, BatchLimits(rows, budget), self.forward, make_text)
        self.events: dict[str, list[Event]] = {}
        self.handed_back: list[str] = []

    def step(self, inbox: Inbox | None = None) -> Outbox:
        outbox = self.engine.step(inbox or Inbox())
        for event in outbox.events:
            log = self.events.setdefault(event.id, [])
            assert not log or not is_terminal(log[-1]), "an event behind the terminal one"
            log.append(event)
        self.handed_back += outbox.handed_back
        if self.engine.idle:
            assert self.engine.load().free_pages == self.engine.load().total_pages, "pages leaked"
        for plan in self.forward.plans[-1:]:
            assert plan.tokens <= self.engine._scheduler.limits.token_budget
        return outbox

    def run(self, requests: Iterable[Generate] = (), most: int = 3000) -> None:
        self.step(Inbox(arrivals=[Arrival(request, 1) for request in requests]))
        for _ in range(most):
            if self.engine.idle:
                return
            self.step()
        raise AssertionError("the engine does not come to rest")

    def deltas(self, request: Generate) -> list[Delta]:
        return [event for event in self.events[request.id] if isinstance(event, Delta)]

    def tokens(self, request: Generate) -> list[int]:
        return [token for delta in self.deltas(request) for token in delta.token_ids]

    def end(self, request: Generate) -> Finished | Failed:
        last = self.events[request.id][-1]
        assert isinstance(last, Finished | Failed)
        return last


def ask(
    prompt: Sequence[int],
    max_tokens: int = 20,
    *,
    seed: int = 0,
    block_length: int | None = None,
    decoding: Decoding | None = None,
    preview: Preview | None = None,
    **limits: Any,
) -> Generate:
    return Generate(
        id=new_request_id("paper"),
        model="paper",
        prompt=tuple(prompt),
        sampling=Sampling(seed=seed),
        limits=Limits(max_tokens=max_tokens, **limits),
        block_length=block_length,
        decoding=decoding,
        preview=preview,
    )


def check(bench: Bench, request: Generate, answer: Answer | None = None) -> None:
    """The events of a finished request say what the oracle says, gapless and in order."""
    answer = answer or decode_alone(request, bench.spec)
    end = bench.end(request)
    assert isinstance(end, Finished)
    assert bench.tokens(request) == answer.tokens
    assert end.detail == answer.detail
    assert end.usage.completion_tokens == len(answer.tokens)
    assert "".join(delta.text for delta in bench.deltas(request)) == "".join(f"{token} " for token in answer.tokens)
    durable = [event for event in bench.events[request.id] if not isinstance(event, Snapshot)]
    assert [event.seq for event in durable] == list(range(2, 2 + len(durable)))  # type: ignore[union-attr]
    offset = 0
    for delta in bench.deltas(request):
        assert delta.offset == offset
        offset += len(delta.token_ids)


prompts = st.lists(st.integers(0, 59), min_size=1, max_size=40)
requests = st.builds(
    ask,
    prompts,
    st.integers(1, 40),
    seed=st.integers(0, 50),
    block_length=st.sampled_from([None, 1, 2, 3, 4, 8]),
    ignore_eos=st.booleans(),
    max_nfe=st.one_of(st.none(), st.integers(1, 12)),
)


@given(requests)
@settings(max_examples=150, deadline=None)
def test_a_request_alone_equals_the_oracle(request: Generate) -> None:
    bench = Bench()
    bench.run([request])
    check(bench, request)
    answer = decode_alone(request, bench.spec)
    end = bench.end(request)
    assert isinstance(end, Finished) and end.usage.nfe == answer.nfe


@given(st.lists(st.tuples(requests, st.integers(0, 12)), min_size=1, max_size=8), st.integers(12, 40))
@settings(max_examples=60, deadline=None)
def test_late_arrivals_few_pages_and_a_small_budget_change_no_token(
    arrivals: list[tuple[Generate, int]], pages: int
) -> None:
    bench = Bench(pages=max(pages, 24), rows=4, budget=32)
    for moment in range(13):
        now = [Arrival(request, 1) for request, at in arrivals if at == moment]
        bench.step(Inbox(arrivals=now))
    bench.run()
    for request, _ in arrivals:
        check(bench, request)


def test_preemption_under_page_pressure_changes_nothing() -> None:
    bench = Bench(pages=14, rows=6, budget=64)
    wanted = [ask([n, n + 1, n + 2], 40, seed=n, ignore_eos=True) for n in range(6)]
    bench.run(wanted)
    assert bench.engine.load().preemptions > 0
    for request in wanted:
        check(bench, request)


@given(requests, st.integers(1, 30))
@settings(max_examples=60, deadline=None)
def test_a_request_resumed_from_its_last_committed_block_goes_on_without_gap_or_repeat(
    request: Generate, steps: int
) -> None:
    first = Bench()
    first.step(Inbox(arrivals=[Arrival(request, 1)]))
    for _ in range(steps):
        first.step()
    log = first.events.get(request.id, [])
    if log and is_terminal(log[-1]):
        return
    seen = first.deltas(request) if log else []
    resume = Resume(
        token_ids=tuple(token for delta in seen for token in delta.token_ids),
        text_length=sum(len(delta.text) for delta in seen),
        seq=seen[-1].seq if seen else 1,
        block=seen[-1].block + 1 if seen else 0,
        nfe=seen[-1].nfe if seen else 0,
    )
    second = Bench()
    second.events[request.id] = list(seen)
    second.step(Inbox(arrivals=[Arrival(request, 2, resume)]))
    second.run()
    check(second, request)


def test_an_abort_at_any_step_ends_the_request_once_and_frees_its_pages() -> None:
    for moment in range(12):
        bench = Bench()
        victim, other = ask([1, 2, 3], 40, ignore_eos=True), ask([4, 5], 24, ignore_eos=True)
        bench.step(Inbox(arrivals=[Arrival(victim, 1), Arrival(other, 1)]))
        for _ in range(moment):
            bench.step()
        if victim.id in bench.events and is_terminal(bench.events[victim.id][-1]):
            continue
        outbox = bench.step(Inbox(aborts=[(victim.id, "by hand")]))
        assert any(isinstance(event, Finished) and event.reason == "aborted" for event in outbox.events)
        bench.run()
        check(bench, other)


def test_an_abort_before_the_first_step_and_of_an_unknown_request_is_harmless() -> None:
    bench = Bench(rows=1)
    running, queued = ask([1], 12), ask([2], 12)
    bench.step(Inbox(arrivals=[Arrival(running, 1), Arrival(queued, 1)], aborts=[("nobody", "x"), (queued.id, "x")]))
    assert bench.end(queued).t == "finished"
    bench.run()
    check(bench, running)


def test_a_dropped_request_leaves_without_an_event() -> None:
    bench = Bench()
    request = ask([1, 2], 40, ignore_eos=True)
    bench.step(Inbox(arrivals=[Arrival(request, 1)]))
    bench.step(Inbox(drops=[request.id]))
    assert bench.engine.idle
    assert not any(is_terminal(event) for event in bench.events.get(request.id, []))


def test_hand_back_gives_up_at_the_next_block_boundary_and_admits_nobody() -> None:
    bench = Bench()
    early, late = ask([1, 2, 3], 60, ignore_eos=True), ask([7], 8)
    bench.step(Inbox(arrivals=[Arrival(early, 1)]))
    bench.step(Inbox(hand_back=True, arrivals=[Arrival(late, 1)]))
    for _ in range(6):
        bench.step()
    assert bench.engine.idle
    assert sorted(bench.handed_back) == sorted([early.id, late.id])
    assert all(len(delta.token_ids) + (3 if delta.offset == 0 else 0) == 4 for delta in bench.deltas(early))


def test_what_is_asked_for_alone_leaves_at_its_next_block_boundary_and_the_others_stay() -> None:
    bench = Bench()
    stays, leaves, late = ask([1, 2, 3], 30, ignore_eos=True), ask([4, 5, 6], 60, ignore_eos=True), ask([7], 8)
    bench.step(Inbox(arrivals=[Arrival(stays, 1), Arrival(leaves, 1)]))
    sequence = bench.engine._scheduler.find(leaves.id)
    assert sequence is not None
    while sequence.at_boundary:
        bench.step()
    bench.step(Inbox(returns=[leaves.id, "r_nobody"], arrivals=[Arrival(late, 1)]))
    assert bench.handed_back == [], "in the middle of a block"
    for _ in range(6):
        bench.step()
    assert bench.handed_back == [leaves.id]
    assert all(len(delta.token_ids) + (3 if delta.offset == 0 else 0) == 4 for delta in bench.deltas(leaves))
    bench.run()
    assert len(bench.tokens(stays)) == 30 and isinstance(bench.end(late), Finished)
    assert not any(is_terminal(event) for event in bench.events[leaves.id])


def test_max_tokens_is_exact_for_every_value_around_a_block() -> None:
    for max_tokens in range(1, 14):
        bench = Bench()
        request = ask([5, 6], max_tokens, ignore_eos=True)
        bench.run([request])
        assert len(bench.tokens(request)) == max_tokens


def test_a_literal_mask_or_stop_token_in_the_prompt_is_just_text() -> None:
    for prompt in ([MASK], [MASK] * 4, [1, MASK, 2, STOP, FILLER], [STOP] * 9):
        bench = Bench()
        request = ask(prompt, 12)
        bench.run([request])
        check(bench, request)


def test_a_stop_string_across_blocks_ends_the_text_before_it() -> None:
    plain = ask([3, 1, 4], 24, ignore_eos=True, seed=3)
    bench = Bench()
    bench.run([plain])
    tokens = bench.tokens(plain)
    # The prompt has three tokens: produced tokens 0 | 1-4 | 5-8 are the blocks, so 4 and 5 straddle an edge.
    stop = f"{tokens[4]} {tokens[5]} "
    stopped = ask([3, 1, 4], 24, ignore_eos=True, seed=3, stop=(stop,))
    bench.run([stopped])
    end = bench.end(stopped)
    assert isinstance(end, Finished) and end.detail == "stop_string" and end.reason == "stop"
    text = "".join(delta.text for delta in bench.deltas(stopped))
    whole = "".join(f"{token} " for token in tokens)
    # The paper text decoder holds nothing back, so what it gave of the stop string before its end stays.
    assert whole.startswith(text) and len(text) <= whole.index(stop) + len(stop)
    assert bench.tokens(stopped) == tokens[:6]


def test_a_repetition_run_ends_the_request() -> None:
    bench = Bench()
    request = ask([9], 40, ignore_eos=True, max_repetition_run=1)
    bench.run([request])
    end = bench.end(request)
    assert isinstance(end, Finished) and end.detail == "max_repetition_run"
    assert len(bench.tokens(request)) == 1


def test_max_nfe_fills_the_block_in_the_last_forward() -> None:
    bench = Bench()
    request = ask([9, 9], 40, ignore_eos=True, max_nfe=1)
    bench.run([request])
    end = bench.end(request)
    assert isinstance(end, Finished) and end.detail == "max_nfe" and end.usage.nfe == 1
    assert len(bench.tokens(request)) == 2


def test_a_finished_block_costs_no_forward_of_its_own() -> None:
    bench = Bench()
    request = ask([1], 19, ignore_eos=True, decoding=Threshold(threshold=0.0))
    bench.run([request])
    assert len(bench.forward.plans) == 5
    widths = [len(plan.rows[0].token_ids) for plan in bench.forward.plans]
    assert widths == [4, 8, 8, 8, 8]


def test_prefill_and_denoise_share_a_forward() -> None:
    bench = Bench(budget=32)
    short, long = ask([1, 2], 30, ignore_eos=True), ask([n % 50 for n in range(120)], 8, ignore_eos=True)
    bench.step(Inbox(arrivals=[Arrival(short, 1)]))
    bench.step(Inbox(arrivals=[Arrival(long, 1)]))
    for _ in range(5):
        bench.step()
    shared = [plan for plan in bench.forward.plans if {row.request_id for row in plan.rows} == {short.id, long.id}]
    assert len(shared) >= 4, "the running row stalled behind the prefill, or the prefill behind it"
    bench.run()
    check(bench, short)
    check(bench, long)


def test_nan_in_one_row_fails_that_request_only() -> None:
    bench = Bench()
    good, bad = ask([1], 12), ask([2], 12)
    bench.forward.poison.add(bad.id)
    bench.run([good, bad])
    end = bench.end(bad)
    assert isinstance(end, Failed) and end.code == "nan"
    check(bench, good)


def test_nan_under_adapters_is_told_as_their_fault() -> None:
    bench = Bench()
    by_model = LoraUse(name="hot", path="hot", digest="0" * 64, param="model")
    uses = (by_model, *(LoraUse(name=name, path=name, digest="0" * 64) for name in ("odd", "hot")))
    bad = ask([2], 12).model_copy(update={"lora": uses})
    bench.forward.poison.add(bad.id)
    bench.run([bad])
    end = bench.end(bad)
    assert isinstance(end, Failed)
    assert (end.code, end.param) == ("unsupported", "lora")
    assert "not finite" in end.message or "NaN" in end.message
    assert end.message.endswith(" under this request's adapters: hot, odd")

    alone = ask([3], 12).model_copy(update={"lora": uses[:1]})
    bench.forward.poison.add(alone.id)
    bench.run([alone])
    end = bench.end(alone)
    assert isinstance(end, Failed)
    assert (end.code, end.param) == ("unsupported", "model"), "the model's name brought it"


class FullDevice(PaperForward):
    """Has memory for so many tokens a step, and none for steps that some requests are part of."""

    def __init__(self, room: int = 10**9) -> None:
        super().__init__(200, 4)
        self.room = room
        self.greedy: set[str] = set()
        self.refused = 0

    def __call__(self, plan: Plan) -> Decision:
        if plan.tokens > self.room or any(row.request_id in self.greedy for row in plan.rows):
            self.refused += 1
            raise DeviceFull
        return super().__call__(plan)


def bench_on(device: FullDevice) -> Bench:
    bench = Bench()
    bench.forward = bench.engine._forward = device
    return bench


@given(arriving=st.lists(requests, min_size=1, max_size=6), room=st.integers(16, 60))
@settings(max_examples=60, deadline=None)
def test_a_step_for_which_there_is_no_memory_is_made_smaller_and_costs_no_request(
    arriving: list[Generate], room: int
) -> None:
    # A block and the one before it, of 8 positions each, are what no request does without.
    bench = bench_on(FullDevice(room))
    bench.run(arriving)
    for request in arriving:
        check(bench, request)


def test_a_long_prompt_is_read_in_smaller_parts_where_memory_is_short() -> None:
    device = FullDevice(room=12)
    bench = bench_on(device)
    short, wide = ask([1], 12), ask([2] * 30, 12)
    bench.run([short, wide])
    check(bench, short)
    check(bench, wide)
    assert 0 < device.refused < 5


def test_a_request_for_which_there_is_no_memory_alone_ends_and_the_others_go_on() -> None:
    device = FullDevice()
    bench = bench_on(device)
    others = [ask([number] * number, 24, seed=number, ignore_eos=True) for number in range(1, 8)]
    for greedy in (ask([9], 12), ask([9] * 30, 12)):
        device.greedy.add(greedy.id)
        bench.run([*others[:4], greedy, *others[4:]])
        end = bench.end(greedy)
        assert isinstance(end, Failed) and (end.code, end.seq) == ("out_of_memory", 2)
        for request in others:
            check(bench, request)
        others = [ask(one.prompt, 24, seed=one.sampling.seed, ignore_eos=True) for one in others]
    assert device.refused < 2 * 12


def test_steps_hold_all_they_may_again_once_there_is_memory() -> None:
    device = FullDevice(room=8)
    bench = bench_on(device)
    arriving = [ask([number], 180, ignore_eos=True) for number in range(4)]
    bench.step(Inbox(arrivals=[Arrival(request, 1) for request in arriving]))
    for _ in range(40):
        bench.step()
    assert all(plan.tokens <= 8 for plan in device.plans)
    refused, device.room = device.refused, 10**9
    for _ in range(4 * 40):
        bench.step()
    assert len(device.plans[-1].rows) == len(device.plans[-1].running) > 2
    assert bench.engine._scheduler.shortage.budget is None
    assert 0 < refused == device.refused
    bench.run()
    for request in arriving:
        check(bench, request)


@pytest.mark.parametrize(
    ("request_", "code", "param"),
    [
        (ask([VOCAB]), "invalid_request", "prompt"),
        (ask([-1]), "invalid_request", "prompt"),
        (ask([1] * 256), "too_long", "prompt"),
        (ask([1] * 100, 150), "too_long", "max_tokens"),
        (ask([1], block_length=32), "invalid_request", "block_length"),
    ],
)
def test_a_request_that_can_never_run_is_refused_at_once(request_: Generate, code: str, param: str) -> None:
    bench = Bench(pages=50)
    other = ask([1, 2], 8)
    bench.run([request_, other])
    end = bench.end(request_)
    assert isinstance(end, Failed) and (end.code, end.param) == (code, param)
    check(bench, other)


def test_snapshots_come_between_commits_and_only_when_asked_for() -> None:
    bench = Bench(block=8)
    quiet, watched = ask([1, 2, 3], 24, ignore_eos=True), ask([1, 2, 3], 24, ignore_eos=True, preview=Preview())
    bench.run([quiet, watched])
    assert not any(isinstance(event, Snapshot) for event in bench.events[quiet.id])
    snapshots = [event for event in bench.events[watched.id] if isinstance(event, Snapshot)]
    assert snapshots
    final = bench.tokens(watched)
    for snapshot in snapshots:
        assert None in snapshot.token_ids
        shown = final[snapshot.offset : snapshot.offset + len(snapshot.token_ids)]
        assert all(seen in (None, token) for seen, token in zip(snapshot.token_ids, shown, strict=True))
    check(bench, quiet)


def test_min_tokens_forbids_a_stop_until_the_block_that_reaches_it() -> None:
    bench = Bench()
    bench.step(Inbox(arrivals=[Arrival(ask([1], 20, min_tokens=6), 1)]))
    bench.run()
    canvases = [row.canvas for plan in bench.forward.plans for row in plan.rows if row.canvas]
    assert all((STOP in canvas.forbidden) == (canvas.start < 7) for canvas in canvases)


# --- texts that several requests share

beginnings = st.sampled_from([[n % 7 for n in range(24)], [5] * 20, [1, 2, 3]])
sharing = st.builds(
    lambda begin, rest, most, seed, block, cache: ask(
        [*begin, *rest], most, seed=seed, block_length=block, ignore_eos=True
    ).model_copy(update={"cache_prompt": cache}),
    beginnings,
    st.lists(st.integers(0, 3), max_size=9),
    st.integers(1, 24),
    st.integers(0, 2),
    st.sampled_from([None, 1, 2, 3]),
    st.sampled_from([True, True, True, False]),
)


@given(st.lists(st.tuples(sharing, st.integers(0, 20)), min_size=2, max_size=8), st.integers(18, 60))
@settings(max_examples=80, deadline=None)
def test_sharing_pages_changes_no_token_under_any_pressure(arrivals: list[tuple[Generate, int]], pages: int) -> None:
    bench = Bench(pages=pages, rows=4, budget=32)
    for moment in range(21):
        bench.step(Inbox(arrivals=[Arrival(request, 1) for request, at in arrivals if at == moment]))
    bench.run()
    for request, _ in arrivals:
        check(bench, request)


def test_the_second_request_with_a_prompt_runs_only_what_is_new() -> None:
    bench = Bench()
    prompt = [n % 11 for n in range(40)]
    first, second = ask([*prompt, 1], 6, ignore_eos=True), ask([*prompt, 2], 6, ignore_eos=True)
    bench.run([first])
    before = len(bench.forward.plans)
    bench.run([second])
    check(bench, second)
    assert bench.engine.load().cached_tokens == 40
    assert max(plan.tokens for plan in bench.forward.plans[before:]) == 2 * 4


def test_a_next_turn_finds_the_answer_before_it() -> None:
    bench = Bench()
    first = ask([3] * 10, 22, ignore_eos=True)
    bench.run([first])
    second = ask([*first.prompt, *bench.tokens(first), 9, 9], 8, ignore_eos=True)
    bench.run([second])
    check(bench, second)
    # The last block of an answer is never written from its final tokens.
    assert bench.engine.load().cached_tokens == 28


def test_requests_that_decode_together_share_what_is_written() -> None:
    bench = Bench()
    prompt = [n % 5 for n in range(32)]
    early, late = ask(prompt, 12, ignore_eos=True), ask(prompt, 12, seed=1, ignore_eos=True)
    bench.step(Inbox(arrivals=[Arrival(early, 1)]))
    bench.step()
    bench.step(Inbox(arrivals=[Arrival(late, 1)]))
    row_of = {row.request_id: row for row in bench.forward.plans[-1].rows}
    assert row_of[early.id].pages[:8] == row_of[late.id].pages[:8]
    bench.run()
    check(bench, early)
    check(bench, late)


def test_a_request_that_wants_no_sharing_neither_finds_nor_leaves_anything() -> None:
    bench = Bench()
    shy = ask([2] * 16, 4).model_copy(update={"cache_prompt": False})
    for request in (shy, ask([2] * 16, 4), shy.model_copy(update={"id": new_request_id("paper")})):
        bench.run([request])
        check(bench, request)
    assert bench.engine.load().cached_tokens == 0


def test_nobody_finds_what_a_failed_request_has_written() -> None:
    bench = Bench()
    bad = ask([4] * 16, 40, ignore_eos=True)
    bench.step(Inbox(arrivals=[Arrival(bad, 1)]))
    bench.step()
    bench.forward.poison.add(bad.id)
    bench.step()
    assert bench.end(bad).t == "failed"
    bench.run([good := ask([4] * 16, 8)])
    check(bench, good)
    assert bench.engine.load().cached_tokens == 0


# --- time


@given(requests, st.integers(0, 12))
@settings(max_examples=80, deadline=None)
def test_a_request_whose_time_is_up_ends_with_its_block_filled_by_one_forward(request: Generate, moment: int) -> None:
    bench = Bench()
    bench.step(Inbox(arrivals=[Arrival(request, 1)]))
    for _ in range(moment):
        bench.step()
    if request.id in bench.events and is_terminal(bench.events[request.id][-1]):
        return
    before = sum(row.canvas is not None for plan in bench.forward.plans for row in plan.rows)
    bench.step(Inbox(hurries=[request.id, "nobody"]))
    bench.run()
    spent = sum(row.canvas is not None for plan in bench.forward.plans for row in plan.rows) - before
    end = bench.end(request)
    assert isinstance(end, Finished)
    assert spent == 1
    tokens = bench.tokens(request)
    assert MASK not in tokens or MASK in request.prompt
    assert end.usage.completion_tokens == len(tokens) <= request.limits.max_tokens
    if end.detail == "deadline":
        assert (len(request.prompt) + len(tokens)) % (request.block_length or 4) == 0
