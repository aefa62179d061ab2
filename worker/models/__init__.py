"""Model families: which module serves an architecture, and how a folder becomes a model."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor, nn

from worker.models.checkpoint import Checkpoint, ModelError, read_checkpoint
from worker.models.eight_bits import check_format
from worker.models.layers import ForwardContext
from worker.models.spec import ModelSpec

if TYPE_CHECKING:
    from worker.parallel.messages import Message

__all__ = ["FAMILIES", "Denoiser", "LoadedModel", "ModelError", "load_checkpoint", "load_model"]

# Keyed by `architectures`, for `model_type` collides: LLaDA-MoE says llada, Stable-DiffCoder says llama.
FAMILIES = {
    "BertForMaskedLM": "worker.models.bert",
    "DiffusionGemmaForBlockDiffusion": "worker.models.diffusion_gemma",
    "DreamModel": "worker.models.dream",
    "Fast_dLLM_QwenForCausalLM": "worker.models.fastdllm_v2",
    "LLaDA2MoeModelLM": "worker.models.llada2",
    "LLaDAModelLM": "worker.models.llada",
    "LLaDAMoEModelLM": "worker.models.llada_moe",
    "LlamaForCausalLM": "worker.models.autoregressive",
    "ModernBertForMaskedLM": "worker.models.modernbert",
    "Qwen2ForCausalLM": "worker.models.autoregressive",
    "Qwen3ForCausalLM": "worker.models.autoregressive",
    "NemotronLabsDiffusionModel": "worker.models.nemotron",
    "SDARForCausalLM": "worker.models.sdar",
    "SDARMoeForCausalLM": "worker.models.sdar_moe",
    "StableDiffcoderForCausalLM": "worker.models.stable_diffcoder",
    "WeDLMForCausalLM": "worker.models.wedlm",
}


class Denoiser(Protocol):
    """What the runner needs of a module."""

    def forward(self, token_ids: Tensor, context: ForwardContext, wanted: Tensor | None = None) -> Tensor:
        """Write KV for token_ids [tokens]; return final hidden states [tokens, hidden], or of `wanted` rows only."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [n, vocab] for hidden states [n, hidden]."""
        ...


class Family(Protocol):
    """What a family's module offers."""

    def read_spec(self, checkpoint: Checkpoint) -> ModelSpec: ...

    def build(self, checkpoint: Checkpoint, *, device: torch.device, dtype: torch.dtype) -> nn.Module: ...


class Lead(Protocol):
    """Tells the other ranks what this one is about to do on its device; see `worker.parallel`."""

    def tell(self, message: "Message") -> None: ...


@dataclass(frozen=True, slots=True)
class LoadedModel:
    spec: ModelSpec
    module: Denoiser
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype | None = None
    """e4m3: keys and values lie in pages of 8 bits, with scales; None: as the arithmetic is."""
    lead: "Lead | None" = None
    """The other ranks, where several share the model: they do what they are told. None: there are none."""


def load_model(
    folder: Path | str,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    need_tokenizer: bool = False,
) -> LoadedModel:
    """Load a checkpoint in the usual layout (config.json, safetensors).

    Without a tokenizer.json the whole vocabulary counts as text, unless `need_tokenizer` makes its absence an error.
    Raises `ModelError` if the folder lacks a file, its weights do not fit, or its architecture is unknown.
    """
    return load_checkpoint(read_checkpoint(Path(folder), need_tokenizer=need_tokenizer), device=device, dtype=dtype)


def load_checkpoint(
    checkpoint: Checkpoint, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> LoadedModel:
    """Load a checkpoint whose config files are read. Raises `ModelError`."""
    device = torch.device(device)
    spec, module = build_module(checkpoint, device=device, dtype=dtype)
    return LoadedModel(spec, cast(Denoiser, module.eval()), device, dtype)


def build_module(checkpoint: Checkpoint, *, device: torch.device, dtype: torch.dtype) -> tuple[ModelSpec, nn.Module]:
    """Return a checkpoint's facts and its module, filled by the checkpoint's loader. Raises `ModelError`."""
    family = _find_family(checkpoint)
    check_format(checkpoint)
    return family.read_spec(checkpoint), family.build(checkpoint, device=device, dtype=dtype)


def _find_family(checkpoint: Checkpoint) -> Family:
    names = checkpoint.config.get("architectures") or []
    for name in names:
        if name in FAMILIES:
            return cast(Family, importlib.import_module(FAMILIES[name]))
    raise ModelError(
        f"{checkpoint.folder / 'config.json'}: architectures {names!r} is not supported; "
        f"supported: {', '.join(sorted(FAMILIES))}"
    )
