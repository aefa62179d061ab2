"""WeDLM's window over real layers, against a decoder that recomputes everything in each step."""

from collections import defaultdict
from collections.abc import Sequence

import pytest
import torch

from shared.commands import Generate, Limits, Sampling
from shared.decoding import StreamingWindow, Threshold
from shared.events import Delta, Failed, Finished
from tests.goldens.folder import find_folders
from tests.worker.texts import NoText
from worker.engine.engine import Engine
from worker.engine.plan import Canvas, Plan, Row
from worker.engine.ports import Arrival, Inbox, Resume
from worker.engine.scheduler import BatchLimits, CacheShape
from worker.models import LoadedModel
from worker.runner import Runner


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return next(folder for folder in find_folders() if folder.name == "wedlm").model()


def ask(n: int, window: int, max_tokens: int, temperature: float = 0.0, **rule: float) -> Generate:
    prompt = torch.randint(0, 400, (2 + 5 * n,), generator=torch.Generator().manual_seed(n)).tolist()
    return Generate(
        id=f"r{n}",
        model="tiny",
        prompt=tuple(prompt),
        sampling=Sampling(seed=n, temperature=temperature),
        limits=Limits(max_tokens=max_tokens, ignore_eos=True),
        decoding=StreamingWindow.model_validate(rule),
        block_length=window,
    )


def decode(model: LoadedModel, request: Generate) -> tuple[list[int], int]:
    """The sentence of the rule: known tokens before masks, the front goes, the window is filled up again."""
    prompt, limit = len(request.prompt), len(request.prompt) + request.limits.max_tokens
    text: list[int | None] = list(request.prompt)
    front, nfe = prompt, 0
    rule = request.decoding
    assert isinstance(rule, StreamingWindow) and request.block_length is not None
    while front < limit:
        end = min(front + request.block_length, limit)
        text += [None] * (end - len(text))
        order = sorted(range(end), key=lambda p: (text[p] is None, p))
        tokens = [model.spec.mask_token_id if (token := text[p]) is None else token for p in order]
        masked = tuple(token is None for token in text[front:end])
        plain = rule.model_copy(update={"filler_rules": False})
        canvas = Canvas(front, masked, nfe, False, request.sampling, plain, ())
        row = Row("naive", 0, tuple(tokens), tuple(range(1, end + 1)), tuple(range(end)), canvas, tuple(order))
        decision = Runner(model, num_pages=end, page_size=1)(Plan((row,)))
        nfe += 1
        for i, taken in enumerate(decision.accepted[0]):
            if taken:
                text[front + i] = decision.tokens[0][i]
        while front < end and text[front] is not None:
            front += 1
    return [token for token in text[prompt:] if token is not None], nfe


def make_engine(model: LoadedModel, pages: int = 64, budget: int = 128) -> Engine:
    limits = BatchLimits(8, budget)
    return Engine(model.spec, CacheShape(4, pages), limits, Runner(model, pages, 4), lambda request, resume: NoText())


def run(engine: Engine, arrivals: Sequence[Sequence[Generate]]) -> dict[str, tuple[list[int], int]]:
    tokens, nfe = defaultdict[str, list[int]](list), dict[str, int]()
    pending = list(arrivals)
    while pending or not engine.idle:
        joining = pending.pop(0) if pending else []
        for event in engine.step(Inbox(arrivals=[Arrival(request, 1) for request in joining])).events:
            assert not isinstance(event, Failed), event
            if isinstance(event, Delta):
                tokens[event.id] += event.token_ids
            elif isinstance(event, Finished):
                nfe[event.id] = event.usage.nfe
    return {name: (tokens[name], count) for name, count in nfe.items()}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("pages", [64, 15])
def test_a_batch_over_pages_gives_what_recomputing_everything_gives(
    model: LoadedModel, temperature: float, pages: int
) -> None:
    wanted = [ask(n, 3 + n, 28 + n, temperature, bound=1.5 + n / 2, position_penalty=0.1) for n in range(5)]
    engine = make_engine(model, pages)

    result = run(engine, [wanted[:2], [], wanted[2:]])

    assert result == {request.id: decode(model, request) for request in wanted}
    assert (engine.load().preemptions > 0) == (pages == 15)


def test_a_delta_comes_with_each_token_at_the_front_and_max_tokens_is_exact(model: LoadedModel) -> None:
    request = ask(1, 8, 21, bound=2.0, position_penalty=0.02)
    engine, sizes, window = make_engine(model), list[int](), list[int]()
    inbox = Inbox(arrivals=[Arrival(request, 1)])
    while inbox.arrivals or not engine.idle:
        for event in engine.step(inbox).events:
            if isinstance(event, Delta):
                sizes.append(len(event.token_ids))
                window.append(event.offset)
        inbox = Inbox()

    assert sum(sizes) == 21
    assert window == [sum(sizes[:i]) for i in range(len(sizes))]
    assert len(sizes) > 21 // 8 + 1, "the front waited for the window"


def test_a_window_of_one_token_is_plain_decoding_of_one_token_after_the_other(model: LoadedModel) -> None:
    streamed = ask(2, 1, 12, bound=0.1)
    blocks = streamed.model_copy(update={"decoding": Threshold(), "id": "blocks"})

    result = run(make_engine(model), [[streamed, blocks]])

    assert result[streamed.id] == result["blocks"]
    assert result["blocks"][1] == 12


def test_another_worker_goes_on_behind_what_is_committed(model: LoadedModel) -> None:
    request = ask(3, 6, 20, bound=2.0)
    engine, seen = make_engine(model), list[Delta]()
    inbox = Inbox(arrivals=[Arrival(request, 1)])
    while sum(len(delta.token_ids) for delta in seen) < 8:
        seen += [event for event in engine.step(inbox).events if isinstance(event, Delta)]
        inbox = Inbox()
    known = tuple(token for delta in seen for token in delta.token_ids)
    resume = Resume(known, 0, seen[-1].seq, seen[-1].block + 1, seen[-1].nfe)
    second, tokens = make_engine(model), list(known)
    inbox = Inbox(arrivals=[Arrival(request, 2, resume)])
    while inbox.arrivals or not second.idle:
        for event in second.step(inbox).events:
            tokens += event.token_ids if isinstance(event, Delta) else []
        inbox = Inbox()

    limits = request.limits.model_copy(update={"max_tokens": 20 - len(known)})
    rest = request.model_copy(update={"prompt": (*request.prompt, *known), "limits": limits})
    assert tokens == [*known, *decode(model, rest)[0]]


def test_a_model_that_does_not_reorder_refuses_the_window() -> None:
    sdar = next(folder for folder in find_folders() if folder.name == "sdar").model()
    (event,) = make_engine(sdar).step(Inbox(arrivals=[Arrival(ask(1, 4, 4), 1)])).events
    assert isinstance(event, Failed) and event.param == "decoding" and event.code == "unsupported"
