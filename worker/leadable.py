"""Which rows the device can decide by itself, and what it has to be told of them (`kernels.canvas`)."""

import struct
from typing import assert_never

from kernels.canvas import Field, Layout, Rule
from shared.decoding import Decoding, LowConfidenceDynamic, LowConfidenceStatic, Sequential, Threshold
from worker.engine.plan import Canvas, Row
from worker.models.spec import Attention, Commit, ModelSpec
from worker.runner import divisor, is_cut, is_greedy

_DeviceRule = Threshold | LowConfidenceStatic | LowConfidenceDynamic | Sequential


def goes_ahead(spec: ModelSpec) -> bool:
    """Tell whether the device can lead the model's rows by itself: from block to block, or through each block of a
    canvas whose keys a forward of the plain runner has renewed (dual cache)."""
    match spec.commit:
        case Commit.FUSED:
            attention, fits = Attention.BLOCK_CAUSAL, not spec.blocks_after_prompt
        case Commit.REFRESHED:
            attention, fits = Attention.BIDIRECTIONAL, True
        case _:
            return False
    plain = not spec.sliding_window and not spec.logit_shift and spec.block_length > 0
    return fits and plain and spec.attention is attention and spec.context in (None, attention)


def canvas_state(row: Row, layout: Layout, adapter: tuple[int, float] | None = None) -> list[int] | None:
    """Return what the device has to be told of a row, without its page numbers; None if it cannot decide it.

    `adapter` is place and scale of the row's adapters.
    """
    canvas = row.canvas
    if canvas is None or not _is_plain(row, canvas, layout.block) or (row.lora and adapter is None):
        return None
    rule = _rule(canvas.decoding)
    if rule is None:
        return None
    block, decoding, sampling = layout.block, canvas.decoding, canvas.sampling
    state = [0] * layout.table.start
    state[Field.LIVE] = 1
    state[Field.START] = canvas.start
    state[Field.LIMIT] = canvas.limit
    if not _ends_with_block(row, canvas, block):
        # Behind this block the host comes first again.
        state[Field.END], state[Field.LIMIT] = row.visible_end[-1], min(canvas.limit, row.end)
    state[Field.STEP] = canvas.step
    # More than a block is missing before it: that is written first, by itself.
    state[Field.COMMIT] = int(canvas.start - row.start == block)
    state[Field.RULE] = rule
    state[Field.MISSING] = sum(canvas.masked)
    state[Field.THRESHOLD] = _bits(getattr(decoding, "threshold", 0.0))
    state[Field.STEPS] = getattr(decoding, "steps", None) or 0
    state[Field.FILLER_RULES] = int(decoding.filler_rules)
    if not is_greedy(sampling):
        state[Field.DRAWS], state[Field.SEED] = 1, sampling.seed
    state[Field.TEMPERATURE] = _bits(divisor(sampling))
    if adapter is not None:
        state[Field.ADAPTER], state[Field.SCALE] = adapter[0] + 1, _bits(adapter[1])
    state[layout.tokens] = row.token_ids[-block:]
    state[layout.masked] = map(int, canvas.masked)
    # A row of an own end never asks for the block before, which may be shorter than its own.
    state[layout.before] = canvas.before if canvas.before and not state[Field.END] else [0] * block
    return state


def _ends_with_block(row: Row, canvas: Canvas, block: int) -> bool:
    """Tell whether everything in the row sees as far as its own block, and no further."""
    before = canvas.start - row.start
    aligned = canvas.start % block == 0 and row.visible_end[-1] == row.end
    return aligned and (before == 0 or row.visible_end[before - 1] == canvas.start)


def _is_plain(row: Row, canvas: Canvas, block: int) -> bool:
    return (
        len(canvas.masked) == block
        and canvas.block_length in (0, block)
        and (_ends_with_block(row, canvas, block) or (row.start == canvas.start and len({*row.visible_end}) == 1))
        and row.end == canvas.start + block
        and canvas.limit > canvas.start
        and row.guide is None
        and row.positions is None
        and row.near is None
        and not (canvas.last or canvas.seed or canvas.shift or any(canvas.editable) or canvas.forbidden)
        and canvas.guarded is None
        and not (canvas.decoding.stops_last and canvas.stop_token_ids)
        and not is_cut(canvas)
        and (canvas.decoding.confidence == "model" or divisor(canvas.sampling) == 1)
        and not (canvas.edits or canvas.tests_draft)
        and canvas.logprobs is None
    )


def _rule(decoding: Decoding) -> Rule | None:
    if not isinstance(decoding, _DeviceRule):
        return None
    match decoding:
        case Threshold():
            return Rule.THRESHOLD
        case LowConfidenceStatic():
            return Rule.STATIC
        case LowConfidenceDynamic():
            return Rule.DYNAMIC if decoding.fallback == "confidence" else Rule.DYNAMIC_LEFTMOST
        case Sequential():
            return Rule.SEQUENTIAL
        case _:
            assert_never(decoding)


def _bits(value: float) -> int:
    return struct.unpack("<i", struct.pack("<f", value))[0]
