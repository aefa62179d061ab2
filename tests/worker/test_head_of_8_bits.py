"""A vocabulary head of 8 bits: how far the statistics of tokens may move."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kernels
from kernels.attention import plan_attention
from kernels.fp8 import FP8, fp8_linear, quantize_rows
from shared.text import Tokenizer
from tests.fleet.models import write_tiny_model
from tests.goldens.folder import find_folders
from worker.assembly import assemble
from worker.bundled import bundled_folder
from worker.demo.chatml import ANSWER_START, render_turns
from worker.models import LoadedModel, load_model
from worker.models.fp8 import quantize_head
from worker.models.layers import Decoder, ForwardContext
from worker.settings import WorkerSettings

# Each factor of a product is off by 1/16 at most, or by half the least number of e4m3 under its scale.
ROUNDING = (1 + 1 / 16) ** 2 - 1
LEAST = 2**-10 / 448


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 5), inputs=st.sampled_from([16, 48, 128]), seed=st.integers(0, 2**31), spread=st.floats(0, 3)
)
def test_no_logit_is_off_by_more_than_the_roundings_of_its_terms(rows, inputs, seed, spread):
    draw = torch.Generator().manual_seed(seed)
    x, head = torch.randn(rows, inputs, generator=draw), torch.randn(64, inputs, generator=draw)
    head *= (spread * torch.randn(64, 1, generator=draw)).exp()
    small = quantize_rows(head)
    ours = fp8_linear(x, small.values, small.scale[:, 0])
    exact = x.double() @ head.double().t()
    terms = x.abs().double() @ head.abs().double().t()
    floor = inputs * LEAST * 2 * x.abs().amax(1, keepdim=True).double() * head.abs().amax(1).double()
    assert bool(((ours.double() - exact).abs() <= terms * ROUNDING + floor).all())


def _hidden(model: LoadedModel, texts: list[list[int]], block: int) -> Tensor:
    """Return the hidden states of the masked blocks behind some texts."""
    found: list[Tensor] = []
    spec = model.spec
    for text in texts:
        ids = text[: len(text) // block * block] + [spec.mask_token_id] * block
        total = len(ids)
        ends = [[min(total, position // block * block + block) for position in range(total)]]
        plan = plan_attention([0], ends, [[0]], total, device=torch.device("cpu"), dtype=model.dtype)
        shape = (1, total, spec.num_kv_heads, spec.head_dim)
        kv = tuple((torch.zeros(shape), torch.zeros(shape)) for _ in range(spec.num_layers))
        hidden = model.module.forward(torch.tensor(ids), ForwardContext(plan, torch.arange(total), kv))
        found.append(hidden[-block:])
    return torch.cat(found)


def _compare(model: LoadedModel, hidden: Tensor) -> dict[str, float]:
    """Return how the statistics of tokens differ between the stored head and one of 8 bits."""
    assert isinstance(model.module, Decoder)
    before = model.module.logits(hidden)
    plain = kernels.token_stats(before, entropy=True, margin=True)
    assert quantize_head(model.module)
    after = model.module.logits(hidden)
    small = kernels.token_stats(after, entropy=True, margin=True)
    same = plain.token == small.token
    moved = (plain.confidence - small.confidence).abs()
    return {
        "logits": float((after - before).norm() / before.norm()),
        "tokens": float(same.float().mean()),
        "sure": float(same[plain.confidence > 0.9].float().mean()) if bool((plain.confidence > 0.9).any()) else 1.0,
        "confidence": float(moved.mean()),
        "confidence_most": float(moved.max()),
        "entropy": float((plain.entropy - small.entropy).abs().mean()),
    }


QUESTIONS = (
    "What is 12 + 30?",
    "Sort 9, 3, 7, 1.",
    "Spell the word frog.",
    "Who are you?",
    "What is the capital of Japan?",
)


@torch.inference_mode()
def test_a_trained_model_is_as_sure_of_the_same_tokens():
    """95 % of the masked positions keep their token and all of which the model is sure; the confidence moves by 0.01 on
    average and 0.15 at most."""
    model = load_model(bundled_folder("demo"))
    tokenizer = Tokenizer.from_folder(bundled_folder("demo"))
    texts = [list(tokenizer.encode(render_turns((("user", text),)) + ANSWER_START)) for text in QUESTIONS]
    found = _compare(model, _hidden(model, texts, model.spec.block_length))
    assert found["logits"] < 0.05
    assert found["tokens"] >= 0.95
    assert found["sure"] == 1.0
    assert found["confidence"] < 0.01
    assert found["confidence_most"] < 0.15


@pytest.mark.parametrize("name", ["sdar", "llada", "llada2"])
@torch.inference_mode()
def test_statistics_of_a_golden_model_stay_within_their_bounds(name):
    """Random weights have many near ties: 15 % of the tokens may change; the confidence moves by 0.04 on average and
    0.15 at most."""
    folder = next(folder for folder in find_folders() if folder.name == name)
    model = load_model(folder.path)
    draw = torch.Generator().manual_seed(3)
    texts = [torch.randint(0, 100, (48,), generator=draw).tolist() for _ in range(8)]
    found = _compare(model, _hidden(model, texts, 16))
    assert found["logits"] < 0.05
    assert found["tokens"] > 0.85
    assert found["confidence"] < 0.04
    assert found["confidence_most"] < 0.15


def test_a_worker_serves_on_a_head_of_8_bits_and_keeps_a_tied_embedding(tmp_path):
    folder = write_tiny_model(tmp_path / "model")
    arguments = {"model": str(folder), "head": "fp8", "device": "cpu", "threads": 1, "num_pages": 8}
    assert assemble(WorkerSettings.model_validate(arguments)).engine.idle
    model = load_model(folder)
    assert isinstance(model.module, Decoder)
    assert model.module.head is model.module.embedding
    assert quantize_head(model.module)
    assert model.module.head.dtype == FP8
    assert model.module.embedding.dtype == torch.float32
