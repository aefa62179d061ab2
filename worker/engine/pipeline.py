"""Several blocks of one request decided at once (D2F, arXiv 2508.09192; Diffulex): the next begins before one ends."""

from dataclasses import replace

from shared.decoding import MultiBlock
from worker.engine.plan import Canvas
from worker.engine.ports import RowDecision
from worker.engine.sliding import Sliding
from worker.engine.window import Window
from worker.models.spec import Attention, Commit, ModelSpec


def works_ahead(spec: ModelSpec) -> bool:
    """Tell whether a block of the model may see blocks before it that are not decided yet."""
    return spec.attention is Attention.BLOCK_CAUSAL and spec.commit in (Commit.FUSED, Commit.SEEDED)


class Pipelined(Sliding):
    """The canvas is one block or more. The first is committed when it is decided; its keys are written with clean
    tokens by the next forward, which also decides."""

    __slots__ = ()

    @property
    def _rule(self) -> MultiBlock:
        assert isinstance(self.decoding, MultiBlock)
        return self.decoding

    @property
    def block_end(self) -> int:
        return min(self.block_start + self.block_length, self.canvas_end)

    @property
    def widest(self) -> int:
        """Committed blocks whose keys are not written, and the canvas: as many blocks, and the one just begun."""
        return (self._rule.max_blocks + 1) * self.block_length

    @property
    def shareable_end(self) -> int:
        # A row before the block that is needed is run again, whoever wrote its keys.
        return self.block_start

    def window(self) -> Window:
        start = self.cached
        if self.block_start - start > self._rule.max_blocks * self.block_length:
            whole = self.spec.blocks_after_prompt and (self.spec.context or self.spec.attention) is not Attention.CAUSAL
            return Window(start, self.block_start, denoises=False, divisible=not whole)
        if self.spec.logit_shift:
            # The canvas's first position is proposed by the row before it.
            start = max(0, min(start, self.block_start - self.spec.logit_shift))
        return Window(start, self.canvas_end, denoises=True)

    def apply(self, canvas: Canvas, decided: RowDecision) -> None:
        super().apply(canvas, decided)
        if not self.complete:
            self._begin_block()

    def _advance_cache(self, canvas: Canvas) -> None:
        self.cached = canvas.start

    def _open(self, first_undecided: int) -> None:
        super()._open(first_undecided)
        self._begin_block()

    def _move_on(self) -> None:
        if not self.masked:
            self._lengthen(self.block_length)
        elif any(self.wanted[: self.block_length]):
            self._begin_block()

    def _begin_block(self) -> None:
        """Begin one more block if the last one has its share of decided tokens and there is room."""
        length = self.block_length
        if len(self.masked) >= self._rule.max_blocks * length or self.canvas_end >= self.limit:
            return
        if self.closed is not None or self.hurried or self.spent:
            return
        if length - sum(self.wanted[-length:]) >= self._rule.tau_add * length:
            self._lengthen(length)

    def _canvas(self) -> Canvas:
        return replace(super()._canvas(), block_length=self.block_length)
