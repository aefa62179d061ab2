"""WeDLM's streaming decoding (arXiv 2512.22737): a window of fixed length whose decided front is committed at once."""

from worker.engine.sliding import Sliding
from worker.engine.window import Window
from worker.models.spec import Commit, ModelSpec


def streams(spec: ModelSpec) -> bool:
    """Tell whether a decided front is final by itself: known tokens see none of the masks behind them."""
    return spec.commit is Commit.REORDERED


class Streaming(Sliding):
    """The canvas is `block_length` positions from the first undecided one, some of which may be decided."""

    __slots__ = ()

    @property
    def block_end(self) -> int:
        return self._known

    @property
    def complete(self) -> bool:
        if self.stop is not None and self.decoding.early_stop:
            return True
        return self.block_end > self.block_start

    def window(self) -> Window:
        if self.block_start - self.cached > self.block_length:
            return Window(self.cached, self.block_start, denoises=False, divisible=True)
        return Window(self.cached, self.canvas_end, denoises=True)

    def _open(self, first_undecided: int) -> None:
        self._empty(first_undecided)
        self._move_on()
        self.undecided_at_first = len(self.masked)

    def _move_on(self) -> None:
        self._lengthen(max(0, min(self.block_start + self.block_length, self.limit) - self.canvas_end))
