"""A request that produces no text: its prompt is read, and the mean of its final hidden states is the answer."""

from array import array
from base64 import b64encode
from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass, field, replace
from math import isfinite, sqrt
from sys import byteorder

from shared.events import Finished
from worker.engine.plan import Row, near_view, visible_ends
from worker.engine.sequence import Sequence
from worker.engine.window import Window
from worker.models.spec import Attention


@dataclass(slots=True, eq=False)
class Embedding(Sequence):
    """Facts about one such request.

    Each token sees what the family shows to a text that is read: all of it, what stands before it, or its own block,
    whose end is the prompt's. Every token is run, so pages of others are of no use to it.
    """

    total: list[float] = field(default_factory=list[float])
    """[hidden]: sum over the positions that have been run."""

    @property
    def copies(self) -> int:
        return 1

    @property
    def shareable_end(self) -> int:
        return 0

    def page_keys(self, page_size: int, end: int) -> list[bytes]:
        return []

    @property
    def whole(self) -> bool:
        """Every token has been run."""
        return self.cached >= self.prompt_length

    def window(self) -> Window:
        # A text that sees its own end is run in one piece.
        divisible = self.block_length < self.prompt_length
        return Window(self.cached, self.prompt_length, denoises=False, divisible=divisible)

    def row(self, window: Window, end: int) -> Row:
        spec, length = self.spec, self.prompt_length
        seen = visible_ends(self._attention, window.start, end, self.block_length, length, self.origin)
        near = None
        if spec.sliding_window:
            views = [
                near_view(self._attention, at, spec.sliding_window, at // self.block_length * self.block_length, length)
                for at in range(window.start, end)
            ]
            near = tuple(views)
        return Row(
            request_id=self.id,
            start=window.start,
            token_ids=tuple(self.tokens[window.start : end]),
            visible_end=tuple(min(reach, length) for reach in seen),
            pages=tuple(self.pages),
            canvas=None,
            near=near,
            pooled=True,
            lora=self.lora,
        )

    def gather(self, end: int, total: ReadOnly[float]) -> bool:
        """Add the sum of a forward's hidden states, which reached `end`; False if it is not finite."""
        self.total = [a + b for a, b in zip(self.total, total, strict=True)] if self.total else list(total)
        self.written(end)
        return all(map(isfinite, total))

    def evict(self) -> list[int]:
        self.total = []
        # Zero-argument super() does not know the class that slots have made.
        return Sequence.evict(self)

    def embedded(self) -> Finished:
        """Return the end that carries the vector, of length 1."""
        # Of a mean that is normed, the count does not matter.
        length = sqrt(sum(value * value for value in self.total))
        vector = array("f", (value / length for value in self.total) if length else self.total)
        if byteorder == "big":
            vector.byteswap()
        return replace(self.finished("embedded"), embedding=b64encode(vector.tobytes()).decode())

    @property
    def _attention(self) -> Attention:
        return self.spec.context or self.spec.attention

    def _open(self, first_undecided: int) -> None:
        """Stand behind the prompt: nothing is open there."""
        length = self.prompt_length
        match self._attention:
            case Attention.CAUSAL:
                self.block_length = 1
            case Attention.BLOCK_CAUSAL:
                self.block_length = length if self.spec.blocks_after_prompt else self.spec.block_length
            case Attention.BIDIRECTIONAL:
                self.block_length = length
        self.block_start = self.limit = length
        self.masked = []
