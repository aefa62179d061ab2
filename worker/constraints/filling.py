"""Between a step's proposals and its decision: guarded canvases get theirs from their guards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress

import torch
from torch import Tensor

from shared.events import TokenLogprob
from worker.constraints.scores import CanvasScores
from worker.decoding.types import BlockView, TokenStats
from worker.engine.plan import Canvas, DeadEnd, Fill
from worker.logprobs import report


@dataclass(slots=True)
class Filling:
    """What the guards propose for the canvases of a step."""

    fills: dict[int, Fill] = field(default_factory=dict[int, Fill])
    """By number of the canvas."""
    faults: dict[int, str] = field(default_factory=dict[int, str])
    logprobs: dict[int, list[TokenLogprob | None]] = field(default_factory=dict[int, list[TokenLogprob | None]])
    """[block] of the canvases that report them."""

    @classmethod
    def of(
        cls,
        canvases: Mapping[int, Canvas],
        logits: Mapping[int, Sequence[tuple[Tensor, Tensor]]],
        stats: TokenStats,
        barred: Tensor,
    ) -> "Filling":
        """Ask the guards. logits [wanted, vocab] of each guarded canvas, in parts: edited ones and the model's own."""
        found = cls()
        for number, canvas in canvases.items():
            if canvas.guarded is None or not any(canvas.masked):
                continue
            wanted = list(compress(range(len(canvas.masked)), canvas.masked))
            proposed = [int(token) for token in stats.token[number].tolist()]
            scores = CanvasScores(
                canvas,
                {index: place for place, index in enumerate(wanted)},
                torch.cat([edited for edited, _ in logits[number]]),
                [proposed[index] for index in wanted],
                barred,
                greedy=canvas.sampling.temperature == 0 or canvas.sampling.top_k == 1,
            )
            try:
                found.fills[number] = canvas.guarded.guard.fill(canvas.guarded, canvas.masked, scores)
            except (DeadEnd, ValueError) as error:
                found.faults[number] = str(error)
                continue
            if canvas.logprobs is not None:
                own = torch.cat([model for _, model in logits[number]])
                found.logprobs[number] = _report(canvas, wanted, own, found.fills[number], barred)
        return found

    def replace(self, stats: TokenStats, view: BlockView) -> None:
        """Put the guards' proposals in place of the model's, in place; what is not open is no longer masked."""
        for number, fill in self.fills.items():
            length, device = len(fill.tokens), stats.token.device
            stats.token[number, :length] = torch.tensor(fill.tokens, dtype=torch.int64, device=device)
            stats.confidence[number, :length] = torch.tensor(fill.confidence, dtype=torch.float32, device=device)
            view.masked[number, :length] &= torch.tensor(fill.open, device=device)

    def settle(self, number: int, accepted: list[bool]) -> list[bool]:
        """Return what is accepted of a canvas: its end only where everything before it is decided.

        What the text up to it leaves no choice for is accepted too: the next forward would decide nothing else.
        """
        fill = self.fills.get(number)
        if fill is None:
            return accepted
        accepted = _with_forced(accepted, fill)
        if fill.end is None or not accepted[fill.end]:
            return accepted
        left = [index for index in compress(range(fill.end), fill.open[: fill.end]) if not accepted[index]]
        if not left:
            return accepted
        accepted = [*accepted[: fill.end], False, *accepted[fill.end + 1 :]]
        if not any(accepted):
            accepted[left[0]] = True
            accepted = _with_forced(accepted, fill)
        return accepted


def _with_forced(accepted: list[bool], fill: Fill) -> list[bool]:
    """Return what is accepted, and with it what is forced as far as nothing before it is left undecided."""
    accepted = accepted[:]
    for index, (may, forced) in enumerate(zip(fill.open, fill.forced, strict=False)):
        if may and not accepted[index]:
            if not forced:
                break
            accepted[index] = True
    return accepted


def _report(
    canvas: Canvas, wanted: Sequence[int], logits: Tensor, fill: Fill, barred: Tensor
) -> list[TokenLogprob | None]:
    tokens = torch.tensor([fill.tokens[index] for index in wanted], dtype=torch.int64, device=logits.device)
    found = report(logits, tokens, [canvas] * len(wanted), barred)
    told: list[TokenLogprob | None] = [None] * len(canvas.masked)
    for row, index in enumerate(wanted):
        told[index] = found[row]
    return told
