"""Packed training rows.

A conversation becomes one document: a clean copy of its tokens, then for every answer a noisy copy of just the blocks
that the answer occupies. Five index arrays say who may look at whom (see ``model.visible``), so documents of any
length and block size share a row without padding.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from worker.demo.chatml import ANSWER_START, FILLER_ID, MASK_ID, STOP_ID, render_turns
from worker.demo.mix import Conversation

Int16 = npt.NDArray[np.int16]

IDS, LABELS, POSITIONS, DOCUMENTS, BLOCKS, SEGMENTS = range(6)  # first axis of a packed batch
BLOCK_LENGTHS = (8, 16, 16, 32)
NO_LABEL = -1


@dataclass(frozen=True, slots=True)
class Tokens:
    """A conversation in token ids, and the span of each answer with its closing token."""

    ids: list[int]
    answers: list[tuple[int, int]]  # start, end


def encode(conversation: Conversation, tokenizer: Tokenizer) -> Tokens:
    """Encode as the server would: the prompt as one text, the answer on its own."""
    ids: list[int] = []
    spans: list[tuple[int, int]] = []
    for index, item in enumerate(conversation.items):
        prompt = ("\n" if index else "") + render_turns(item.turns) + ANSWER_START
        ids += tokenizer.encode(prompt, add_special_tokens=False).ids
        start = len(ids)
        ids += [*encode_answer(item.answer, tokenizer, item.letters), STOP_ID]
        spans.append((start, len(ids)))
    return Tokens(ids, spans)


def encode_answer(answer: str, tokenizer: Tokenizer, letters: bool) -> list[int]:
    """Encode an answer, one character a token where the task is about letters."""
    if not letters:
        return tokenizer.encode(answer, add_special_tokens=False).ids
    return [token for letter in answer for token in tokenizer.encode(letter, add_special_tokens=False).ids]


def document(tokens: Tokens, block: int, rng: np.random.Generator) -> Int16:
    """Lay out one conversation: [6, length] without the document index."""
    ids = np.array(tokens.ids, dtype=np.int16)
    clean_len = (tokens.answers[-1][1] - 1) // block * block  # nobody looks at the last block's clean copy
    parts = [_columns(ids[:clean_len], np.full(clean_len, NO_LABEL), np.arange(clean_len), block, 0)]
    for segment, (start, end) in enumerate(tokens.answers, 1):
        first, last = start // block * block, -(-end // block) * block
        positions = np.arange(first, last)
        truth = np.full(last - first, FILLER_ID, dtype=np.int16)
        truth[: end - first] = ids[first:end]
        hidden = _hidden(positions, start, end, block, rng)
        noisy, labels = np.where(hidden, MASK_ID, truth), np.where(hidden, truth, NO_LABEL)
        parts.append(_columns(noisy, labels, positions, block, segment))
    return np.concatenate(parts, axis=1)


def _columns(ids: npt.NDArray, labels: npt.NDArray, positions: npt.NDArray, block: int, segment: int) -> Int16:
    document, segments = np.zeros_like(positions), np.full_like(positions, segment)
    return np.stack([ids, labels, positions, document, positions // block, segments]).astype(np.int16)


def _hidden(
    positions: npt.NDArray, start: int, end: int, block: int, rng: np.random.Generator
) -> npt.NDArray[np.bool_]:
    """Choose what is hidden: each block draws t and hides each of its answer tokens with probability t.

    The fill after the closing token is mostly as the decoder leaves it: undecided until the closing token is
    decided, then all known. Some rows hide it freely, for decoders without that rule.
    """
    blocks = (positions - positions[0]) // block
    level = rng.random(int(blocks[-1]) + 1)
    level[rng.random(len(level)) < 0.15] = 1.0  # decoding always starts from a block with nothing decided
    hidden = (rng.random(len(positions)) < level[blocks]) & (positions >= start)
    first, last = start - positions[0], end - positions[0]
    if not hidden[first:last].any():
        hidden[rng.integers(first, last)] = True
    if rng.random() < 0.85:
        hidden[last:] = hidden[last - 1]
    return hidden


def pack(documents: Iterator[Int16], row_count: int, row_len: int) -> Int16:
    """Fill [6, row_count, row_len] with whole documents; what stays empty is a document of its own."""
    batch = np.zeros((6, row_count, row_len), dtype=np.int16)
    batch[LABELS], batch[DOCUMENTS] = NO_LABEL, -1
    row, at, index = 0, 0, 0
    for columns in documents:
        length = columns.shape[1]
        if length > row_len:
            continue
        if at + length > row_len:
            row, at, index = row + 1, 0, 0
            if row == row_count:
                return batch
        columns[DOCUMENTS] = index
        batch[:, row, at : at + length] = columns
        at, index = at + length, index + 1
    raise ValueError("the stream of documents ended before the batch was full")
