"""Requests that decide behind what is committed next: a canvas that slides over the text as its front is decided."""

from dataclasses import replace

from worker.engine.plan import Canvas
from worker.engine.sequence import Sequence


class Sliding(Sequence):
    """What all of them share: a commit takes the front off the canvas and leaves the rest as it is.

    Another worker begins with the committed tokens and an empty canvas: what was decided behind them is decided anew.
    """

    __slots__ = ()

    @property
    def evictable(self) -> bool:
        # Tokens and masks stay with the request, and no forward reads a key of the canvas that it has not written.
        return True

    def enter_next_block(self) -> None:
        """Let the committed front go."""
        length = self.block_end - self.block_start
        del self.masked[:length], self.confidence[:length]
        self.block_start += length
        self.step = self.edited = self.edit_steps = self.idle_steps = 0
        self._move_on()
        self._settle()

    def _empty(self, first_undecided: int) -> None:
        """Leave the tokens before `first_undecided`, and an empty canvas."""
        del self.tokens[first_undecided:]
        self.block_start = first_undecided
        self.masked, self.confidence, self.closed = [], [], None
        self.step = self.edited = self.edit_steps = self.idle_steps = 0

    def _move_on(self) -> None:
        """Lengthen the canvas as the strategy has it."""

    def _lengthen(self, length: int) -> None:
        self.tokens += [self.spec.mask_token_id] * length
        self.masked += [True] * length
        self.confidence += [0.0] * length

    def _canvas(self) -> Canvas:
        # A position is looked at under several fronts, each of which would begin to count its steps anew.
        return replace(super()._canvas(), step=self.nfe)
