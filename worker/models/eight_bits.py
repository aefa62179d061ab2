"""Checkpoints whose weights are stored in 8 bits: e4m3 beside scales.

Read are the layouts of DeepSeek-V3 and Qwen3-FP8 (`quant_method: fp8`: `weight_scale_inv` for each block of 128 x 128)
and of compressed-tensors (`weight_scale` for each output, each block, or the whole weight). All else is refused.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from kernels.fp8 import BLOCK, FP8
from worker.models.checkpoint import Checkpoint, ModelError
from worker.models.layers import Decoder, Linear
from worker.models.weights import locate, read_scale, scale_names

_KEY = "quantization_config"
_KNOWN = "supported are fp8 and compressed-tensors with weights of e4m3 and scales for outputs or blocks of 128 x 128"


def check_format(checkpoint: Checkpoint) -> None:
    """Raise `ModelError` for weights that are stored in a way that cannot be read, naming the key of config.json."""
    config = checkpoint.config.get(_KEY)
    if config is None:
        return
    if not isinstance(config, dict):
        raise _refuse(checkpoint, "", f"an object was expected, not {config!r}")
    match config.get("quant_method"):
        case "fp8":
            _check(checkpoint, config, "weight_block_size", (None, [BLOCK, BLOCK]))
            _check(checkpoint, config, "fmt", (None, "e4m3", "float8_e4m3fn"))
            _check(checkpoint, config, "activation_scheme", (None, "dynamic"))
        case "compressed-tensors":
            _check(checkpoint, config, "format", (None, "float-quantized", "naive-quantized"))
            _check(checkpoint, config, "kv_cache_scheme", (None,))
            groups = config.get("config_groups")
            if not isinstance(groups, dict) or not groups:
                raise _refuse(checkpoint, ".config_groups", "no groups are there")
            for name, group in groups.items():
                _check_group(checkpoint, group, f".config_groups.{name}")
        case method:
            raise _refuse(checkpoint, ".quant_method", f"{method!r} is not supported; {_KNOWN}")


def _check_group(checkpoint: Checkpoint, group: object, path: str) -> None:
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(group, dict) or not isinstance(weights, dict):
        raise _refuse(checkpoint, f"{path}.weights", "an object was expected")
    for key, allowed in (
        ("num_bits", (8,)),
        ("type", ("float",)),
        ("symmetric", (None, True)),
        ("dynamic", (None, False)),
        ("strategy", ("channel", "tensor", "block")),
        ("block_structure", (None, [BLOCK, BLOCK])),
    ):
        _check(checkpoint, weights, key, allowed, f"{path}.weights")
    inputs = group.get("input_activations")
    if isinstance(inputs, dict):
        # Tokens are quantized by what is in them; scales measured beforehand are another rule.
        _check(checkpoint, inputs, "dynamic", (True,), f"{path}.input_activations")
    _check(checkpoint, group, "output_activations", (None,), path)


def _check(
    checkpoint: Checkpoint, config: Mapping[str, Any], key: str, allowed: tuple[object, ...], path: str = ""
) -> None:
    if config.get(key) not in allowed:
        told = " or ".join(repr(value) for value in allowed if value is not None) or "none"
        raise _refuse(checkpoint, f"{path}.{key}", f"{config.get(key)!r} is not supported, only {told}; {_KNOWN}")


def _refuse(checkpoint: Checkpoint, path: str, why: str) -> ModelError:
    return ModelError(f"{checkpoint.folder / 'config.json'}: {_KEY}{path}: {why}")


@dataclass(frozen=True, slots=True)
class _Piece:
    """One projection as it is stored."""

    weight: str
    """Name of the tensor."""
    rows: tuple[int, int]


def keep(module: nn.Module, folder: Path, able: Callable[[Linear], bool]) -> int:
    """Put the stored 8 bits back in the place of what they were loaded as; return how many linears run on them.

    A linear stays as it is where `able` says so, where the checkpoint has it in more bits, or where a block would reach
    over two of its projections.
    """
    if not isinstance(module, Decoder) or _KEY not in json.loads((folder / "config.json").read_bytes()):
        return 0
    places = locate(folder)
    scales = scale_names(places)
    count = 0
    for linear in module.modules():
        if not isinstance(linear, Linear) or not linear.pieces or not able(linear):
            continue
        pieces = [_Piece(f"{name}.weight", rows) for name, rows in linear.pieces.items()]
        if not all(piece.weight in scales for piece in pieces):
            continue
        found = [_read(places, piece.weight, scales[piece.weight]) for piece in pieces]
        stacked = _stack([weight for weight, _ in found], [scale for _, scale in found])
        if stacked is None:
            continue
        weight, scale = (part.to(linear.weight.device) for part in stacked)
        linear.weight = nn.Parameter(weight, requires_grad=False)
        linear.scale = nn.Parameter(scale, requires_grad=False)
        count += 1
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return count


def _read(places: Mapping[str, Path], name: str, scale: str) -> tuple[Tensor, Tensor]:
    with safe_open(places[name], framework="pt") as file:
        weight: Tensor = file.get_tensor(name)
    return weight, read_scale(places[scale], scale, weight)


def _stack(weights: list[Tensor], scales: list[Tensor]) -> tuple[Tensor, Tensor] | None:
    """Return projections under one another; None if their scales cannot be."""
    if any(weight.dtype != FP8 for weight in weights):
        return None
    blocks = {scale.dim() == 2 for scale in scales}
    if len(blocks) > 1 or (True in blocks and any(weight.shape[0] % BLOCK for weight in weights[:-1])):
        return None
    each = [
        scale.expand(weight.shape[0]) if scale.dim() == 0 else scale
        for weight, scale in zip(weights, scales, strict=True)
    ]
    # Bytes are stacked: not every device knows how to join numbers of 8 bits.
    return torch.cat([weight.view(torch.uint8) for weight in weights]).view(FP8), torch.cat(each).contiguous()
