"""Small random checkpoints in the real format, written by the tests that read them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

TINY: dict[str, Any] = {
    "architectures": ["SDARForCausalLM"],
    "block_size": 4,
    "eos_token_id": 61,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 24,
    "intermediate_size": 40,
    "mask_token_id": 60,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 64,
}


def tiny_weights(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Return weights under the names of the released checkpoints."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    weights = {
        "model.embed_tokens.weight": matrix(config["vocab_size"], hidden),
        "model.norm.weight": 1 + matrix(hidden),
    }
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = 8 * matrix(config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": 1 + matrix(hidden),
            prefix + "post_attention_layernorm.weight": 1 + matrix(hidden),
            prefix + "self_attn.q_proj.weight": matrix(heads * dim, hidden),
            prefix + "self_attn.k_proj.weight": matrix(kv_heads * dim, hidden),
            prefix + "self_attn.v_proj.weight": matrix(kv_heads * dim, hidden),
            prefix + "self_attn.o_proj.weight": matrix(hidden, heads * dim),
            prefix + "self_attn.q_norm.weight": 1 + matrix(dim),
            prefix + "self_attn.k_norm.weight": 1 + matrix(dim),
            prefix + "mlp.gate_proj.weight": matrix(inner, hidden),
            prefix + "mlp.up_proj.weight": matrix(inner, hidden),
            prefix + "mlp.down_proj.weight": matrix(hidden, inner),
        }
    return weights


def write_checkpoint(
    folder: Path,
    *,
    weights: dict[str, Tensor] | None = None,
    generation: dict[str, Any] | None = None,
    shards: int = 1,
    **changes: Any,
) -> Path:
    """Write a folder that `load_model` reads; a change to None removes the key from config.json."""
    config = {key: value for key, value in (TINY | changes).items() if value is not None}
    weights = tiny_weights(TINY | changes) if weights is None else weights
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    names = sorted(weights)
    weight_map = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(weight_map.values())):
        save_file({name: weights[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def write_tokenizer(folder: Path, size: int, **names: str) -> None:
    """Write a tokenizer of `size` ids: t0, t1, ...; `names` go to tokenizer_config.json."""
    vocab = {f"t{i}": i for i in range(size - 1)}
    added = [{"id": size - 1, "content": f"t{size - 1}"}]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": added}))
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
