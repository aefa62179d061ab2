"""Between a step's proposals and its decision: guarded canvases get theirs from their guards."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress, islice

import torch
from torch import Tensor

from kernels.attention import upload
from shared.events import TokenLogprob
from worker.constraints.scores import CanvasScores
from worker.decoding.types import BlockView, TokenStats
from worker.engine.plan import Canvas, DeadEnd, Fill
from worker.logprobs import report


@dataclass(frozen=True, slots=True)
class Shown:
    """What a guard is shown of n wanted positions of its canvas, in order."""

    edited: Tensor
    """[n, vocab]: the logits that it chooses by, the model's dtype or float32."""
    own: Tensor
    """[n, vocab]: the model's, which log-probabilities are of."""
    tokens: Sequence[int]
    """[n]: what the model proposes by itself."""


@dataclass(slots=True)
class Filling:
    """What the guards propose for the canvases of a step."""

    fills: dict[int, Fill] = field(default_factory=dict[int, Fill])
    """By number of the canvas."""
    faults: dict[int, str] = field(default_factory=dict[int, str])
    logprobs: dict[int, list[TokenLogprob | None]] = field(default_factory=dict[int, list[TokenLogprob | None]])
    """[block] of the canvases that report them."""

    _shown: dict[int, list[Shown]] = field(default_factory=dict[int, list[Shown]])
    """Of the canvas that is not whole yet: at most one, as they are shown in order."""

    def show(self, number: int, canvas: Canvas, part: Shown, barred: Tensor) -> None:
        """Show the next of a canvas's wanted positions; once it has seen all of them, its guard proposes.

        Nothing of the logits is kept behind that: those of all guarded canvases together have no bound.
        """
        parts = [*self._shown.pop(number, ()), part]
        wanted = list(compress(range(len(canvas.masked)), canvas.masked))
        if canvas.guarded is None:
            return
        if sum(len(each.tokens) for each in parts) < len(wanted):
            self._shown[number] = parts
            return
        scores = CanvasScores(
            canvas,
            {index: place for place, index in enumerate(wanted)},
            [each.edited for each in parts],
            [token for each in parts for token in each.tokens],
            barred,
            greedy=canvas.sampling.temperature == 0 or canvas.sampling.top_k == 1,
        )
        try:
            fill = canvas.guarded.guard.fill(canvas.guarded, canvas.masked, scores)
        except (DeadEnd, ValueError) as error:
            self.faults[number] = str(error)
            return
        self.fills[number] = fill
        if canvas.logprobs is not None:
            self.logprobs[number] = _report(canvas, wanted, [each.own for each in parts], fill, barred)

    def replace(self, stats: TokenStats, view: BlockView) -> None:
        """Put the guards' proposals in place of the model's, in place; what is not open is no longer masked."""
        for number, fill in self.fills.items():
            length, device = len(fill.tokens), stats.token.device
            stats.token[number, :length] = upload(torch.tensor(fill.tokens, dtype=torch.int64), device)
            stats.confidence[number, :length] = upload(torch.tensor(fill.confidence, dtype=torch.float32), device)
            view.masked[number, :length] &= upload(torch.tensor(fill.open), device)

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
    canvas: Canvas, wanted: Sequence[int], parts: Sequence[Tensor], fill: Fill, barred: Tensor
) -> list[TokenLogprob | None]:
    told: list[TokenLogprob | None] = [None] * len(canvas.masked)
    left = iter(wanted)
    for logits in parts:
        indexes = list(islice(left, logits.shape[0]))
        tokens = upload(torch.tensor([fill.tokens[index] for index in indexes]), logits.device)
        found = report(logits, tokens, [canvas] * len(indexes), barred)
        for row, index in enumerate(indexes):
            told[index] = found[row]
    return told
