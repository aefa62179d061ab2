"""Weights of 8 bits, made when a model is loaded, and what else can be in 8 bits."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from kernels.fp8 import BLOCK, FP8, quantize_rows
from kernels.moe import Experts
from worker.models import LoadedModel, ModelError
from worker.models.layers import Decoder, Linear, MoeMLP
from worker.models.spec import Commit

_MULTIPLE = 16
"""Columns and rows of a product come in so many."""
_ROWS_AT_ONCE = 16_384
"""A head is quantized in parts: in float32 it would take four times its room."""


def quantize_as_asked(module: object, weights: str, head: str, folder: Path) -> None:
    """Do what the settings `weights` and `head` ask for. Raises `ModelError`, naming the folder of the model."""
    if weights == "fp8" and not (isinstance(module, nn.Module) and quantize(module)):
        raise ModelError(f"{folder}: weights fp8: this family has no layers for them")
    if head == "fp8" and not (isinstance(module, nn.Module) and quantize_head(module)):
        raise ModelError(f"{folder}: head fp8: this family has no such head, or its sides are odd")


def quantize(module: nn.Module) -> int:
    """Turn the linears and the experts of a decoder's layers into e4m3, in place; return how many are.

    Embedding, head, norms and routers stay as they are, and so do weights whose sides are no multiple of 16.
    """
    count = 0
    if not isinstance(module, Decoder):
        return count
    for each in module.modules():
        if isinstance(each, MoeMLP) and _fits(each.gate_up[0]) and _fits(each.down[0]):
            if each.gate_up_scale is None:
                each.hold(quantize_experts(each.stack()))
            count += 1
        elif isinstance(each, Linear) and _fits(each.weight):
            if each.scale is None:
                weight, scale = quantize_rows(each.weight)
                each.weight = nn.Parameter(weight, requires_grad=False)
                each.scale = nn.Parameter(scale[:, 0].contiguous(), requires_grad=False)
            count += 1
    _tidy()
    return count


def quantize_experts(stack: Experts) -> Experts:
    """Return experts of e4m3 with a scale for each output."""
    gate_up, gate_up_scale = _quantize_each(stack.gate_up)
    down, down_scale = _quantize_each(stack.down)
    return Experts(gate_up, down, gate_up_scale, down_scale, stack.shared)


def _quantize_each(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize weight [experts, outputs, inputs] one by one: in float32 they take four times their room."""
    values = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    scale = torch.empty(weight.shape[:2], dtype=torch.float32, device=weight.device)
    for number, expert in enumerate(weight):
        quantized = quantize_rows(expert)
        values[number], scale[number] = quantized.values, quantized.scale[:, 0]
    return values, scale


def runs_on_stored(module: Linear | MoeMLP) -> bool:
    """Tell whether the device has products for the weights and scales of a linear, or of experts, as checkpoints of 8
    bits store them."""
    if isinstance(module, MoeMLP):
        device = module.down.device
        return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    device = module.weight.device
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0) and _fills_blocks(module.weight)


def _fills_blocks(weight: Tensor) -> bool:
    # The scales of an output's blocks must fill 16 bytes.
    return weight.shape[1] % (4 * BLOCK) == 0 and weight.shape[0] % _MULTIPLE == 0


def quantize_head(module: nn.Module) -> bool:
    """Turn the vocabulary head of a decoder into e4m3; return whether it is.

    Where it is tied to the embedding, that one stays, so that the head takes room of its own.
    """
    if not isinstance(module, Decoder) or not _fits(module.head):
        return False
    if module.head_scale is None:
        head = module.head
        values = torch.empty(head.shape, dtype=FP8, device=head.device)
        scale = torch.empty(head.shape[0], dtype=torch.float32, device=head.device)
        for first in range(0, head.shape[0], _ROWS_AT_ONCE):
            part = slice(first, first + _ROWS_AT_ONCE)
            quantized = quantize_rows(head[part])
            values[part], scale[part] = quantized.values, quantized.scale[:, 0]
        module.head = nn.Parameter(values, requires_grad=False)
        module.head_scale = nn.Parameter(scale, requires_grad=False)
        _tidy()
    return True


def with_small_pages(model: LoadedModel, folder: Path) -> LoadedModel:
    """Return the model with pages of 8 bits; raises `ModelError` for a family that cannot read them."""
    if not isinstance(model.module, Decoder) or model.spec.commit is Commit.ENCODED:
        raise ModelError(f"{folder}: kv_dtype fp8: this family reads pages of 16 or 32 bits only")
    return replace(model, kv_dtype=FP8)


def _fits(weight: Tensor) -> bool:
    return all(side % _MULTIPLE == 0 for side in weight.shape)


def _tidy() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
