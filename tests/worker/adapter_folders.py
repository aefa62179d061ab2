"""Random adapters for tests, written by `peft` itself, and the merged weights that they stand for."""

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shared.adapters import Shape


def write_adapter(
    folder: Path,
    weights: Mapping[str, Tensor],
    shapes: Mapping[str, Shape],
    *,
    rank: int = 4,
    alpha: float = 8.0,
    rslora: bool = False,
    leaves: Sequence[str] | None = None,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Write an adapter on the modules of `shapes` (of `leaves`, or all); return `weights` as peft merges them.

    Peft sees a tree of plain linear layers under the checkpoint's own names, with the checkpoint's weights.
    """
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    chosen = sorted(leaves or {name.rpartition(".")[2] for name in shapes})
    tree = nn.Module()
    for name, (outputs, inputs) in shapes.items():
        linear = nn.Linear(inputs, outputs, bias=False)
        linear.weight.data = weights[f"{name}.weight"].float().clone()
        _place(tree, name, linear)
    config = LoraConfig(r=rank, lora_alpha=alpha, use_rslora=rslora, target_modules=chosen, bias="none")  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(tree, config)  # type: ignore[arg-type]
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn_like(parameter) / 4
        adapted.save_pretrained(str(folder))
        merged: Any = adapted.merge_and_unload()  # type: ignore[operator]
    found = {f"{name}.weight": merged.get_submodule(name).weight.detach() for name in shapes}
    return {**weights, **found}


def write_merged(folder: Path, base: Path, weights: Mapping[str, Tensor]) -> Path:
    """Write a checkpoint like `base` with other weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in base.glob("*.json"):
        if not path.name.startswith("golden"):
            (folder / path.name).write_bytes(path.read_bytes())
    save_file({name: value.contiguous() for name, value in weights.items()}, folder / "model.safetensors")
    return folder


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return a checkpoint's tensors."""
    index = folder / "model.safetensors.index.json"
    files = set(json.loads(index.read_bytes())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    return {name: value for file in sorted(files) for name, value in load_file(folder / file).items()}


def _place(tree: nn.Module, name: str, leaf: nn.Module) -> None:
    *path, last = name.split(".")
    for part in path:
        if not hasattr(tree, part):
            tree.add_module(part, nn.Module())
        tree = getattr(tree, part)
    tree.add_module(last, leaf)
