"""Which positions of a canvas get their token now: one rule for each strategy, and what holds for all of them."""

from collections.abc import Sequence as ReadOnly
from dataclasses import fields, replace
from typing import TypeVar, assert_never

import torch
from torch import Tensor

from kernels.attention import upload
from shared.decoding import (
    AdaptiveParallel,
    Decoding,
    Entropy,
    EntropyBounded,
    Factor,
    JointThreshold,
    LinearSpeculation,
    LowConfidenceDynamic,
    LowConfidenceStatic,
    MaskgitPlus,
    MultiBlock,
    Origin,
    RandomOrder,
    Renoise,
    Sequential,
    StreamingWindow,
    SubBlock,
    Threshold,
    ThresholdQuota,
    Timed,
    TopkMargin,
)
from worker.decoding import (
    adaptive_parallel,
    entropy_bounded,
    factor,
    joint_threshold,
    low_confidence,
    multi_block,
    random_order,
    sequential,
    streaming_window,
    sub_block,
    threshold,
    threshold_quota,
    timed,
)
from worker.decoding.ranking import take_best
from worker.decoding.types import BlockView, Draw, TokenStats, draw_position

Record = TypeVar("Record", TokenStats, BlockView)


def needs_entropy(decodings: ReadOnly[Decoding]) -> bool:
    """Tell whether a strategy reads `TokenStats.entropy`."""
    return any(isinstance(decoding, EntropyBounded | Entropy | StreamingWindow) for decoding in decodings)


def needs_margin(decodings: ReadOnly[Decoding]) -> bool:
    """Tell whether a strategy reads `TokenStats.margin`."""
    return any(isinstance(decoding, TopkMargin) for decoding in decodings)


def decide(
    stats: TokenStats,
    view: BlockView,
    decodings: ReadOnly[Decoding],
    last: Tensor | None = None,
    filler_ids: Tensor | None = None,
    draw: Draw = draw_position,
) -> Tensor:
    """Return [rows, block] bool: the masked positions that are accepted now, and the editable ones that are revised.

    A row with masks accepts at least one, unless its strategy has a schedule by time. Rows of `last` [rows] bool accept
    all. Where a row's decoding has filler rules, a position whose proposal is one of `filler_ids` [n] takes no turn
    before the others: the end of a block is filler until its text is decided, and would be taken first for its high
    confidence.
    """
    masked = view.masked
    filler = _filler(stats, decodings, filler_ids)
    view = _without_filler(view, decodings, filler)
    accepted = _by_strategy(stats, view, filler, decodings, draw)
    stuck = ~(accepted & masked).any(-1, keepdim=True)
    if any(isinstance(decoding, Timed) for decoding in decodings):
        hurried = [not isinstance(decoding, Timed) for decoding in decodings]
        stuck = stuck & upload(torch.tensor(hurried), masked.device)[:, None]
    accepted = accepted | (take_best(stats.confidence, view.masked) & stuck)
    if last is not None:
        accepted = accepted | (masked & last[:, None])
    return accepted & (masked | view.editable)


def _filler(stats: TokenStats, decodings: ReadOnly[Decoding], filler_ids: Tensor | None) -> Tensor:
    """Return [rows, block] bool: positions that propose filler, in rows with filler rules."""
    # Left to right has no turns to give away: its order is the text's.
    ruled = [decoding.filler_rules and not isinstance(decoding, Sequential) for decoding in decodings]
    if filler_ids is None or not filler_ids.numel() or not any(ruled):
        return torch.zeros_like(stats.token, dtype=torch.bool)
    return torch.isin(stats.token, filler_ids) & upload(torch.tensor(ruled), stats.token.device)[:, None]


def _without_filler(view: BlockView, decodings: ReadOnly[Decoding], filler: Tensor) -> BlockView:
    # Several blocks give away turns each for itself.
    alone = [not isinstance(decoding, MultiBlock) for decoding in decodings]
    if not all(alone):
        filler = filler & upload(torch.tensor(alone), filler.device)[:, None]
    others = view.masked & ~filler
    masked = torch.where(others.any(-1, keepdim=True), others, view.masked)
    # Schedules divide what was there at first, of which the hidden ones are no part yet.
    hidden = view.masked.sum(-1) - masked.sum(-1)
    return replace(view, masked=masked, undecided_at_first=view.undecided_at_first - hidden)


def _by_strategy(
    stats: TokenStats, view: BlockView, filler: Tensor, decodings: ReadOnly[Decoding], draw: Draw
) -> Tensor:
    groups: dict[type[Decoding], list[int]] = {}
    for row, decoding in enumerate(decodings):
        groups.setdefault(type(decoding), []).append(row)
    if len(groups) == 1:
        return _accept(stats, view, filler, decodings, draw)
    accepted = torch.zeros_like(view.masked)
    for rows in groups.values():
        index = upload(torch.tensor(rows), view.masked.device)
        members = [decodings[row] for row in rows]
        accepted[index] = _accept(_pick(stats, index), _pick(view, index), filler[index], members, draw)
    return accepted


def _pick(record: Record, index: Tensor) -> Record:
    """Return the rows of `index`."""
    return type(record)(*(getattr(record, field.name)[index] for field in fields(record)))


def _accept(stats: TokenStats, view: BlockView, filler: Tensor, decodings: ReadOnly[Decoding], draw: Draw) -> Tensor:
    """Apply one strategy; `decodings` are all of one kind."""
    device = view.masked.device

    def column(name: str, dtype: torch.dtype) -> Tensor:
        return upload(torch.tensor([getattr(decoding, name) for decoding in decodings], dtype=dtype), device)

    def steps() -> Tensor:
        # 0 stands for unset: one position a step.
        return upload(torch.tensor([getattr(decoding, "steps", None) or 0 for decoding in decodings]), device)

    kind = decodings[0]
    match kind:
        case Threshold():
            return threshold.accept(stats, view, column("threshold", torch.float32))
        case Factor():
            return factor.accept(stats, view, column("factor", torch.float32))
        case ThresholdQuota():
            return threshold_quota.accept(stats, view, column("threshold", torch.float32), steps())
        case Origin():
            return timed.accept_drawn(view, steps(), column("eps", torch.float32), draw)
        case MaskgitPlus():
            return timed.accept_best(stats.confidence, view, steps(), column("eps", torch.float32))
        case TopkMargin():
            return timed.accept_best(stats.margin, view, steps(), column("eps", torch.float32))
        case Entropy():
            return timed.accept_best(-stats.entropy, view, steps(), column("eps", torch.float32))
        case LowConfidenceStatic():
            return low_confidence.accept_static(stats, view, steps())
        case LowConfidenceDynamic():
            leftmost = [getattr(decoding, "fallback", None) == "leftmost" for decoding in decodings]
            return low_confidence.accept_dynamic(
                stats,
                view,
                column("threshold", torch.float32),
                steps(),
                upload(torch.tensor(leftmost), device),
            )
        case Sequential():
            return sequential.accept(view, steps())
        case RandomOrder():
            return random_order.accept(view, steps(), draw)
        case EntropyBounded():
            return entropy_bounded.accept(stats, view, column("bound", torch.float32))
        case AdaptiveParallel():
            most = column("max_parallel", torch.int64)
            return adaptive_parallel.accept(stats, view, most, steps(), column("threshold", torch.float32))
        case SubBlock():
            return sub_block.accept(stats, view, column("threshold", torch.float32))
        case JointThreshold():
            return joint_threshold.accept(
                stats,
                view,
                column("threshold", torch.float32),
                column("editing_threshold", torch.float32),
                column("num_to_transfer", torch.int64),
            )
        case MultiBlock():
            return multi_block.accept(
                stats, view, column("tau_acc", torch.float32), column("tau_semi", torch.float64), filler
            )
        case StreamingWindow():
            return streaming_window.accept(
                stats, view, column("bound", torch.float32), column("position_penalty", torch.float32)
            )
        case LinearSpeculation():
            # Without a threshold its canvases are the last of their kind, which accept everything.
            thresholds = [getattr(decoding, "threshold", None) or 0.0 for decoding in decodings]
            return threshold.accept(stats, view, upload(torch.tensor(thresholds, dtype=torch.float32), device))
        case Renoise():
            raise ValueError("a canvas of noise has no masks to accept; see worker.decoding.renoise")
        case _:
            assert_never(kind)
