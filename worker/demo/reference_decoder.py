"""A small batched decoder for block-causal diffusion in plain torch: no cache, every step looks at the whole text.

It exists to evaluate a model where the engine is not at hand and to check the engine against. Two rules keep the fill
after an answer from costing forwards: a position whose best token is the filler takes no turn, and once the closing
token is decided everything after it in the block is closed for free.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.demo.chatml import FILLER_ID, MASK_ID, STOP_ID
from worker.demo.model import DemoModel, dense_attend

POSITIONS_PER_BATCH = 196_608


@dataclass(frozen=True, slots=True)
class Settings:
    """How to decode. Without a threshold one token is decided per step, the surest first."""

    threshold: float | None = 0.9
    block: int = 16
    max_tokens: int = 256


Generation = tuple[list[int], int]  # token ids, the closing token included where it came; forward passes


class ReferenceDecoder:
    """Decodes prompts in batches of similar length."""

    def __init__(self, model: DemoModel) -> None:
        self._model = model.eval()
        self._device = next(model.parameters()).device

    def generate(self, prompts: list[list[int]], settings: Settings) -> list[Generation]:
        """Return what each prompt is answered with, in the order of the prompts."""
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        results: list[Generation] = [([], 0)] * len(prompts)
        while order:
            length = len(prompts[order[-1]]) + 128
            count = max(1, POSITIONS_PER_BATCH // length)
            batch, order = order[-count:], order[:-count]
            for i, result in zip(batch, self._batch([prompts[i] for i in batch], settings), strict=True):
                results[i] = result
        return results

    @torch.inference_mode()
    def _batch(self, prompts: Sequence[list[int]], settings: Settings) -> list[Generation]:
        block, device = settings.block, self._device
        context = self._model.shape.context // block * block
        limits = [min(-(-(len(p) + settings.max_tokens) // block) * block, context) for p in prompts]
        canvas = torch.full((len(prompts), max(limits)), MASK_ID, device=device)
        masked = torch.ones_like(canvas, dtype=torch.bool)
        for i, prompt in enumerate(prompts):
            canvas[i, : len(prompt)] = torch.tensor(prompt, device=device)
            masked[i, : len(prompt)] = False
        start = torch.tensor([len(p) // block * block for p in prompts], device=device)
        limit = torch.tensor(limits, device=device)
        prompt_len = torch.tensor([len(p) for p in prompts], device=device)
        alive = torch.arange(len(prompts), device=device)
        forwards = torch.zeros_like(alive)
        offsets = torch.arange(block, device=device)
        while len(alive):
            positions = start[alive, None] + offsets  # [alive, block]
            end = int(positions.max()) + 1
            tokens, confidence = self._predict(canvas[alive, :end], positions, block)
            forwards[alive] += 1
            open_ = masked[alive[:, None], positions]
            accept = choose(tokens, confidence, open_, settings.threshold)
            block_ids = torch.where(accept, tokens, canvas[alive[:, None], positions])
            open_ = open_ & ~accept
            closing = (block_ids == STOP_ID) & ~open_ & (positions >= prompt_len[alive, None])
            after = closing.int().cumsum(1) - closing.int() > 0  # strictly behind the first closing token
            canvas[alive[:, None], positions] = block_ids.masked_fill(after, FILLER_ID)
            masked[alive[:, None], positions] = open_ & ~after
            filled = ~(open_ & ~after).any(1)
            start[alive] += block * filled
            finished = filled & (closing.any(1) | (start[alive] >= limit[alive]))
            alive = alive[~finished]
        rows, counts = canvas.tolist(), forwards.tolist()
        return [
            (_answer(row[len(prompt) : limit_]), count)
            for row, prompt, limit_, count in zip(rows, prompts, limits, counts, strict=True)
        ]

    def _predict(self, canvas: Tensor, positions: Tensor, block: int) -> tuple[Tensor, Tensor]:
        """Best token and its probability at the positions [rows, block] of the canvas [rows, length]."""
        length, device = canvas.shape[1], canvas.device
        blocks = torch.arange(length, device=device) // block
        attend = dense_attend(blocks[:, None] >= blocks)
        where = torch.arange(length, device=device).expand_as(canvas)
        low = torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()
        with low:
            hidden = self._model(canvas, where, attend)
            index = positions[:, :, None].expand(-1, -1, hidden.shape[-1])
            logits = self._model.logits(hidden.gather(1, index))
        logits = logits.float()
        logits[..., MASK_ID] = -torch.inf
        confidence, tokens = logits.softmax(-1).max(-1)
        return tokens, confidence


def choose(tokens: Tensor, confidence: Tensor, open_: Tensor, threshold: float | None) -> Tensor:
    """Say which open positions of [rows, block] are decided now: at least one in every row that has any."""
    # Fillers rank below every other choice but above decided positions: a row of nothing but fillers still moves.
    rank = torch.where(tokens == FILLER_ID, confidence - 2.0, confidence).masked_fill(~open_, -torch.inf)
    first = torch.zeros_like(open_).scatter_(1, rank.argmax(1, keepdim=True), True)
    accept = first if threshold is None else first | (rank >= threshold)
    return accept & open_


def _answer(ids: list[int]) -> list[int]:
    return ids[: ids.index(STOP_ID) + 1] if STOP_ID in ids else ids
