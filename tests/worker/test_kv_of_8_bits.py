"""Keys and values in pages of 8 bits: what a worker does with them."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from kernels.attention import plan_attention
from kernels.fp8 import FP8
from shared.commands import Generate, Limits, Sampling
from shared.events import Delta, Failed
from tests.fleet import models
from tests.fleet.models import write_tiny_model
from tests.worker.test_ahead import PAGE, make_ahead, make_engine
from worker.assembly import assemble, cache_shape
from worker.bundled import bundled_folder
from worker.device import Placement
from worker.engine.ports import Arrival, Forward, Inbox
from worker.models import LoadedModel, ModelError, load_model
from worker.models.fp8 import with_small_pages
from worker.models.layers import ForwardContext
from worker.models.spec import Commit
from worker.runner import Runner
from worker.settings import WorkerSettings

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    loaded = load_model(write_tiny_model(tmp_path_factory.mktemp("model")), device=DEVICE)
    return replace(loaded, spec=replace(loaded.spec, max_model_len=128), kv_dtype=FP8)


def decode(model: LoadedModel, forward: Forward, ahead: bool) -> dict[str, list[int]]:
    draw = random.Random(4)
    asked = [
        Generate(
            id=str(number),
            model="m",
            prompt=tuple(draw.randrange(10, 300) for _ in range(draw.choice((3, 17, 30)))),
            limits=Limits(max_tokens=20, ignore_eos=True),
            sampling=Sampling(temperature=0.7, seed=number) if number % 2 else Sampling(),
        )
        for number in range(6)
    ]
    engine = make_engine(model, forward, 40, 6, ahead=ahead)
    told: dict[str, list[int]] = {request.id: [] for request in asked}
    inbox = Inbox(arrivals=[Arrival(request, epoch=1) for request in asked])
    for _ in range(300):
        for event in engine.step(inbox).events:
            assert not isinstance(event, Failed)
            if isinstance(event, Delta):
                told[event.id] += event.token_ids
        inbox = Inbox()
        if engine.idle:
            break
    return told


def test_rows_that_the_device_leads_get_the_tokens_of_the_plain_runner(model: LoadedModel) -> None:
    plain = decode(model, Runner(model, 40, PAGE, DEVICE), ahead=False)
    assert all(len(tokens) == 20 for tokens in plain.values())
    assert decode(model, make_ahead(model, 40, 6), ahead=True) == plain


def test_a_cache_of_8_bits_has_nearly_twice_the_pages_of_one_of_16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "HEAD_DIM", 128)
    spec = load_model(write_tiny_model(tmp_path / "model")).spec
    half = Placement(torch.device("cpu"), torch.bfloat16, 1)
    settings = WorkerSettings(kv_cache_mb=64, max_rows=4096)
    wide = cache_shape(settings, spec, half).num_pages
    small = cache_shape(settings.model_copy(update={"kv_dtype": "fp8"}), spec, half).num_pages
    assert small == int(64 * 2**20 // (2 * models.LAYERS * models.KV_HEADS * (128 + 4) * 32))
    assert small / wide > 1.9


def test_the_pages_take_the_memory_that_is_planned_for_them(model: LoadedModel) -> None:
    runner = Runner(model, 9, PAGE, DEVICE)
    held = sum(part.nbytes for layer in runner.kv for part in layer)
    spec = model.spec
    assert held == 2 * spec.num_layers * spec.num_kv_heads * (spec.head_dim + 4) * PAGE * 10


def test_a_worker_serves_with_pages_of_8_bits(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    settings = WorkerSettings(model=str(folder), kv_dtype="fp8", device="cpu", threads=1, num_pages=8)
    assert assemble(settings).engine.idle


def test_a_family_that_reads_wide_pages_only_is_refused(model: LoadedModel) -> None:
    for other in (
        replace(model, module=nn.Identity()),
        replace(model, spec=replace(model.spec, commit=Commit.ENCODED)),
    ):
        with pytest.raises(ModelError, match="kv_dtype fp8"):
            with_small_pages(other, Path("folder"))


@torch.inference_mode()
def test_the_logits_of_a_trained_model_move_by_a_few_percent() -> None:
    model = load_model(bundled_folder("demo"))
    spec, total = model.spec, 64
    ids = torch.randint(10, 200, (total,), generator=torch.Generator().manual_seed(1))
    plan = plan_attention([0], [[total] * total], [[0]], total, device=torch.device("cpu"), dtype=model.dtype)
    shape = (1, total, spec.num_kv_heads, spec.head_dim)

    def logits(small: bool) -> torch.Tensor:
        layers = [(torch.zeros(shape), torch.zeros(shape)) for _ in range(spec.num_layers)]
        kv = tuple(
            (keys.to(FP8), values.to(FP8), torch.zeros((2, *shape[:3]))) if small else (keys, values)
            for keys, values in layers
        )
        return model.module.logits(model.module.forward(ids, ForwardContext(plan, torch.arange(total), kv)))

    wide, small = logits(False), logits(True)
    assert 0 < float((small - wide).norm() / wide.norm()) < 0.05
