"""Small tokenizers, trained on the spot."""

import functools
import json

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from shared.text import Tokenizer

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|MASK|>"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "system user assistant hello world, 3.14 and 42!",
    "日本語のテキストです。 你好，世界。",
    "emoji 👩‍👩‍👧‍👦 🎉 naïve café — ‘quotes’",
] * 4
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>'"
    " + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level_files(template: str | None = TEMPLATE) -> dict[str, bytes]:
    """Return the files of a byte-level BPE tokenizer, the shape that Qwen, SDAR, LLaDA and Dream have."""
    config: dict[str, object] = {"eos_token": "<|im_end|>", "pad_token": {"content": "<|endoftext|>"}}
    if template is not None:
        config["chat_template"] = template
    return {"tokenizer.json": _byte_level_json(), "tokenizer_config.json": json.dumps(config).encode()}


@functools.cache
def _byte_level_json() -> bytes:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend.to_str().encode()


@functools.cache
def byte_level() -> Tokenizer:
    return Tokenizer.from_files(byte_level_files())


@functools.cache
def byte_fallback() -> Tokenizer:
    """Return a tokenizer of sentencepiece's shape: ▁ for spaces, <0xNN> for what the vocabulary lacks."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    letters = sorted({letter for text in CORPUS[:2] for letter in text if letter != " "})
    vocabulary = {piece: rank for rank, piece in enumerate([*pieces, *letters, "▁t", "he", "▁the"])}
    backend = Backend(
        models.BPE(
            vocab=vocabulary,
            merges=[("▁", "t"), ("h", "e"), ("▁t", "he")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend)


@functools.cache
def word_piece() -> Tokenizer:
    """Return a tokenizer whose decoder joins words, the shape that BERT has."""
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[MASK]"], show_progress=False)
    )
    return Tokenizer(backend)


@functools.cache
def metaspace() -> Tokenizer:
    """Return a Unigram tokenizer with the Metaspace decoder, the shape that T5 has."""
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(vocab_size=120, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False),
    )
    return Tokenizer(backend)
