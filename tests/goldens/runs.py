"""A golden run as a request, with what the engine must answer."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kernels.noise import uniform
from shared.commands import Generate
from worker.decoding.types import Draw


@dataclass(frozen=True, slots=True)
class Run:
    request: Generate
    tokens: list[int]
    nfe: int
    uniforms: Tensor | None = None
    """[steps, positions from the prompt's end] float32: numbers that the reference drew, by its step and position."""
    steps_per_block: int = 0
    """Steps of each block, where `uniforms` counts them over all blocks; 0: one block."""
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    """Facts of the checkpoint that the reference's arguments change."""
    shown: int | None = None
    """How many tokens the reference returns at most of what it has decided."""
    cut_at: int | None = None
    """Token at which the reference cuts what it has decided, having decoded on behind it."""

    @property
    def answer(self) -> tuple[list[int], int]:
        return self.tokens, self.nfe

    def observe(self, result: tuple[list[int], int]) -> tuple[list[int], int]:
        """Return of our tokens and forwards what the reference would have returned."""
        tokens, nfe = result
        tokens = tokens[: self.shown]
        return tokens[: tokens.index(self.cut_at)] if self.cut_at in tokens else tokens, nfe


def replay(runs: Iterable[Run]) -> Draw:
    """Return draws that repeat what the references drew; each run is known by its request's seed.

    Positions and steps are [rows, block] or broadcast to it; numbers that no reference drew are the product's own.
    """
    known = {run.request.sampling.seed: run for run in runs if run.uniforms is not None}

    def draw(seed: Tensor, position: Tensor, step: Tensor) -> Tensor:
        seed, position, step = torch.broadcast_tensors(seed, position, step)
        device = position.device
        drawn = uniform(seed, position, step, torch.tensor(0, device=device))
        for row, number in enumerate(seed[:, 0].tolist()):
            if number not in known:
                continue
            run = known[number]
            assert run.uniforms is not None
            place = position[row] - len(run.request.prompt)
            block = place // (run.request.block_length or run.uniforms.shape[1])
            index = step[row] + block * run.steps_per_block
            inside = (place >= 0) & (place < run.uniforms.shape[1]) & (index < run.uniforms.shape[0])
            drawn[row, inside] = run.uniforms.to(device)[index[inside], place[inside]]
        return drawn

    return draw
