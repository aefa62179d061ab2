"""Linear speculation (Nemotron-Labs-Diffusion, arXiv 2607.05722): diffusion drafts a block, causal decoding checks it.

A block begins with a token that is certain. The block is drafted in one forward, or in several by a threshold; then one
causal forward over it proposes what follows each position. The drafts that are equal to those proposals are kept, and
the first proposal behind them: tokens of causal decoding, of which a check may bring many.
"""

from dataclasses import replace
from itertools import takewhile

from shared.decoding import LinearSpeculation
from worker.engine.plan import UNDECIDED, Canvas, Row
from worker.engine.ports import RowDecision
from worker.engine.sliding import Sliding
from worker.engine.window import Window
from worker.models.spec import Attention, Commit, ModelSpec


def checks_causally(spec: ModelSpec) -> bool:
    """Tell whether the model decodes both ways: a block as a whole, and text token by token."""
    return (
        spec.attention is Attention.BLOCK_CAUSAL and spec.commit is Commit.SEEDED and spec.context is Attention.CAUSAL
    )


class Speculative(Sliding):
    """The canvas is the last certain token and the drafts behind it; blocks begin wherever that token stands."""

    __slots__ = ("_certain",)

    _certain: int
    """End of the tokens that causal decoding gives."""

    @property
    def block_end(self) -> int:
        return self._certain

    @property
    def complete(self) -> bool:
        if self.stop is not None and self.decoding.early_stop:
            return True
        return self._certain > self.published

    @property
    def last_reach(self) -> int:
        return self.limit + self.block_length

    @property
    def _checks(self) -> bool:
        """The next forward is causal: all is drafted, or drafts are of no use any more."""
        # Penalties and grammars depend on what stands before each position, which drafts do not tell.
        alone = self.request.edits is not None or self.guard is not None
        return not any(self.masked) or self._last or alone

    def window(self) -> Window:
        if self.cached < self.block_start:
            return Window(self.cached, self.block_start, denoises=False, seeds=self.masked[0], divisible=True)
        return Window(self.block_start, self._checked_end if self._checks else self.canvas_end, denoises=True)

    @property
    def _checked_end(self) -> int:
        """End of the positions that are run causally; each proposes the next one."""
        if not self._forbidden:
            return self._known
        # A token behind the least number may be a stop: it is proposed under other rules than those before it.
        return min(self._known, max(self.block_start + 1, self.prompt_length + self.request.limits.min_tokens - 1))

    @property
    def _forbidden(self) -> tuple[int, ...]:
        least = self.request.limits.min_tokens
        first = self.block_start if self.masked[0] else self.block_start + 1
        return tuple(sorted(self.stop_ids)) if first < self.prompt_length + least else ()

    def row(self, window: Window, end: int) -> Row:
        row = super().row(window, end)
        if not window.denoises:
            return row
        causal = tuple(position + 1 for position in range(window.start, end))
        return replace(row, visible_end=causal if self._checks else (end,) * len(causal))

    def _canvas(self) -> Canvas:
        assert isinstance(self.decoding, LinearSpeculation)
        # Drafts and checks draw by the same numbers as causal decoding does, so that draws agree as often as they can.
        canvas = replace(super()._canvas(), step=0)
        if self._checks:
            start = self.block_start + 1
            masked = (True,) * (self._checked_end + 1 - start)
            guarded = canvas.guarded and replace(canvas.guarded, frontier=0, tokens=(UNDECIDED,) * len(masked))
            return replace(canvas, start=start, masked=masked, last=True, shift=1, guarded=guarded)
        return replace(canvas, masked=tuple(self.masked), last=self.decoding.threshold is None)

    def apply(self, canvas: Canvas, decided: RowDecision) -> None:
        if canvas.seed:
            super().apply(canvas, decided)
            self._keep(canvas.start + 1)
        elif canvas.start == self.block_start:
            super().apply(canvas, decided)
        else:
            self._check(canvas, decided)

    def _check(self, canvas: Canvas, decided: RowDecision) -> None:
        tokens = decided.tokens
        drafts = self.tokens[canvas.start : canvas.start + len(canvas.masked) - 1]
        pairs = zip(drafts, tokens, strict=False)
        kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self.nfe += 1
        self.step += 1
        self.cached = canvas.start + kept
        self.tokens[canvas.start :] = tokens[: kept + 1]
        self.masked = [False] * (kept + 2)
        self.confidence[1:] = decided.confidence[: kept + 1]
        for offset, logprob in enumerate(decided.logprobs[: kept + 1]):
            if logprob is not None:
                self.logprobs[canvas.start + offset] = logprob
        self._keep(self.cached + 1)

    def _keep(self, end: int) -> None:
        """Take the tokens before `end` for certain, and drop what is drafted behind them."""
        self._certain = end
        length = end - self.block_start
        del self.tokens[end:], self.masked[length:], self.confidence[length:]
        self._settle()

    def _close(self) -> None:
        """Leave the drafts behind a stop: it may be a draft itself."""

    def _open(self, first_undecided: int) -> None:
        self._empty(first_undecided)
        self._certain = first_undecided
        self._lengthen(self.block_length)
        self.undecided_at_first = len(self.masked)

    def enter_next_block(self) -> None:
        """Draft behind the last certain token, with which the new block begins."""
        self.block_start = self._certain - 1
        del self.masked[:-1], self.confidence[:-1]
        self.step = self.idle_steps = 0
        self._lengthen(self.block_length - 1)
        self.undecided_at_first = len(self.masked) - 1
