"""Train the demo model's tokenizer: byte-level BPE in which every digit is a token of its own.

python -m worker.demo.tokenizer --out worker/demo/models/demo
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from worker.demo.chatml import CHAT_TEMPLATE, END_OF_TEXT, MASK, SPECIALS, TURN_END, TURN_START
from worker.demo.mix import Mix
from worker.demo.tables import rows

VOCABULARY = 4096
CONTEXT = 1024

# One digit, a word with an optional space, a run of punctuation with an optional space, white space.
_SPLIT = Regex(r"\p{N}| ?[\p{L}\p{M}]+| ?[^\s\p{L}\p{M}\p{N}]+|\s+")


def new_tokenizer() -> Tokenizer:
    """Build the empty tokenizer: no normaliser, so any UTF-8 text comes back byte for byte."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(_SPLIT, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train_tokenizer(conversations: int, seed: int = 7, vocabulary: int = VOCABULARY) -> Tokenizer:
    """Learn the merges from generated text."""
    tokenizer = new_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(conversations, seed), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and the configuration that carries the chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "additional_special_tokens": [TURN_START, TURN_END],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": TURN_END,
        "mask_token": MASK,
        "model_max_length": CONTEXT,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _corpus(conversations: int, seed: int) -> Iterator[str]:
    """Yield prompts and answers, but no letter-by-letter material: its pairs of letters would become merges."""
    rng, mix = Random(seed), Mix()
    for _ in range(conversations):
        item = mix.item(rng)
        if item.task in ("reverse", "spell", "copy", "acronym"):
            continue
        yield from (f"{role}\n{text}" for role, text in item.turns)
        if not item.letters:
            yield f"assistant\n{item.answer}"
    for table in ("definitions", "countries", "elements"):
        for row in rows(table):
            yield from [" ".join(row)] * 6


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--conversations", type=int, default=120_000)
    arguments = parser.parse_args()
    save_tokenizer(train_tokenizer(arguments.conversations), arguments.out)


if __name__ == "__main__":
    main()
