"""Constraints through the engine and the bundled model: valid, alone and among others, resumed, and in every order."""

import re
from collections.abc import Iterator, Sequence

import pytest

from shared.commands import Generate, Limits, LogitEdits
from shared.constraints import JsonSchema, Regex
from shared.decoding import (
    AdaptiveParallel,
    Decoding,
    EntropyBounded,
    LowConfidenceDynamic,
    LowConfidenceStatic,
    MaskgitPlus,
    MultiBlock,
    RandomOrder,
    Sequential,
    SubBlock,
)
from shared.events import Delta, Failed, Finished
from tests.bench.structured import QUESTIONS, SCHEMAS, ask, run, tally
from worker.assembly import Assembly, assemble
from worker.engine.ports import Arrival, Inbox, Resume
from worker.settings import WorkerSettings

QUESTION = QUESTIONS["flat, learned"]
PERSON = JsonSchema(json_schema=SCHEMAS["flat, learned"])


@pytest.fixture(scope="module")
def nano() -> Iterator[Assembly]:
    yield assemble(WorkerSettings(model="demo-nano", device="cpu", threads=1, max_rows=16))


def texts(assembly: Assembly, requests: Sequence[Generate]) -> list[tuple[str, str]]:
    """Return the text of each request and why it ended, in their order."""
    found = {answer.id: answer for answer in run(assembly, requests)}
    ends = [found[request.id] for request in requests]
    return [(one.text, one.end.detail if isinstance(one.end, Finished) else one.end.message) for one in ends]


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_text_is_what_its_schema_accepts(nano: Assembly, name: str) -> None:
    constraint = JsonSchema(json_schema=SCHEMAS[name])
    requests = [
        ask(nano, QUESTIONS[name], seed, constraint, temperature=1.0 + seed % 3, max_tokens=72) for seed in range(6)
    ]
    found = tally(run(nano, requests), SCHEMAS[name])
    assert (found.requests, found.whole, found.valid, found.faults) == (6, 6, 6, [])


@pytest.mark.parametrize(
    "decoding",
    [
        LowConfidenceStatic(steps=4),
        RandomOrder(steps=8),
        Sequential(steps=8),
        EntropyBounded(bound=2.0),
        MaskgitPlus(steps=8),
        SubBlock(threshold=0.5),
        MultiBlock(tau_acc=0.5, tau_semi=0.5),
        AdaptiveParallel(),
        LowConfidenceDynamic(threshold=0.6),
        Sequential(steps=8, filler_rules=False, early_stop=False),
    ],
    ids=lambda decoding: decoding.strategy,
)
def test_it_holds_for_every_order_of_decoding(nano: Assembly, decoding: Decoding) -> None:
    requests = [ask(nano, QUESTION, seed, PERSON, max_tokens=60, decoding=decoding) for seed in range(3)]
    found = tally(run(nano, requests), SCHEMAS["flat, learned"])
    assert (found.valid, found.faults) == (3, [])


def test_neighbours_change_nothing(nano: Assembly) -> None:
    def batch() -> list[Generate]:
        held = [ask(nano, QUESTION, seed, PERSON, max_tokens=48) for seed in range(3)]
        return held + [ask(nano, "Tell me a story.", seed, None, max_tokens=48) for seed in range(3)]

    alone = [text for request in batch() for text in texts(nano, [request])]
    assert texts(nano, batch()) == alone


@pytest.mark.parametrize("at_once", [3, 40])
def test_logits_looked_at_in_parts_change_nothing(
    nano: Assembly, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    def batch() -> list[Generate]:
        held = [ask(nano, QUESTION, seed, PERSON, temperature=1.0 + seed % 2, max_tokens=48) for seed in range(4)]
        edits = LogitEdits(frequency_penalty=1.0, logit_bias=((5, 2.0),))
        told = [request.model_copy(update={"logprobs": 2, "edits": edits}) for request in held[2:]]
        return held[:2] + told

    whole = texts(nano, batch())
    monkeypatch.setattr("worker.runner.LOGITS_AT_ONCE", at_once * 4096)
    assert texts(nano, batch()) == whole


def test_a_text_goes_on_from_any_committed_block(nano: Assembly) -> None:
    request = ask(nano, QUESTIONS["nested object"], 5, JsonSchema(json_schema=SCHEMAS["nested object"]), max_tokens=64)
    deltas: list[Delta] = []
    outbox = nano.engine.step(Inbox(arrivals=[Arrival(request, epoch=1)]))
    while not nano.engine.idle:
        deltas += [event for event in outbox.events if isinstance(event, Delta)]
        outbox = nano.engine.step(Inbox())
    deltas += [event for event in outbox.events if isinstance(event, Delta)]
    assert len(deltas) >= 3
    for cut in range(1, len(deltas)):
        past = deltas[:cut]
        resume = Resume(
            token_ids=tuple(token for delta in past for token in delta.token_ids),
            text_length=sum(len(delta.text) for delta in past),
            seq=past[-1].seq,
            block=cut,
            nfe=past[-1].nfe,
        )
        again: list[Delta] = []
        inbox = Inbox(arrivals=[Arrival(request, epoch=2, resume=resume)])
        while True:
            outbox = nano.engine.step(inbox)
            inbox = Inbox()
            again += [event for event in outbox.events if isinstance(event, Delta)]
            if nano.engine.idle:
                break
        assert [(d.token_ids, d.text) for d in again] == [(d.token_ids, d.text) for d in deltas[cut:]]


def test_a_text_without_room_is_cut_by_its_length(nano: Assembly) -> None:
    ((text, detail),) = texts(nano, [ask(nano, QUESTION, 1, PERSON, max_tokens=5)])
    assert detail == "max_tokens" and text.startswith('{"name"')


def test_forwards_that_run_out_leave_a_beginning_and_say_so(nano: Assembly) -> None:
    request = ask(nano, QUESTION, 1, PERSON)
    request = request.model_copy(update={"limits": Limits(max_tokens=64, max_nfe=1)})
    ((text, detail),) = texts(nano, [request])
    assert detail == "max_nfe"
    assert text and re.match(r'\{"name": ?"', text) or '{"name": "'.startswith(text)


def test_a_least_number_of_tokens_yields_to_a_text_that_is_over(nano: Assembly) -> None:
    limits = Limits(max_tokens=40, min_tokens=10)
    over = ask(nano, QUESTION, 1, Regex(pattern="ab")).model_copy(update={"limits": limits})
    open_ended = ask(nano, QUESTION, 1, Regex(pattern="(ab)+")).model_copy(update={"limits": limits})
    (short, _), (long, detail) = texts(nano, [over, open_ended])
    assert short == "ab"
    assert detail == "stop_token" and len(nano.tokenizer.encode(long)) >= 1 and set(long) == set("ab")


def test_log_probabilities_are_those_of_the_tokens_that_came(nano: Assembly) -> None:
    request = ask(nano, QUESTION, 1, Regex(pattern="zq{3}")).model_copy(update={"logprobs": 1})
    deltas: list[Delta] = []
    inbox = Inbox(arrivals=[Arrival(request, epoch=1)])
    while True:
        deltas += [event for event in nano.engine.step(inbox).events if isinstance(event, Delta)]
        inbox = Inbox()
        if nano.engine.idle:
            break
    tokens = [token for delta in deltas for token in delta.token_ids]
    told = [logprob for delta in deltas for logprob in delta.logprobs or ()]
    assert nano.tokenizer.decode(tokens) == "zqqq" and len(told) == len(tokens)
    # The model itself would have said something else, and found this unlikely.
    assert all(logprob.logprob < logprob.top[0][1] for logprob in told)
    assert [logprob.top[0][0] for logprob in told] != tokens


def test_what_has_no_grammar_ends_with_the_field_at_fault(nano: Assembly) -> None:
    request = ask(nano, QUESTION, 1, Regex(pattern="(a"))
    (answer,) = run(nano, [request])
    assert isinstance(answer.end, Failed)
    assert (answer.end.code, answer.end.param) == ("unsupported", "constraint")
    assert nano.engine.load().free_pages == nano.engine.load().total_pages
