"""What a forward reads of a plan, as plain data: rows side by side, guides behind them."""

from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention import AttentionPlan, plan_attention, upload
from worker.engine.plan import Plan
from worker.models import LoadedModel
from worker.models.layers import ForwardContext, LowRank, Pages

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Batch:
    """Lists of rows, and flat ones of their tokens."""

    starts: ReadOnly[int]
    """[rows]"""
    visible_end: ReadOnly[ReadOnly[int]]
    """[rows][query]"""
    pages: ReadOnly[ReadOnly[int]]
    """[rows][pages]"""
    positions: ReadOnly[int]
    """[tokens]: rotary."""
    token_ids: ReadOnly[int]
    """[tokens]"""
    wanted: ReadOnly[int]
    """Tokens whose hidden states are returned."""
    near: ReadOnly[ReadOnly[Span]] | None = None
    """[rows][query]: what layers with a sliding window see; None: there are no such layers."""

    @classmethod
    def of(cls, plan: Plan, wanted: ReadOnly[int], has_window: bool) -> "Batch":
        guided = [(row, row.guide) for row in plan.rows if row.guide is not None]
        rows = [*plan.rows, *(row for row, _ in guided)]
        inputs = [row.token_ids for row in plan.rows] + [guide.token_ids for _, guide in guided]
        return cls(
            starts=[row.start for row in rows],
            visible_end=[row.visible_end for row in rows],
            pages=[row.pages for row in plan.rows] + [guide.pages for _, guide in guided],
            positions=[position for row in rows for position in row.positions or range(row.start, row.end)],
            token_ids=[token for ids in inputs for token in ids],
            wanted=wanted,
            near=[row.near or () for row in rows] if has_window else None,
        )


def run_batch(
    model: LoadedModel,
    batch: Batch,
    kv: tuple[Pages, ...],
    page_size: int,
    device: torch.device,
    lora: LowRank | None = None,
) -> Tensor:
    """Write the batch's keys and values; return the hidden states [wanted, hidden]."""

    def plan(ends: ReadOnly[ReadOnly[int]], starts: ReadOnly[ReadOnly[int]] | None = None) -> AttentionPlan:
        return plan_attention(
            batch.starts, ends, batch.pages, page_size, device=device, dtype=model.dtype, visible_start=starts
        )

    def integers(values: ReadOnly[int]) -> Tensor:
        return upload(torch.tensor(values, dtype=torch.int64), device)

    near = None
    if batch.near is not None:
        near = plan(
            [[end for _, end in view] for view in batch.near], [[start for start, _ in view] for view in batch.near]
        )
    context = ForwardContext(
        attention=plan(batch.visible_end),
        positions=integers(batch.positions),
        kv=kv,
        near=near,
        lora=lora,
    )
    return model.module.forward(integers(batch.token_ids), context, integers(batch.wanted))
