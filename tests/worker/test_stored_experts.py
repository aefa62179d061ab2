"""Mixtures whose experts a checkpoint stores in 8 bits: kept as they are, or read as what they stand for."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.fp8 import FP8, dequantize
from tests.fleet.models import write_tiny_model
from tests.goldens.folder import find_folders
from tests.worker.test_eight_bits import KINDS
from worker.assembly import assemble
from worker.models import load_model
from worker.models.eight_bits import keep
from worker.models.fp8 import runs_on_stored
from worker.models.layers import Decoder, MoeMLP
from worker.settings import WorkerSettings

GOLDEN = next(folder.path for folder in find_folders() if folder.name == "llada2")
HIDDEN = 64


def write_stored(folder: Path, kind: str, *, inner: int = 256, shared_too: bool = True) -> Path:
    """Write LLaDA2's golden model with larger experts, in 8 bits; beside it, as `wide`, with what they stand for."""
    config, end, make = KINDS[kind]
    draw = torch.Generator().manual_seed(4)
    weights = load_file(GOLDEN / "model.safetensors")
    for name, weight in weights.items():
        if "experts." in name:
            shape = (HIDDEN, inner) if "down_proj" in name else (inner, HIDDEN)
            weights[name] = torch.randn(shape, generator=draw, dtype=weight.dtype) / shape[1] ** 0.5
    wide = dict(weights)
    for name in [name for name in weights if ".mlp.experts." in name or (shared_too and "shared_experts." in name)]:
        small, scale = make(weights[name].float())
        weights |= {name: small, name + end: scale}
        wide[name] = dequantize(small, scale.view(-1) if scale.numel() in (1, len(small)) else scale, torch.float32)
    plain = json.loads((GOLDEN / "config.json").read_bytes()) | {"moe_intermediate_size": inner}
    for path, tensors, more in ((folder, weights, {"quantization_config": config}), (folder.parent / "wide", wide, {})):
        path.mkdir(parents=True)
        save_file(tensors, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(plain | more))
    return folder


def mixtures(folder: Path) -> tuple[Decoder, list[MoeMLP]]:
    module = load_model(folder).module
    assert isinstance(module, Decoder)
    return module, [layer.mlp for layer in module.layers if isinstance(layer.mlp, MoeMLP)]


@pytest.mark.parametrize("shared_too", (True, False))
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_experts_are_kept_as_they_are_stored_and_are_what_they_stand_for(tmp_path: Path, kind: str, shared_too: bool):
    folder = write_stored(tmp_path / "small", kind, shared_too=shared_too)
    module, small = mixtures(folder)
    count = keep(module, folder, lambda _: True)
    assert count == len(small) == 2
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(2))
    for mlp, wide in zip(small, mixtures(tmp_path / "wide")[1], strict=True):
        stack = mlp.stack()
        assert stack.down.dtype == FP8 and stack.shared == shared_too
        assert stack.gate_up_scale is not None and stack.gate_up_scale.dim() == (3 if "blocks" in kind else 2)
        torch.testing.assert_close(mlp.forward(x), wide.forward(x))
        # Nothing keeps the wide ones.
        assert mlp.shared is not None
        held = [mlp.gate_up, mlp.shared.gate_up.weight, mlp.shared.down.weight]
        assert all(part.untyped_storage().nbytes() <= stack.gate_up.numel() for part in held)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_that_reach_over_gate_and_up_leave_the_experts_wide(tmp_path: Path, kind: str):
    folder = write_stored(tmp_path / "small", kind, inner=192)
    module, small = mixtures(folder)
    keep(module, folder, lambda _: True)
    assert all((mlp.down.dtype == FP8) == ("blocks" not in kind) for mlp in small)


def test_experts_stay_wide_where_the_device_has_no_product_for_them(tmp_path: Path):
    folder = write_stored(tmp_path / "small", "channel")
    module, small = mixtures(folder)
    assert keep(module, folder, runs_on_stored) == 0
    assert all(mlp.down.dtype == torch.float32 for mlp in small)


def test_experts_of_which_one_is_stored_otherwise_stay_wide(tmp_path: Path):
    folder = write_stored(tmp_path / "small", "channel")
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("mlp.experts.3.up_proj.weight"))
    scale = weights.pop(f"{name}_scale")
    weights[name] = dequantize(weights[name], scale.view(-1), torch.float32)
    save_file(weights, folder / "model.safetensors")
    module, (changed, other) = mixtures(folder)
    assert keep(module, folder, lambda _: True) == 1 + 2  # and the linears of that layer's shared expert
    assert changed.down.dtype == torch.float32
    assert other.down.dtype == FP8


@pytest.mark.parametrize("weights", ("stored", "wide", "fp8"))
def test_a_worker_serves_stored_experts(tmp_path: Path, weights: str):
    folder = write_stored(tmp_path / "small", "blocks")
    (folder / "tokenizer.json").symlink_to(write_tiny_model(tmp_path / "tiny") / "tokenizer.json")
    settings = WorkerSettings.model_validate(
        {"model": str(folder), "weights": weights, "device": "cpu", "threads": 1, "num_pages": 8}
    )
    assert assemble(settings).engine.idle
