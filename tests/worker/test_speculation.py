"""Linear speculation gives the tokens of causal decoding, in the forwards that its rule says."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.commands import Generate, Limits, LogitEdits, Sampling
from shared.constraints import JsonObject
from shared.decoding import LinearSpeculation
from shared.events import Delta, Failed, Finished
from tests.goldens.folder import find_folders
from tests.worker.test_streaming_window import run
from tests.worker.texts import NoText
from worker.engine.engine import Engine, MakeGuard, no_guard
from worker.engine.plan import UNDECIDED, Fill, Guarded, Plan, Scores
from worker.engine.ports import Arrival, Decision, Forward, Inbox, Resume
from worker.engine.scheduler import BatchLimits, CacheShape
from worker.models import LoadedModel
from worker.models.spec import Attention, ModelSpec
from worker.runner import Runner

STOP = 49


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return next(folder for folder in find_folders() if folder.name == "nemotron_labs_diffusion").model()


def ask(n: int, max_tokens: int, block: int = 8, threshold: float | None = None, **fields: Any) -> Generate:
    prompt = torch.randint(0, 400, (1 + 5 * n,), generator=torch.Generator().manual_seed(n)).tolist()
    limits = {"max_tokens": max_tokens, "ignore_eos": True} | fields.pop("limits", {})
    return Generate(
        id=f"r{n}",
        model="tiny",
        prompt=tuple(prompt),
        sampling=Sampling(seed=n, **fields.pop("sampling", {})),
        limits=Limits(**limits),
        decoding=LinearSpeculation(threshold=threshold),
        block_length=block,
        **fields,
    )


def make_engine(model: LoadedModel, pages: int = 64, make_guard: MakeGuard = no_guard) -> Engine:
    cache, limits, runner = CacheShape(4, pages), BatchLimits(8, 128), Runner(model, pages, 4)
    return Engine(model.spec, cache, limits, runner, lambda request, resume: NoText(), make_guard)


def causally(model: LoadedModel, requests: list[Generate], make_guard: MakeGuard = no_guard) -> dict[str, list[int]]:
    """Serve the model as the autoregressive one that it is as well."""
    plain = replace(model, spec=replace(model.spec, attention=Attention.CAUSAL))
    asked = [request.model_copy(update={"decoding": None, "block_length": 1}) for request in requests]
    return {name: tokens for name, (tokens, _) in run(make_engine(plain, make_guard=make_guard), [asked]).items()}


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("pages", [64, 16])
def test_a_batch_gives_the_tokens_of_causal_decoding_drawn_ones_too(
    model: LoadedModel, temperature: float, pages: int
) -> None:
    wanted = [
        ask(n, 24 + n, 4 + 2 * (n % 3), None if n % 2 else 0.3, sampling={"temperature": temperature}) for n in range(5)
    ]
    engine = make_engine(model, pages)

    result = run(engine, [wanted[:3], [], wanted[3:]])

    assert {name: tokens for name, (tokens, _) in result.items()} == causally(model, wanted)
    assert (engine.load().preemptions > 0) == (pages == 16)


def test_the_references_speculation_has_the_tokens_of_our_causal_decoding(model: LoadedModel) -> None:
    folder = next(folder for folder in find_folders() if folder.name == "nemotron_labs_diffusion")
    entries = [entry for entry in folder.generate if entry["function"] == "linear_spec_generate"]
    wanted = [
        ask(1, len(entry["output"])).model_copy(update={"id": entry["name"], "prompt": tuple(entry["prompt"])})
        for entry in entries
    ]

    assert entries and causally(model, wanted) == {entry["name"]: entry["output"] for entry in entries}


def test_stops_least_lengths_and_penalties_are_those_of_causal_decoding(model: LoadedModel) -> None:
    free = ask(2, 16)
    tokens = causally(model, [free])[free.id]
    stopping = {"ignore_eos": False, "stop_token_ids": (tokens[5],)}
    wanted = [
        ask(2, 16, limits=stopping),
        ask(2, 16, limits=stopping | {"min_tokens": 9}).model_copy(update={"id": "least"}),
        ask(2, 16, edits=LogitEdits(repetition_penalty=1.3, presence_penalty=0.5)).model_copy(update={"id": "edits"}),
        ask(2, 16, logprobs=2).model_copy(update={"id": "logprobs"}),
    ]

    result = run(make_engine(model), [wanted])

    assert {name: found for name, (found, _) in result.items()} == causally(model, wanted)
    assert result[wanted[0].id][0] == tokens[:5]


class Alternating:
    """A grammar: even and odd tokens take turns, of which the first one undecided is all that may be decided."""

    accepts, finished = True, False

    def __init__(self, request: Generate) -> None:
        self._last = request.prompt[-1]

    def push(self, token_id: int) -> None:
        self._last = token_id

    def fill(self, canvas: Guarded, wanted: Sequence[bool], scores: Scores) -> Fill:
        found = scores.best_of(canvas.frontier, bytes((token + self._last) % 2 for token in range(512)))
        assert found is not None and canvas.tokens[canvas.frontier] == UNDECIDED
        fill = Fill([0] * len(wanted), [0.0] * len(wanted), [False] * len(wanted))
        fill.tokens[canvas.frontier], fill.confidence[canvas.frontier] = found
        fill.open[canvas.frontier] = True
        return fill


def test_a_grammar_is_followed_token_by_token(model: LoadedModel) -> None:
    wanted = [ask(n, 12, constraint=JsonObject()) for n in range(1, 4)]

    result = run(make_engine(model, make_guard=Alternating), [wanted])

    expected = causally(model, wanted, make_guard=Alternating)
    assert {name: tokens for name, (tokens, _) in result.items()} == expected
    for request in wanted:
        text = [request.prompt[-1], *expected[request.id]]
        assert all((one + other) % 2 for one, other in pairwise(text))


@pytest.mark.parametrize("most", [1, 2, 3, 6])
def test_no_request_takes_more_forwards_than_it_may_and_all_its_tokens_are_certain(
    model: LoadedModel, most: int
) -> None:
    request = ask(3, 20, limits={"max_nfe": most})
    tokens, nfe = run(make_engine(model), [[request]])[request.id]

    assert 0 < nfe <= most
    assert tokens and tokens == causally(model, [ask(3, 20)])[request.id][: len(tokens)]


def test_another_worker_goes_on_to_the_same_tokens(model: LoadedModel) -> None:
    request = ask(2, 18, threshold=0.4)
    whole = causally(model, [request])[request.id]
    for moment in (1, 5, 12):
        first, seen = make_engine(model), list[Delta]()
        inbox = Inbox(arrivals=[Arrival(request, 1)])
        for _ in range(moment):
            seen += [event for event in first.step(inbox).events if isinstance(event, Delta)]
            inbox = Inbox()
        tokens = [token for delta in seen for token in delta.token_ids]
        resume = Resume(tuple(tokens), 0, seen[-1].seq, seen[-1].block + 1, seen[-1].nfe) if seen else Resume()
        second, inbox = make_engine(model), Inbox(arrivals=[Arrival(request, 2, resume)])
        while inbox.arrivals or not second.idle:
            for event in second.step(inbox).events:
                tokens += event.token_ids if isinstance(event, Delta) else []
            inbox = Inbox()
        assert tokens == whole


def test_a_model_without_a_causal_context_refuses_to_speculate() -> None:
    sdar = next(folder for folder in find_folders() if folder.name == "sdar").model()
    (event,) = make_engine(sdar).step(Inbox(arrivals=[Arrival(ask(1, 4), 1)])).events
    assert isinstance(event, Failed) and event.param == "decoding" and event.code == "unsupported"


# --- drafts that are often right


def follow(token: int, position: int) -> int:
    """The language: what follows `token`, at `position`."""
    return int.from_bytes(hashlib.blake2b(f"{token} {position}".encode(), digest_size=4).digest(), "big") % 50


def drafted(token: int, position: int, errors: int) -> int:
    """What a draft says there: sometimes another token."""
    right = follow(token, position)
    return (right + 1) % 48 if position % 7 < errors else right


class LanguageForward:
    """Proposes what follows each token of a causal row, and drafts from the first token of others."""

    def __init__(self, errors: int) -> None:
        self._errors = errors

    def __call__(self, plan: Plan) -> Decision:
        decision = Decision([], [], [], [])
        for row in plan.rows:
            tokens = list[int]()
            canvas = row.canvas
            causal = row.visible_end == tuple(range(row.start + 1, row.end + 1))
            for index in range(0 if canvas is None else len(canvas.masked)):
                assert canvas is not None
                position = canvas.start + index
                if causal and canvas.masked[index]:
                    tokens.append(follow(row.token_ids[position - 1 - row.start], position))
                elif not canvas.masked[index]:
                    tokens.append(row.token_ids[position - row.start] if position < row.end else 0)
                else:
                    tokens.append(drafted(tokens[-1], position, self._errors))
            masked = [] if canvas is None else list(canvas.masked)
            decision.accepted.append(masked)
            decision.tokens.append(tokens)
            decision.confidence.append([1.0] * len(tokens))
            decision.failed.append(None)
        return decision


def language_engine(spec: ModelSpec, forward: Forward) -> Engine:
    spec = replace(spec, stop_token_ids=(STOP,))
    return Engine(spec, CacheShape(4, 200), BatchLimits(8, 256), forward, lambda request, resume: NoText())


@given(st.integers(0, 40), st.integers(1, 40), st.integers(1, 9), st.integers(0, 7), st.booleans())
@settings(max_examples=150, deadline=None)
def test_a_check_keeps_the_drafts_up_to_the_first_wrong_one_and_its_correction(
    seed: int, max_tokens: int, block: int, errors: int, ignore_eos: bool
) -> None:
    spec = next(folder for folder in find_folders() if folder.name == "nemotron_labs_diffusion").model().spec
    request = ask(1, max_tokens, block, limits={"ignore_eos": ignore_eos}).model_copy(update={"prompt": (seed, 7)})
    engine, tokens, nfe = language_engine(spec, LanguageForward(errors)), list[int](), 0
    inbox = Inbox(arrivals=[Arrival(request, 1)])
    while inbox.arrivals or not engine.idle:
        for event in engine.step(inbox).events:
            if isinstance(event, Delta):
                tokens += event.token_ids
            elif isinstance(event, Finished):
                nfe = event.usage.nfe
        inbox = Inbox()

    right, last = list[int](), 7
    while len(right) < max_tokens and (ignore_eos or last != STOP):
        last = follow(last, 2 + len(right))
        right.append(last)
    stopped = not ignore_eos and right[-1] == STOP
    assert tokens == (right[:-1] if stopped else right)

    # The prompt brings one token; then a draft, unless the block has room for none, and a check.
    expected, known = 1, 1
    while known < len(right):
        position, token, kept = 2 + known, right[known - 1], 0
        while kept < block - 1:
            guess = drafted(token, position + kept, errors)
            if guess != follow(token, position + kept):
                break
            token, kept = guess, kept + 1
        expected += 1 + (block > 1)
        known += kept + 1
    assert nfe == expected
