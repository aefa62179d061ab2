"""Rows that the device decodes by itself, against a loop that recomputes everything from the tokens each step."""

import pytest
import torch
from torch import Tensor

import kernels
from kernels.attention import plan_attention
from kernels.canvas import Field, Layout, Rule
from tests.fleet.models import BLOCK_LENGTH as BLOCK
from tests.fleet.models import VOCAB, write_tiny_model
from worker.graphs import StepGraphs
from worker.models import LoadedModel, load_model
from worker.models.layers import ForwardContext

PAGE = 8
STEPS = 2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

PROMPTS = [list(range(20, 20 + 8)), list(range(40, 40 + 14)), [7, 9, 11], list(range(60, 60 + 4))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(write_tiny_model(tmp_path_factory.mktemp("model")), device=DEVICE)


def _context(
    model: LoadedModel, tokens: list[int], pages: list[int], kv: tuple[tuple[Tensor, Tensor], ...]
) -> ForwardContext:
    ends = [[(position // BLOCK + 1) * BLOCK for position in range(len(tokens))]]
    plan = plan_attention([0], ends, [pages], PAGE, device=model.device, dtype=model.dtype)
    return ForwardContext(plan, torch.arange(len(tokens), device=model.device), kv)


def _pages(model: LoadedModel, count: int) -> tuple[tuple[Tensor, Tensor], ...]:
    spec = model.spec
    shape = (2, spec.num_layers, count, PAGE, spec.num_kv_heads, spec.head_dim)
    keys, values = torch.zeros(shape, dtype=model.dtype, device=model.device)
    return tuple(zip(keys, values, strict=True))


def _barred(model: LoadedModel) -> Tensor:
    barred = torch.zeros(VOCAB, dtype=torch.bool, device=model.device)
    barred[model.spec.mask_token_id] = True
    return barred


@torch.inference_mode()
def _decode_alone(model: LoadedModel, prompt: list[int], count: int) -> list[int]:
    """Decode without a cache: the whole text, its open block included, passes the model in every step."""
    limit = len(prompt) + count
    tokens, kv = list(prompt), _pages(model, 16)
    while len(tokens) < limit:
        start = len(tokens) // BLOCK * BLOCK
        masked = [position for position in range(len(tokens), start + BLOCK) if position < limit]
        tokens += [model.spec.mask_token_id] * (start + BLOCK - len(tokens))
        while masked:
            ids = torch.tensor(tokens, device=model.device)
            hidden = model.module.forward(ids, _context(model, tokens, list(range(16)), kv))
            found = kernels.token_stats(model.module.logits(hidden), barred=_barred(model))
            order = sorted(masked, key=lambda p, c=found.confidence: -float(c[p]))
            for position in order[: BLOCK // STEPS]:
                tokens[position] = int(found.token[position])
                masked.remove(position)
    return tokens[len(prompt) : limit]


@torch.inference_mode()
def _decode_together(
    model: LoadedModel, prompts: list[list[int]], count: int, slots: int, room: int, late: bool
) -> list[list[int]]:
    width, rows = 6, len(prompts)
    layout = Layout(BLOCK, width, PAGE, scratch=rows * width)
    kv = _pages(model, rows * width + 1)
    graphs = StepGraphs(model, kv, _barred(model), torch.tensor([], dtype=torch.int64, device=DEVICE), layout, rows + 1)
    graphs.capture(rows + 1, slots)
    graphs.capture_head(rows + 1, room)
    order = torch.randperm(rows * width, generator=torch.Generator().manual_seed(1)).view(rows, width).tolist()
    text: list[list[int]] = []
    for row, prompt in enumerate(prompts):
        start = len(prompt) // BLOCK * BLOCK
        if start:
            ids = torch.tensor(prompt[:start], device=model.device)
            model.module.forward(ids, _context(model, prompt[:start], order[row], kv))
        decided = len(prompt) - start
        limit = len(prompt) + count
        values = [0] * layout.width
        values[Field.LIVE], values[Field.START], values[Field.LIMIT] = 1, start, limit
        values[Field.RULE], values[Field.STEPS] = Rule.STATIC, STEPS
        values[layout.tokens] = prompt[start:] + [model.spec.mask_token_id] * (BLOCK - decided)
        values[layout.masked] = [0] * decided + [int(p < limit) for p in range(len(prompt), start + BLOCK)]
        values[Field.MISSING] = sum(values[layout.masked])
        values[layout.before] = prompt[start - BLOCK : start] if start else [0] * BLOCK
        values[layout.table] = order[row]
        graphs.put(row, values)
        text.append([-1] * count)
    # The host's view of where each row is follows from the answers alone.
    starts = [len(prompt) // BLOCK * BLOCK for prompt in prompts]
    missing = [
        sum(len(p) <= q < len(p) + count for q in range(s, s + BLOCK)) for p, s in zip(prompts, starts, strict=True)
    ]
    waiting = [graphs.launch(rows + 1, slots, room)]
    for _ in range(200):
        if late:
            waiting.append(graphs.launch(rows + 1, slots, room))
        flags, tokens, _ = waiting.pop(0).read().unbind(1)
        if not late:
            waiting.append(graphs.launch(rows + 1, slots, room))
        for row, prompt in enumerate(prompts):
            for place in (flags[row] == 1).nonzero()[:, 0].tolist():
                text[row][starts[row] + place - len(prompt)] = int(tokens[row, place])
                missing[row] -= 1
            if missing[row] == 0:
                starts[row] += BLOCK
                missing[row] = sum(p < len(prompt) + count for p in range(starts[row], starts[row] + BLOCK))
        if all(-1 not in row for row in text):
            return text
    raise AssertionError(f"not finished: {text}")


@pytest.fixture(params=[False, True], ids=["last layer whole", "last layer with the head"])
def last_layer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setattr("worker.graphs.WHOLE", 0)


@pytest.mark.usefixtures("last_layer")
@pytest.mark.parametrize("slots", [0, 1, 5])
@pytest.mark.parametrize("room", [BLOCK, 2 * BLOCK + 1, 5 * BLOCK])
@pytest.mark.parametrize("late", [True, False])
def test_rows_on_the_device_decode_what_a_loop_without_cache_decodes(model, slots, room, late):
    expected = [_decode_alone(model, prompt, 11) for prompt in PROMPTS]
    assert _decode_together(model, PROMPTS, 11, slots, room, late) == expected


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs exist on a GPU only")


def _resting(model: LoadedModel, rows: int) -> StepGraphs:
    """Return rows with an empty cache, each at the start of its third block."""
    layout = Layout(BLOCK, 6, PAGE, scratch=rows * 6)
    nothing = torch.tensor([], dtype=torch.int64, device=DEVICE)
    graphs = StepGraphs(model, _pages(model, rows * 6 + 1), _barred(model), nothing, layout, rows)
    for row in range(rows):
        values = [0] * layout.width
        values[Field.LIVE], values[Field.START], values[Field.LIMIT] = 1, 2 * BLOCK, 5 * BLOCK
        values[Field.RULE], values[Field.STEPS] = Rule.STATIC, STEPS
        values[layout.tokens], values[layout.masked] = [model.spec.mask_token_id] * BLOCK, [1] * BLOCK
        values[Field.MISSING], values[Field.COMMIT] = BLOCK, 1
        values[layout.before] = [row + 1] * BLOCK
        values[layout.table] = range(6 * row, 6 * row + 6)
        graphs.put(row, values)
    return graphs


@pytest.mark.usefixtures("last_layer")
@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("slots", [0, 2, 5])
@pytest.mark.parametrize("room", [2 * BLOCK, 5 * BLOCK])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_replayed_graph_does_what_the_step_does_op_by_op(model, slots, room, dtype, tmp_path):
    narrow = load_model(write_tiny_model(tmp_path / "model"), device=DEVICE, dtype=dtype)
    eager, replayed = _resting(narrow, 5), _resting(narrow, 5)
    replayed.capture(5, slots)
    replayed.capture_head(5, room)
    for _ in range(9):
        assert torch.equal(eager.launch(5, slots, room).read(), replayed.launch(5, slots, room).read())
        assert torch.equal(eager.state, replayed.state)


@pytest.mark.gpu
@on_gpu
def test_measuring_what_keys_take_leaves_rows_as_they_were(model):
    graphs = _resting(model, 3)
    assert graphs.measure(3, 0, 2 * BLOCK) is None
    graphs.capture(3, 0)
    before = graphs.state.clone()
    for reach in (0, BLOCK, 4 * BLOCK):
        ms = graphs.measure(3, 0, reach)
        assert ms is not None and ms > 0 and torch.equal(graphs.state, before)


@pytest.mark.gpu
@on_gpu
def test_no_step_waits_for_the_device(model):
    graphs = _resting(model, 3)
    graphs.capture(3, 2)
    graphs.capture_head(3, 3 * BLOCK)
    state = graphs.state[0].tolist()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        answers = [graphs.launch(3, 2) for _ in range(3)]
        graphs.put(0, state)
        answers.append(graphs.launch(3, 2))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(int(answer.read()[:, 0].sum()) > 0 for answer in answers)
