"""Templates with holes: the engine over pages, batches and caches, against recomputing everything for each step."""

import random
from dataclasses import replace

import pytest

from shared.commands import Generate, Limits, Sampling
from shared.decoding import Decoding, LowConfidenceStatic, Threshold
from shared.events import Delta, Event, Failed, Finished
from shared.holes import HOLE, count_filled, filling, spans
from tests.goldens.folder import find_folders
from tests.worker.texts import NoText
from tests.worker.tiny_checkpoints import write_checkpoint
from worker.engine.engine import Engine
from worker.engine.plan import Canvas, Plan, Row, visible_ends
from worker.engine.ports import Arrival, Inbox, Resume
from worker.engine.scheduler import BatchLimits, CacheShape
from worker.models import LoadedModel, load_model
from worker.models.spec import Attention, Commit
from worker.runner import Runner

PLAIN = Threshold(threshold=0.03, filler_rules=False)
STEPS = LowConfidenceStatic(steps=4, filler_rules=False)


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(write_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module", params=["causal", "llada", "dream"])
def model(request: pytest.FixtureRequest, causal: LoadedModel) -> LoadedModel:
    if request.param == "causal":
        return causal
    return next(folder for folder in find_folders() if folder.name == request.param).model()


def run(
    model: LoadedModel, *requests: Generate, budget: int = 256, resume: Resume | None = None
) -> dict[str, list[Event]]:
    shape = CacheShape(8, 64)
    runner = Runner(model, 64, 8)
    engine = Engine(model.spec, shape, BatchLimits(4, budget), runner, lambda request, resume: NoText())
    events: dict[str, list[Event]] = {request.id: [] for request in requests}
    inbox = Inbox(arrivals=[Arrival(request, 1, resume or Resume()) for request in requests])
    for _ in range(500):
        for event in engine.step(inbox).events:
            events[event.id].append(event)
        inbox = Inbox()
        if engine.idle:
            assert engine.load().free_pages == engine.load().total_pages
            return events
    raise AssertionError("the engine does not come to rest")


def ask(
    name: str, prompt: list[int], template: list[int] | None, decoding: Decoding = PLAIN, **fields: object
) -> Generate:
    limits = fields.pop("limits", Limits(max_tokens=20, ignore_eos=True))
    return Generate(
        id=name,
        model="tiny",
        prompt=tuple(prompt),
        template=None if template is None else tuple(template),
        decoding=decoding,
        limits=limits,  # pyright: ignore[reportArgumentType]
        **fields,  # pyright: ignore[reportArgumentType]
    )


def tokens_of(events: list[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Delta) for token in event.token_ids]


def fill_naively(model: LoadedModel, request: Generate) -> tuple[list[int], int]:
    """Fill a template without cache, batch or scheduler: return its tokens and the number of forwards."""
    spec, prompt, template = model.spec, list(request.prompt), list(request.template or ())
    block = spec.block_length
    start = len(prompt) // block * block if spec.commit is Commit.FUSED else len(prompt)
    tokens = prompt + [spec.mask_token_id if token == HOLE else token for token in template]
    end = len(tokens)
    masked = [False] * (len(prompt) - start) + [token == HOLE for token in template]
    ends = tuple(end for _ in range(end))
    if spec.attention is Attention.BLOCK_CAUSAL:
        ends = (*visible_ends(spec.attention, 0, start, block, end), *ends[start:])
    undecided, nfe = sum(masked), 0
    while any(masked):
        canvas = Canvas(
            start,
            tuple(masked),
            nfe,
            False,
            request.sampling,
            request.decoding or spec.decoding,
            (),
            shift=spec.logit_shift,
            undecided_at_first=undecided,
        )
        row = Row("naive", 0, tuple(tokens), ends, tuple(range(end)), canvas)
        decision = Runner(model, num_pages=end, page_size=1)(Plan((row,)))
        for i, taken in enumerate(decision.accepted[0]):
            if taken:
                tokens[start + i], masked[i] = decision.tokens[0][i], False
        nfe += 1
    return tokens[len(prompt) :], nfe


def a_template(draw: random.Random, vocab: int) -> list[int]:
    pieces: list[int] = []
    for _ in range(draw.choice([1, 2, 3])):
        pieces += [draw.randrange(5, vocab) for _ in range(draw.choice([1, 2, 5]))]
        pieces += [HOLE] * draw.choice([1, 3, 6])
    return pieces + [draw.randrange(5, vocab) for _ in range(draw.choice([0, 1, 4]))]


@pytest.mark.parametrize("decoding", [PLAIN, STEPS], ids=["threshold", "static"])
@pytest.mark.parametrize("seed", range(3))
def test_holes_are_filled_as_by_recomputing_everything_whoever_shares_the_batch(
    model: LoadedModel, decoding: Decoding, seed: int
) -> None:
    draw = random.Random(seed)
    vocab = min(model.spec.text_vocab_size, model.spec.mask_token_id) - 1
    requests: list[Generate] = []
    for number in range(5):
        prompt = [draw.randrange(5, vocab) for _ in range(draw.choice([1, 4, 7, 18]))]
        sampling = Sampling(temperature=draw.choice([0.0, 0.8]), seed=number)
        requests.append(ask(f"t{number}", prompt, a_template(draw, vocab), decoding, sampling=sampling))
    requests.append(ask("plain", [9, 8, 7], None, decoding, limits=Limits(max_tokens=9, ignore_eos=True)))

    events = run(model, *requests)

    for request in requests[:-1]:
        told, end = tokens_of(events[request.id]), events[request.id][-1]
        assert isinstance(end, Finished) and (end.reason, end.detail) == ("stop", "filled")
        assert (told, end.usage.nfe) == fill_naively(model, request)
        template = request.template or ()
        assert all(given in (HOLE, token) for given, token in zip(template, told, strict=True)), (
            "text that stands, stays"
        )
        assert end.usage.completion_tokens == template.count(HOLE)
        assert end.usage.prompt_tokens == len(request.prompt) + len(template) - template.count(HOLE)
    assert tokens_of(events["plain"]) == tokens_of(run(model, requests[-1])["plain"])


def test_holes_see_what_stands_behind_them(model: LoadedModel) -> None:
    first = tokens_of(run(model, ask("r", [9, 8, 7], [HOLE] * 4 + [11, 12, 13]))["r"])
    second = tokens_of(run(model, ask("r", [9, 8, 7], [HOLE] * 4 + [33, 21, 44]))["r"])
    assert first[:4] != second[:4]


def test_a_stop_token_ends_its_hole_and_no_other(model: LoadedModel) -> None:
    template = [HOLE] * 6 + [11, 12] + [HOLE] * 6
    one = LowConfidenceStatic(filler_rules=True)
    free = tokens_of(run(model, ask("r", [9, 8, 7], template, one))["r"])
    stop = free[2]
    spec = replace(model.spec, filler_ids=(3,))
    limits = Limits(max_tokens=1, stop_token_ids=(stop,))
    events = run(replace(model, spec=spec), ask("r", [9, 8, 7], template, one, limits=limits))["r"]
    told, end = tokens_of(events), events[-1]
    assert isinstance(end, Finished) and end.detail == "filled"
    stops = {stop, *spec.stop_token_ids}
    assert len(told) == len(template) and told[6:8] == [11, 12]
    for span in spans(template):
        text = filling(told, span, stops)
        assert not stops & set(text)
        assert set(told[span[0] + len(text) + 1 : span[1]]) <= {3}, "behind the stop stands filler"
    assert end.usage.completion_tokens == count_filled(template, told, stops) < 12
    assert end.usage.nfe < 12, "filler costs no forwards"


def test_a_prompt_is_shared_between_templates_and_plain_requests(causal: LoadedModel) -> None:
    prompt = [5 + number % 40 for number in range(33)]
    shape = CacheShape(8, 64)
    engine = Engine(causal.spec, shape, BatchLimits(4, 64), Runner(causal, 64, 8), lambda request, resume: NoText())
    found: list[tuple[list[int], int]] = []
    for request in (ask("a", prompt, None), ask("b", prompt, [HOLE] * 4 + [7]), ask("c", prompt, [HOLE] * 4 + [7])):
        told: list[int] = []
        inbox = Inbox(arrivals=[Arrival(request, 1)])
        while inbox.arrivals or not engine.idle:
            for event in engine.step(inbox).events:
                if isinstance(event, Delta):
                    told += event.token_ids
                elif isinstance(event, Finished):
                    found.append((told, event.usage.cached_tokens))
            inbox = Inbox()
    assert [cached for _, cached in found] == [0, 32, 32]
    assert found[1][0] == found[2][0] == fill_naively(causal, ask("b", prompt, [HOLE] * 4 + [7]))[0]


def test_forwards_and_time_are_bounded_and_an_end_that_was_not_told_is(model: LoadedModel) -> None:
    template = [HOLE] * 5 + [11] + [HOLE] * 5
    slow = LowConfidenceStatic(filler_rules=False)
    limits = Limits(max_tokens=1, ignore_eos=True, max_nfe=2)
    events = run(model, ask("r", [9, 8], template, slow, limits=limits))["r"]
    assert isinstance(end := events[-1], Finished)
    assert (end.detail, end.usage.nfe, len(tokens_of(events))) == ("max_nfe", 2, 11)
    done = Resume(token_ids=tuple(tokens_of(events)), seq=2, block=1, nfe=2)
    (end,) = run(model, ask("r", [9, 8], template, slow), resume=done)["r"]
    assert isinstance(end, Finished) and end.detail == "filled" and end.usage.completion_tokens == 10


@pytest.mark.parametrize(
    ("template", "fields", "param"),
    [
        ([5, 6], {}, "template"),
        ([HOLE, 10**6], {}, "template"),
        ([HOLE] * 5000, {}, "template"),
        ([HOLE] * 40 + [5], {"prompt": (1,) * 8}, "template"),
        ([HOLE], {"block_length": 4}, "block_length"),
        ([HOLE], {"embed": True}, "template"),
    ],
)
def test_what_cannot_be_filled_is_refused_by_name(
    causal: LoadedModel, template: list[int], fields: dict[str, object], param: str
) -> None:
    request = ask("r", [1], template).model_copy(update=fields)
    (end,) = run(causal, request, budget=64)["r"]
    assert isinstance(end, Failed) and end.param == param


def test_families_that_go_from_left_to_right_refuse(causal: LoadedModel) -> None:
    for commit in (Commit.SEEDED, Commit.REORDERED):
        other = replace(causal, spec=replace(causal.spec, commit=commit))
        (end,) = run(other, ask("r", [1], [HOLE]))["r"]
        assert isinstance(end, Failed) and (end.code, end.param) == ("unsupported", "template")
