"""A tiny SDAR checkpoint, made on the spot: real layers and a real tokenizer, random weights."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 320
LAYERS = 4
HIDDEN = 64
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 16
MLP = 128
MAX_MODEL_LEN = 2048
BLOCK_LENGTH = 4

_TEMPLATE = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}<|assistant|>"
_SPECIAL = ["<|pad|>", "<|end|>", "<|mask|>", "<|user|>", "<|assistant|>", "<|system|>"]


def write_tiny_model(folder: Path, seed: int = 0) -> Path:
    """Write config, weights (0.6 MB) and tokenizer into `folder`; the same seed gives the same model."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _train_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {token: tokenizer.token_to_id(token) for token in _SPECIAL}
    _write_json(
        folder / "tokenizer_config.json",
        {"eos_token": "<|end|>", "pad_token": "<|pad|>", "mask_token": "<|mask|>", "chat_template": _TEMPLATE},
    )
    _write_json(
        folder / "config.json",
        {
            "architectures": ["SDARForCausalLM"],
            "model_type": "sdar",
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "intermediate_size": MLP,
            "max_position_embeddings": MAX_MODEL_LEN,
            "block_size": BLOCK_LENGTH,
            "rope_theta": 10_000.0,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "mask_token_id": ids["<|mask|>"],
            "eos_token_id": ids["<|end|>"],
            "pad_token_id": ids["<|pad|>"],
        },
    )
    save_file(_weights(seed), folder / "model.safetensors")
    return folder


def _weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.08

    weights = {"model.embed_tokens.weight": normal(VOCAB, HIDDEN), "model.norm.weight": torch.ones(HIDDEN)}
    for number in range(LAYERS):
        layer = f"model.layers.{number}."
        weights |= {
            layer + "input_layernorm.weight": torch.ones(HIDDEN),
            layer + "post_attention_layernorm.weight": torch.ones(HIDDEN),
            layer + "self_attn.q_proj.weight": normal(HEADS * HEAD_DIM, HIDDEN),
            layer + "self_attn.k_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
            layer + "self_attn.v_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
            layer + "self_attn.o_proj.weight": normal(HIDDEN, HEADS * HEAD_DIM),
            layer + "self_attn.q_norm.weight": torch.ones(HEAD_DIM),
            layer + "self_attn.k_norm.weight": torch.ones(HEAD_DIM),
            layer + "mlp.gate_proj.weight": normal(MLP, HIDDEN),
            layer + "mlp.up_proj.weight": normal(MLP, HIDDEN),
            layer + "mlp.down_proj.weight": normal(HIDDEN, MLP),
        }
    return weights


def _train_tokenizer() -> Tokenizer:
    """Return a byte-level BPE tokenizer of exactly `VOCAB` ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = " ".join(f"{a} {b}" for a in ("once", "upon", "there", "where", "here") for b in ("time", "house", "mouse"))
    tokenizer.train_from_iterator([text * 4], trainer)
    assert tokenizer.get_vocab_size() <= VOCAB
    return tokenizer


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2))
