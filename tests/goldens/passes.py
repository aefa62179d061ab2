"""A golden forward as rows: what goes in, what each position sees, and the logits that must come out."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention import AttentionPlan, plan_attention
from tests.goldens.folder import Entry, GoldenFolder
from worker.canvas_runner import CanvasModel
from worker.engine.plan import near_view, visible_ends
from worker.models import LoadedModel
from worker.models.layers import ForwardContext, LowRank
from worker.models.spec import Attention, kv_shapes


@dataclass(frozen=True, slots=True)
class Pass:
    """One row without padding."""

    token_ids: Tensor
    """[length] int64"""
    positions: Tensor
    """[length] int64"""
    visible_end: tuple[int, ...]
    logits: Tensor
    """[compared, vocab]: the reference's, for the row's last positions."""


def to_passes(folder: GoldenFolder, entry: Entry) -> list[Pass]:
    """Return the entry's rows, each seeing what the family's attention shows."""
    arrays, name = folder.arrays(), entry["name"]
    input_ids, logits = arrays[f"{name}.input_ids"], arrays[f"{name}.logits"]
    mask = arrays.get(f"{name}.attention_mask", torch.ones_like(input_ids)).bool()
    positions = arrays.get(f"{name}.position_ids", torch.arange(input_ids.shape[1]).expand_as(input_ids))
    attention = folder.model().spec.attention
    if folder.family == "llada" and not mask.all():
        # The reference's model takes a causal mask as soon as one key is padding, against its own text; see the README.
        attention = Attention.CAUSAL
    passes: list[Pass] = []
    for row, keep in enumerate(mask):
        ids = input_ids[row, keep]
        ends = visible_ends(attention, 0, len(ids), entry.get("block_length", 1), len(ids))
        passes.append(Pass(ids, positions[row, keep], ends, logits[row, keep]))
    return passes


@torch.inference_mode()
def run_pass(model: LoadedModel, wanted: Pass, page_size: int = 8, lora: LowRank | None = None) -> Tensor:
    """Return our logits [compared, vocab] for what `wanted` compares, on the host."""
    count = -(-len(wanted.token_ids) // page_size)
    # Pages in falling order: a row's positions lie nowhere near each other.
    pages = [list(range(count - 1, -1, -1))]
    plan = plan_attention([0], [wanted.visible_end], pages, page_size, device=model.device, dtype=model.dtype)
    shape = (2, model.spec.num_layers, count, page_size, model.spec.num_kv_heads, model.spec.head_dim)
    keys, values = torch.zeros(shape, dtype=model.dtype, device=model.device)
    context = ForwardContext(plan, wanted.positions.to(model.device), tuple(zip(keys, values, strict=True)), lora=lora)
    hidden = model.module.forward(wanted.token_ids.to(model.device), context)
    return model.module.logits(hidden[-len(wanted.logits) :]).cpu()


@torch.inference_mode()
def run_canvas(
    model: LoadedModel, prompt: Tensor, canvas: Tensor, believed: Tensor | None, lora: LowRank | None = None
) -> Tensor:
    """Return our logits [canvas, vocab], on the host, for a canvas behind its prompt (DiffusionGemma).

    `believed` [canvas, vocab] are the logits of the step before; None: it is the first. `lora` is for the prompt's
    tokens and the canvas's behind them.
    """
    module: CanvasModel = model.module  # pyright: ignore[reportAssignmentType]
    page_size, first, length = 8, len(prompt), len(prompt) + len(canvas)
    ends = [i + 1 for i in range(first)] + [length] * len(canvas)
    kinds = [Attention.CAUSAL] * first + [Attention.BLOCK_CAUSAL] * len(canvas)
    near = [near_view(kind, i, model.spec.sliding_window, first, length) for i, kind in enumerate(kinds)]
    pages = [list(reversed(range(-(-length // page_size))))]
    condition = torch.zeros(length, model.spec.hidden_size, dtype=model.dtype, device=model.device)
    if believed is not None:
        condition[first:] = module.soft_embedding(believed.to(model.device))

    def plan(ends: Sequence[int], starts: Sequence[int]) -> AttentionPlan:
        return plan_attention(
            [0], [ends], pages, page_size, device=model.device, dtype=model.dtype, visible_start=[starts]
        )

    def pages_of(shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(len(pages[0]), page_size, *shape, dtype=model.dtype, device=model.device)

    context = ForwardContext(
        attention=plan(ends, [0] * length),
        positions=torch.arange(length, device=model.device),
        kv=tuple((pages_of(shape), pages_of(shape)) for shape in kv_shapes(model.spec)),
        near=plan([end for _, end in near], [start for start, _ in near]),
        encodes=torch.arange(length, device=model.device) < first,
        condition=condition,
        lora=lora,
    )
    token_ids = torch.cat((prompt, canvas)).to(model.device)
    return module.logits(module.forward(token_ids, context))[first:].cpu()
