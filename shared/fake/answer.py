"""What a fake worker answers: a function of the command alone, so that another one can go on with it."""

import math
import random
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from struct import pack

from shared.card import ModelCard
from shared.commands import Generate
from shared.events import FinishDetail, FinishReason, TokenLogprob
from shared.holes import HOLE
from shared.text import TextStream, Tokenizer

EMBEDDING_SIZE = 64

_TOKENS_A_STEP = 4
_WORDS = (
    "a made up answer of the fake worker has no sense but it comes in blocks and every block takes a few steps so that "
    "streams and canvases and limits can be tried without any model at hand on any machine"
).split()
_USUAL_LENGTH = (24, 96)
"""Tokens of an answer that nothing bounds."""


@dataclass(frozen=True, slots=True)
class Block:
    """Positions that are decided together, in an order that is not theirs."""

    token_ids: tuple[int, ...]
    confidence: tuple[float, ...]
    steps: tuple[tuple[int, ...], ...]
    """The positions that each step decides; the last step decides what is left."""

    def canvas(self, step: int) -> tuple[list[int | None], list[float]]:
        """Return tokens (None: masked) and confidence after so many steps."""
        known = {position for decided in self.steps[:step] for position in decided}
        tokens = [token if position in known else None for position, token in enumerate(self.token_ids)]
        return tokens, [sure if at in known else 0.0 for at, sure in enumerate(self.confidence)]

    def logprobs(self, count: int) -> list[TokenLogprob]:
        return [
            TokenLogprob(math.log(sure), [(token, math.log(sure))] if count else [])
            for token, sure in zip(self.token_ids, self.confidence, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Answer:
    blocks: tuple[Block, ...]
    reason: FinishReason
    detail: FinishDetail


def answer(command: Generate, card: ModelCard, tokenizer: Tokenizer) -> Answer:
    """Make an answer up, within the limits of the command."""
    dice = random.Random(f"{command.sampling.seed}:{command.prompt}")
    words = _words(dice, tokenizer)
    if command.template is not None:
        filled = [next(words) if token == HOLE else token for token in command.template]
        return Answer((_block(filled, dice),), "stop", "filled")
    limits = command.limits
    room = min(limits.max_tokens, card.max_model_len - len(command.prompt))
    wanted = room if limits.ignore_eos else max(limits.min_tokens, dice.randint(*_USUAL_LENGTH))
    said = list(islice(words, min(wanted, room)))
    reason: FinishReason
    detail: FinishDetail
    if wanted < room:
        reason, detail = "stop", "stop_token"
    else:
        reason, detail = "length", "max_tokens" if room == limits.max_tokens else "max_model_len"
    if (end := _stopped(said, limits.stop, tokenizer)) is not None:
        said, reason, detail = said[:end], "stop", "stop_string"
    length = command.block_length or card.block_length
    blocks = [_block(said[start : start + length], dice) for start in range(0, len(said), length)]
    nfe = 0
    for number, block in enumerate(blocks, start=1):
        nfe += len(block.steps)
        if limits.max_nfe is not None and nfe >= limits.max_nfe and number < len(blocks):
            return Answer(tuple(blocks[:number]), "length", "max_nfe")
    return Answer(tuple(blocks), reason, detail)


def embedding(command: Generate) -> str:
    """Return a vector of length 1 that depends on the text, as the event carries it."""
    dice = random.Random(f"{command.prompt}")
    values = [dice.gauss(0.0, 1.0) for _ in range(EMBEDDING_SIZE)]
    length = math.sqrt(sum(value * value for value in values))
    return b64encode(pack(f"<{EMBEDDING_SIZE}f", *(value / length for value in values))).decode()


def _words(dice: random.Random, tokenizer: Tokenizer) -> Iterator[int]:
    """Yield the tokens of sentences without an end."""
    before = ""
    while True:
        words = dice.choices(_WORDS, k=dice.randint(5, 12))
        yield from tokenizer.encode(f"{before}{' '.join(words).capitalize()}.", add_special=False)
        before = " "


def _block(token_ids: Sequence[int], dice: random.Random) -> Block:
    order = dice.sample(range(len(token_ids)), len(token_ids))
    steps = tuple(tuple(order[start : start + _TOKENS_A_STEP]) for start in range(0, len(order), _TOKENS_A_STEP))
    return Block(tuple(token_ids), tuple(round(dice.uniform(0.5, 1.0), 3) for _ in token_ids), steps)


def _stopped(token_ids: Sequence[int], stop: tuple[str, ...], tokenizer: Tokenizer) -> int | None:
    """Return how many tokens there are up to the first stop string, None without one."""
    if not stop:
        return None
    text = TextStream(tokenizer, stop)
    for count, token in enumerate(token_ids, start=1):
        text.push([token])
        if text.stopped:
            return count
    return None
