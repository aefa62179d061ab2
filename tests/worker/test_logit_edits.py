"""Penalties, biases and log-probabilities, from the rule to what the engine says."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.commands import Generate, Limits, LogitEdits, Sampling
from shared.decoding import Sequential, Threshold
from shared.events import Delta, Event, Failed, TokenLogprob
from tests.worker.texts import NoText
from tests.worker.tiny_checkpoints import write_checkpoint
from worker.engine.engine import Engine
from worker.engine.penalties import edits_of
from worker.engine.plan import Canvas
from worker.engine.ports import Arrival, Inbox, Resume
from worker.engine.scheduler import BatchLimits, CacheShape
from worker.logit_edits import edit_logits
from worker.models import LoadedModel, load_model
from worker.runner import Runner

TOKENS = st.lists(st.integers(0, 9), max_size=12)
CANVAS = Canvas(0, (True,), 0, False, Sampling(), Threshold(), ())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(write_checkpoint(tmp_path_factory.mktemp("tiny")))


def run(model: LoadedModel, *requests: Generate, resume: Resume | None = None) -> dict[str, list[Event]]:
    engine = Engine(
        model.spec, CacheShape(8, 32), BatchLimits(4, 64), Runner(model, 32, 8), lambda request, resume: NoText()
    )
    events: dict[str, list[Event]] = {request.id: [] for request in requests}
    inbox = Inbox(arrivals=[Arrival(request, 1, resume or Resume()) for request in requests])
    while True:
        for event in engine.step(inbox).events:
            events[event.id].append(event)
        inbox = Inbox()
        if engine.idle:
            return events


def ask(name: str, prompt: tuple[int, ...] = (1, 2, 3), **fields: object) -> Generate:
    base = {"decoding": Threshold(threshold=0.3, filler_rules=False), "limits": Limits(max_tokens=13, ignore_eos=True)}
    return Generate(id=name, model="tiny", prompt=prompt, **(base | fields))  # pyright: ignore[reportArgumentType]


def tokens_of(events: list[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Delta) for token in event.token_ids]


@settings(max_examples=100, deadline=None)
@given(
    TOKENS,
    TOKENS,
    st.sampled_from([1.0, 1.3, 0.5]),
    st.sampled_from([0.0, 0.7]),
    st.sampled_from([0.0, -0.4]),
    st.dictionaries(st.integers(0, 9), st.floats(-100, 100), max_size=3),
    st.integers(0, 2**20),
)
def test_edits_are_what_openai_and_ctrl_define(
    prompt: list[int],
    produced: list[int],
    repetition: float,
    presence: float,
    frequency: float,
    bias: dict[int, float],
    seed: int,
) -> None:
    asked = LogitEdits(
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=tuple(bias.items()),
    )
    logits = torch.randn((2, 10), generator=torch.Generator().manual_seed(seed))
    edits = edits_of(asked, prompt, produced)

    found = edit_logits(logits, [CANVAS, replace(CANVAS, edits=edits)])

    assert torch.equal(found[0], logits[0]), "a row without edits stays as it is"
    counts = Counter(produced)
    for token in range(10):
        z = float(logits[1, token])
        if token in prompt or token in counts:
            z = z / repetition if z > 0 else z * repetition
        z -= presence * (counts[token] > 0) + frequency * counts[token]
        z += bias.get(token, 0.0)
        assert float(found[1, token]) == pytest.approx(z, abs=1e-4)


def test_a_bias_makes_and_prevents_a_token(model: LoadedModel) -> None:
    always = ask("always", edits=LogitEdits(logit_bias=((5, 100.0),)))
    plain = tokens_of(run(model, ask("plain"))["plain"])
    never = ask("never", edits=LogitEdits(logit_bias=tuple((token, -100.0) for token in set(plain))))
    assert tokens_of(run(model, always)["always"]) == [5] * 13
    assert set(plain).isdisjoint(tokens_of(run(model, never)["never"]))


def test_a_strong_penalty_lets_no_token_come_twice_where_one_is_decided_a_step(model: LoadedModel) -> None:
    one = Sequential(filler_rules=False)
    for edits in (LogitEdits(presence_penalty=100.0), LogitEdits(frequency_penalty=100.0)):
        found = tokens_of(run(model, ask("r", (7,), edits=edits, decoding=one))["r"])
        assert len(set(found)) == 13
        half = Resume(token_ids=tuple(found[:3]), seq=2, block=1, nfe=3)
        assert tokens_of(run(model, ask("r", (7,), edits=edits, decoding=one), resume=half)["r"]) == found[3:]


def test_edits_of_one_request_leave_its_neighbours_alone(model: LoadedModel) -> None:
    edited = ask("edited", edits=LogitEdits(repetition_penalty=1.5, logit_bias=((3, 2.0),)), logprobs=3)
    others = [ask("a"), ask("b", (9, 8)), ask("c", (4,), sampling=Sampling(temperature=0.9, seed=4))]
    alone = {request.id: tokens_of(run(model, request)[request.id]) for request in (*others, edited)}
    together = run(model, *others, edited)
    assert {name: tokens_of(events) for name, events in together.items()} == alone


def test_logprobs_come_with_each_block_only_if_asked(model: LoadedModel) -> None:
    events = run(model, ask("told", logprobs=4), ask("untold"), ask("few", logprobs=0))
    told = [event for event in events["told"] if isinstance(event, Delta)]
    assert all(event.logprobs is None for event in events["untold"] if isinstance(event, Delta))
    assert tokens_of(events["told"]) == tokens_of(events["untold"]) == tokens_of(events["few"])
    for event in told:
        assert event.logprobs is not None and len(event.logprobs) == len(event.token_ids)
        for token, logprob in zip(event.token_ids, event.logprobs, strict=True):
            assert isinstance(logprob, TokenLogprob)
            # Greedy: the token leads its list.
            assert logprob.top[0] == (token, pytest.approx(logprob.logprob, abs=1e-5))
            assert [value for _, value in logprob.top] == sorted((value for _, value in logprob.top), reverse=True)
            assert len(logprob.top) == 4 and sum(math.exp(value) for _, value in logprob.top) <= 1 + 1e-5
    for event in events["few"]:
        if isinstance(event, Delta):
            assert event.logprobs is not None and all(logprob.top == [] for logprob in event.logprobs)


def test_logprobs_are_the_models_own_whatever_the_draw(model: LoadedModel) -> None:
    edits = LogitEdits(logit_bias=((5, 100.0),))
    hot = Sampling(temperature=2.0, top_k=3, seed=2)
    (first, *_) = run(model, ask("r", edits=edits, sampling=hot, logprobs=2))["r"]
    (plain, *_) = run(model, ask("r", logprobs=20, decoding=Sequential(filler_rules=False)))["r"]
    assert isinstance(first, Delta) and isinstance(plain, Delta) and first.logprobs and plain.logprobs
    assert first.token_ids[0] == 5 and first.logprobs[0].logprob < first.logprobs[0].top[0][1]
    assert first.logprobs[0].top[0] == (plain.token_ids[0], pytest.approx(plain.logprobs[0].logprob, abs=1e-4))


def test_a_bias_on_no_token_of_the_vocabulary_is_refused(model: LoadedModel) -> None:
    (end,) = run(model, ask("r", edits=LogitEdits(logit_bias=((10**6, 1.0),))))["r"]
    assert isinstance(end, Failed) and end.param == "logit_bias"
