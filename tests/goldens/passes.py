"""A golden forward as rows: what goes in, what each position sees, and the logits that must come out."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention import plan_attention
from tests.goldens.folder import Entry, GoldenFolder
from worker.engine.plan import visible_ends
from worker.models import LoadedModel
from worker.models.layers import ForwardContext, LowRank
from worker.models.spec import Attention


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
    """Return our logits [compared, vocab] for what `wanted` compares, on the CPU."""
    count = -(-len(wanted.token_ids) // page_size)
    # Pages in falling order: a row's positions lie nowhere near each other.
    pages = [list(range(count - 1, -1, -1))]
    plan = plan_attention([0], [wanted.visible_end], pages, page_size, device=model.device, dtype=model.dtype)
    shape = (2, model.spec.num_layers, count, page_size, model.spec.num_kv_heads, model.spec.head_dim)
    keys, values = torch.zeros(shape, dtype=model.dtype, device=model.device)
    context = ForwardContext(plan, wanted.positions.to(model.device), tuple(zip(keys, values, strict=True)), lora=lora)
    hidden = model.module.forward(wanted.token_ids.to(model.device), context)
    return model.module.logits(hidden[-len(wanted.logits) :]).cpu()
