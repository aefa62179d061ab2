"""Frames of a canvas for streams: edits of positions, in an order that can be replayed.

A frame says what has changed since the frame before it; the first, every 16th and the first of a block are full.
Positions count from the first produced token. A position is `masked`, then `tentative` (`revised`, if its token has
changed), and `committed` with its block; what is never committed was filler behind the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from api.canvas import MASK_GLYPH, canvas_text
from api.schemas import FrameDetail
from shared.events import Delta, Snapshot
from shared.text import Tokenizer

_FULL_EVERY = 16
_State = Literal["masked", "tentative", "revised", "committed"]


@dataclass(frozen=True, slots=True)
class _Cell:
    token: int | None
    confidence: float


class Frames:
    """The frames of one choice."""

    def __init__(self, tokenizer: Tokenizer, detail: FrameDetail) -> None:
        self._tokenizer = tokenizer
        self._detail: FrameDetail = detail
        self._seq = 0
        self._block: int | None = None
        self._cells: dict[int, _Cell] = {}

    def of_snapshot(self, event: Snapshot) -> dict[str, object]:
        """Return the frame of a canvas between commits."""
        cells = {
            event.offset + index: _Cell(token, event.confidence[index] if index < len(event.confidence) else 0.0)
            for index, token in enumerate(event.token_ids)
        }
        full = self._seq % _FULL_EVERY == 0 or event.block != self._block
        edits: list[tuple[int, _Cell, _State]] = []
        for position, cell in cells.items():
            before = self._cells.get(position)
            changed = before is not None and before.token is not None and before.token != cell.token
            state: _State = "masked" if cell.token is None else "revised" if changed else "tentative"
            if full or before is None or before.token != cell.token:
                edits.append((position, cell, state))
        self._block, self._cells = event.block, cells
        masked = sum(token is None for token in event.token_ids)
        text = canvas_text(event.token_ids, self._tokenizer)
        return self._frame(event.block, event.step, event.offset, masked, full, text, edits)

    def of_commit(self, event: Delta) -> dict[str, object]:
        """Return the frame of a committed block: its tokens as they stay."""
        confidences = {position: cell.confidence for position, cell in self._cells.items()}
        edits: list[tuple[int, _Cell, _State]] = [
            (position, _Cell(token, confidences.get(position, 1.0)), "committed")
            for position, token in enumerate(event.token_ids, event.offset)
        ]
        self._block, self._cells = None, {}
        return self._frame(event.block, None, event.offset, 0, True, event.text, edits)

    def _frame(
        self,
        block: int,
        step: int | None,
        offset: int,
        masked: int,
        full: bool,
        text: str,
        edits: Sequence[tuple[int, _Cell, _State]],
    ) -> dict[str, object]:
        head: dict[str, object] = {
            "seq": self._seq, "block": block, "step": step, "offset": offset, "masked": masked, "full": full,
        }  # fmt: skip
        self._seq += 1
        if self._detail == "text":
            return head | {"text": text}
        rows = [[position, cell.token, self._text_of(cell.token), state] for position, cell, state in edits]
        if self._detail == "full":
            rows = [[*row, cell.confidence] for row, (_, cell, _) in zip(rows, edits, strict=True)]
        return head | {"edits": rows}

    def _text_of(self, token: int | None) -> str:
        return MASK_GLYPH if token is None else self._tokenizer.decode([token])
