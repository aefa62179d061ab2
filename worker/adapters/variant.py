"""An adapter that is part of a model: merged when the model is loaded, and what else it makes of its family.

D2F (discrete diffusion forcing, arXiv 2508.09192) trains an adapter under which a bidirectional model decides block
after block: each block sees the prompt, the blocks before it and itself. The prompt is one block of its own. Keys and
values of what is decided are then final, which a bidirectional model's never are.
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from shared.adapters import InvalidAdapter
from shared.decoding import Threshold
from worker.adapters.targets import find_targets
from worker.adapters.weights import ends_of, load_adapter
from worker.models import LoadedModel, ModelError
from worker.models.layers import Linear
from worker.models.spec import Attention, Commit, ModelSpec


def with_adapter(model: LoadedModel, folder: Path, block_length: int | None = None) -> LoadedModel:
    """Merge an adapter into the model's weights, in place; with `block_length` it is a D2F adapter.

    Raises `ModelError` naming the field at fault.
    """
    spec = model.spec if block_length is None else as_block_causal(model.spec, block_length)
    targets = find_targets(model)
    if any(target.of_text for target in targets.values()):
        raise ModelError(
            f"adapter: in a model of family {spec.family} text and canvas share weights under adapters of their own, "
            "which cannot be merged; requests may name it (lora)"
        )
    try:
        # In float32, so that a sum is rounded once.
        adapter = load_adapter(folder, targets, model.device, torch.float32)
    except InvalidAdapter as error:
        raise ModelError(f"adapter: {folder}: {error}") from error
    with torch.inference_mode():
        for linear, (a, b) in adapter.factors.items():
            pieces = a.unflatten(0, (-1, adapter.rank))
            added = torch.cat([b[first:end] @ piece for first, end, piece in _rows(linear, pieces)])
            linear.weight.copy_((linear.weight.float() + adapter.factor * added).to(model.dtype))
    return replace(model, spec=spec)


def _rows(linear: Linear, pieces: Tensor) -> list[tuple[int, int, Tensor]]:
    """Return the rows [first, end) of each projection in a linear beside its factor."""
    ends = ends_of(linear)
    return list(zip((0, *ends), ends, pieces, strict=False))


def as_block_causal(spec: ModelSpec, block_length: int) -> ModelSpec:
    """Return the facts of a bidirectional model that an adapter has made block-causal. Raises `ModelError`.

    Where logits are shifted, the first token of a block is read from the last row of what stands before it, which sees
    nothing of the block: it comes with the forward that writes that row.
    """
    if spec.attention is not Attention.BIDIRECTIONAL or spec.commit is not Commit.REFRESHED or spec.sliding_window:
        raise ModelError(f"adapter_block_length: a model of family {spec.family} cannot be made block-causal")
    return replace(
        spec,
        family=f"{spec.family}_d2f",
        attention=Attention.BLOCK_CAUSAL,
        commit=Commit.SEEDED if spec.logit_shift else Commit.FUSED,
        blocks_after_prompt=True,
        block_length=block_length,
        # The authors' own threshold of a decided token.
        decoding=Threshold(threshold=0.9),
    )
