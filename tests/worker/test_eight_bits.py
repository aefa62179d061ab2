"""Checkpoints that are stored in 8 bits: read as what they stand for, run as they are, or refused by a sentence."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.attention import plan_attention
from kernels.fp8 import BLOCK, FP8, FP8_MAX, dequantize, quantize_rows
from kernels.linear import linear
from tests.fleet import models
from tests.fleet.models import write_tiny_model
from worker.assembly import assemble
from worker.models import LoadedModel, ModelError, load_model
from worker.models.eight_bits import keep
from worker.models.fp8 import quantize, runs_on_stored
from worker.models.layers import Decoder, ForwardContext, Linear
from worker.settings import WorkerSettings

ROUNDING = 1 / 16

BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}


def compressed(strategy: str) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": strategy}
    tokens = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": tokens}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def in_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    outputs, inputs = weight.shape
    scale = torch.zeros(-(-outputs // BLOCK), -(-inputs // BLOCK))
    small = torch.zeros(weight.shape, dtype=FP8)
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            part = (slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK))
            scale[row, column] = weight[part].abs().max() / FP8_MAX
            small[part] = (weight[part] / scale[row, column]).to(FP8)
    return small, scale


def for_each_output(weight: Tensor) -> tuple[Tensor, Tensor]:
    small, scale = quantize_rows(weight)
    return small, scale.to(torch.bfloat16)


def for_all(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().max() / FP8_MAX
    return (weight / scale).to(FP8), scale


KINDS: dict[str, tuple[dict[str, Any], str, Callable[[Tensor], tuple[Tensor, Tensor]]]] = {
    "blocks": (BLOCKS, "_scale_inv", in_blocks),
    "channel": (compressed("channel"), "_scale", for_each_output),
    "tensor": (compressed("tensor"), "_scale", for_all),
    "compressed blocks": (compressed("block"), "_scale", in_blocks),
}


@pytest.fixture(autouse=True, params=[64, 48])
def head_dim(request, monkeypatch) -> int:
    """Blocks fit the projections of heads of 64; those of 48 they do not."""
    monkeypatch.setattr(models, "HIDDEN", 256)
    monkeypatch.setattr(models, "HEAD_DIM", request.param)
    monkeypatch.setattr(models, "MLP", 384)
    monkeypatch.setattr(models, "LAYERS", 2)
    return request.param


def write_stored(folder: Path, kind: str, change: Callable[[dict[str, Tensor]], None] | None = None) -> Path:
    """Write the tiny model with its projections in 8 bits; beside it, as `wide`, with what they stand for."""
    config, end, make = KINDS[kind]
    write_tiny_model(folder)
    write_tiny_model(folder.parent / "wide")
    weights = load_file(folder / "model.safetensors")
    wide = dict(weights)
    for name in [name for name in weights if "_proj.weight" in name]:
        small, scale = make(weights[name])
        weights |= {name: small, name + end: scale}
        wide[name] = dequantize(small, scale.view(-1) if scale.dim() and scale.shape[-1] == 1 else scale, torch.float32)
    if change is not None:
        change(weights)
    save_file(weights, folder / "model.safetensors")
    save_file(wide, folder.parent / "wide" / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "quantization_config": config}))
    return folder


@torch.inference_mode()
def logits(model: LoadedModel) -> Tensor:
    total, spec = 24, model.spec
    plan = plan_attention([0], [[total] * total], [[0]], total, device=model.device, dtype=model.dtype)
    shape = (1, total, spec.num_kv_heads, spec.head_dim)
    kv = tuple((torch.zeros(shape), torch.zeros(shape)) for _ in range(spec.num_layers))
    context = ForwardContext(plan, torch.arange(total), kv)
    return model.module.logits(model.module.forward(torch.arange(20, 20 + total), context))


@pytest.mark.parametrize("kind", KINDS)
def test_a_stored_checkpoint_is_what_its_numbers_times_their_scales_are(tmp_path, kind):
    folder = write_stored(tmp_path / "small", kind)
    assert torch.equal(logits(load_model(folder)), logits(load_model(tmp_path / "wide")))


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_linears_that_run_on_the_stored_bits_hold_them_and_are_off_by_the_roundings_of_tokens_alone(
    tmp_path, kind, head_dim
):
    folder = write_stored(tmp_path / "small", kind)
    small, wide = load_model(folder), load_model(folder)
    assert isinstance(small.module, Decoder)
    assert isinstance(wide.module, Decoder)
    count = keep(small.module, folder, lambda _: True)
    pairs = [
        (one, other)
        for one, other in zip(small.module.modules(), wide.module.modules(), strict=True)
        if isinstance(one, Linear) and isinstance(other, Linear)
    ]
    # Stacked queries, keys and values of 192, 96 and 96 rows would share blocks.
    assert count == (len(pairs) * 3 // 4 if "blocks" in kind and head_dim == 48 else len(pairs))
    assert any(one.scale is not None and one.scale.dim() == 2 for one, _ in pairs) == ("blocks" in kind)
    assert count == sum(one.scale is not None for one, _ in pairs)
    for one, other in pairs:
        if one.scale is None:
            continue
        assert one.weight.dtype == FP8
        assert torch.equal(dequantize(one.weight, one.scale, torch.float32), other.weight)
        x = torch.randn(7, one.weight.shape[1])
        truth = linear(x, other.weight)
        assert (one.forward(x) - truth).norm() < ROUNDING * truth.norm()
    truth = logits(wide)
    assert (logits(small) - truth).norm() < 3 * ROUNDING * truth.norm()


def test_a_linear_that_the_device_has_no_product_for_is_kept_wide(tmp_path):
    folder = write_stored(tmp_path / "small", "channel")
    model = load_model(folder)
    assert isinstance(model.module, Decoder)
    assert keep(model.module, folder, runs_on_stored) == 0
    assert quantize(model.module) > 0


def test_a_worker_serves_a_stored_checkpoint(tmp_path):
    folder = write_stored(tmp_path / "small", "blocks")
    for weights in ("stored", "wide", "fp8"):
        settings = WorkerSettings(model=str(folder), weights=weights, device="cpu", threads=1, num_pages=8)
        assert assemble(settings).engine.idle


def changed(config: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(config))
    *above, last = path.split("/")
    place = copy
    for key in above:
        place = place[key]
    place[last] = value
    return copy


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method: 'gptq'"),
        ({"quant_method": "awq"}, "quant_method: 'awq'"),
        ({}, "quant_method: None"),
        ("fp8", "an object"),
        (changed(BLOCKS, "weight_block_size", [64, 128]), "weight_block_size: [64, 128]"),
        (changed(BLOCKS, "activation_scheme", "static"), "activation_scheme: 'static'"),
        (changed(BLOCKS, "fmt", "e5m2"), "fmt: 'e5m2'"),
        (changed(compressed("channel"), "config_groups/group_0/weights/num_bits", 4), "weights.num_bits: 4"),
        (changed(compressed("channel"), "config_groups/group_0/weights/type", "int"), "weights.type: 'int'"),
        (changed(compressed("channel"), "config_groups/group_0/weights/strategy", "group"), "strategy: 'group'"),
        (changed(compressed("channel"), "config_groups/group_0/input_activations/dynamic", False), "dynamic: False"),
        (changed(compressed("channel"), "format", "pack-quantized"), "format: 'pack-quantized'"),
        (changed(compressed("channel"), "config_groups", {}), "config_groups: no groups"),
        (changed(compressed("channel"), "config_groups/group_0", None), "weights: an object"),
        (changed(compressed("channel"), "kv_cache_scheme", {"num_bits": 8}), "kv_cache_scheme"),
    ],
)
def test_a_way_to_store_weights_that_is_not_known_is_refused_by_its_key(tmp_path, config, named):
    folder = write_tiny_model(tmp_path / "model")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "quantization_config": config}))
    with pytest.raises(ModelError) as error:
        load_model(folder)
    assert "quantization_config" in str(error.value)
    assert named in str(error.value)


def test_scales_of_a_wrong_shape_are_refused_by_their_name(tmp_path):
    name = "model.layers.1.mlp.up_proj.weight_scale_inv"

    def cut(weights: dict[str, Tensor]) -> None:
        weights[name] = torch.ones(3, 3)

    with pytest.raises(ModelError, match=f"{name} has shape .3, 3."):
        load_model(write_stored(tmp_path / "small", "blocks", cut))


def test_numbers_of_8_bits_without_scales_are_refused_by_their_name(tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"

    def cut(weights: dict[str, Tensor]) -> None:
        del weights[f"{name}_scale_inv"]

    with pytest.raises(ModelError, match=f"{name} is torch.float8_e4m3fn, but no"):
        load_model(write_stored(tmp_path / "small", "blocks", cut))
