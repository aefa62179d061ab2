"""Write and read the model folder: SDAR configuration, safetensors shards, tokenizer, model card."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from worker.demo.chatml import FILLER_ID, MASK_ID, STOP_ID
from worker.demo.model import DemoModel, Shape

BLOCK_LENGTH = 16
THRESHOLD = 0.9

_PURPOSE = {
    "demo": """It exists so that a fresh installation answers at once on a CPU. It knows a set of small tasks (sums,
sorting, text and JSON handling, dates, capitals, definitions, short stories, small talk), says so when asked for
anything else, and can be wrong: do not rely on it.""",
    "demo-nano": """It exists for tests: small enough to load at once, and too small to be right. Its texts have the
right form, most of its sums do not add up.""",
}


def configuration(shape: Shape) -> dict[str, Any]:
    """Build config.json with the keys of the SDAR family."""
    return {
        "architectures": ["SDARForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": BLOCK_LENGTH,
        "bos_token_id": FILLER_ID,
        "eos_token_id": FILLER_ID,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "mask_token_id": MASK_ID,
        "max_position_embeddings": shape.context,
        "model_type": "sdar",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "pad_token_id": FILLER_ID,
        "rms_norm_eps": shape.eps,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": shape.vocabulary,
    }


def generation_configuration() -> dict[str, Any]:
    """Build generation_config.json: greedy, by confidence threshold."""
    return {
        "block_length": BLOCK_LENGTH,
        "decoding_strategy": "threshold",
        "do_sample": False,
        "eos_token_id": [STOP_ID, FILLER_ID],
        "mask_token_id": MASK_ID,
        "pad_token_id": FILLER_ID,
        "temperature": 0.0,
        "threshold": THRESHOLD,
    }


def save_model(weights: Mapping[str, Tensor], shape: Shape, folder: Path, shards: int) -> None:
    """Write configuration and bf16 weights; several shards get an index, as large models have."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", configuration(shape))
    _write_json(folder / "generation_config.json", generation_configuration())
    tensors = {name: weights[name].detach().to("cpu", torch.bfloat16).contiguous() for name in sorted(weights)}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    total = sum(tensor.nbytes for tensor in tensors.values())
    files: dict[str, dict[str, Tensor]] = {}
    placed, written = {}, 0
    for name, tensor in tensors.items():
        shard = min(shards, 1 + written * shards // total)
        file = f"model-{shard:05d}-of-{shards:05d}.safetensors"
        files.setdefault(file, {})[name] = tensor
        placed[name] = file
        written += tensor.nbytes
    for file, part in files.items():
        save_file(part, folder / file, metadata={"format": "pt"})
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": placed})


def load_model(folder: Path) -> tuple[DemoModel, Tokenizer]:
    """Read a model folder back, in float32."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape = Shape(
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        intermediate=config["intermediate_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        vocabulary=config["vocab_size"],
        context=config["max_position_embeddings"],
        rope_theta=config["rope_theta"],
        eps=config["rms_norm_eps"],
    )
    model = DemoModel(shape)
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    return model, Tokenizer.from_file(str(folder / "tokenizer.json"))


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Put the tokenizer's files beside the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if source.resolve() != folder.resolve():
            shutil.copyfile(source / name, folder / name)


def write_card(folder: Path, shape: Shape, training: Mapping[str, Any], parameters: int) -> None:
    """Write README.md, the model card."""
    name, stages = folder.name, stages_of(training)
    seconds, steps, tokens, answers = (
        sum(stage[key] for stage in stages) for key in ("seconds", "steps", "tokens", "answer_tokens")
    )
    staged = f" in {len(stages)} stages (see `eval.json`)" if len(stages) > 1 else ""
    text = f"""---
language: en
license: apache-2.0
pipeline_tag: text-generation
tags: [diffusion, block-diffusion, sdar, demo]
---
# {name}

A very small block-diffusion language model ({parameters / 1e6:.2f} million parameters, bf16) in the format of the SDAR
family. {_PURPOSE.get(name, _PURPOSE["demo"])}

| | |
|---|---|
| shape | {shape.layers} layers, hidden {shape.hidden}, {shape.heads}/{shape.kv_heads} heads of {shape.head_dim}, \
feed-forward {shape.intermediate}, vocabulary {shape.vocabulary}, tied embedding |
| context | {shape.context} tokens, rope theta {shape.rope_theta:.0f} |
| decoding | block length 16 (trained on 8, 16 and 32), confidence threshold 0.9, greedy |
| closing token, filler, mask | `<|im_end|>`, `<|endoftext|>`, `<|mask|>` |
| data | text generated by `worker/demo/tasks`, definitions from WordNet 3.0 |
| trained on | {training["device"]}, {seconds:.0f} s, {steps} steps{staged} |
| tokens | {tokens / 1e6:.0f} M positions in packed rows, {answers / 1e6:.0f} M of them hidden and predicted |
| final loss | {training["loss"]:.4f} |

Build one with `python -m worker.demo.train --size {name.removeprefix("demo-")} --out DIR`, measure it with
`python -m worker.demo.evaluate --model DIR`.
`eval.json` holds the figures of this copy on items that training never saw. The WordNet notice is in `../../NOTICE`.
"""
    (folder / "README.md").write_text(text, encoding="utf-8")


def stages_of(training: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The runs that led to a model, first one first."""
    return [] if training is None else [*stages_of(training.get("continues")), training]


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
