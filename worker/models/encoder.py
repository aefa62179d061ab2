"""What encoders trained on masked tokens share: norms with a mean, attention over the whole text, the head's shape."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kernels
from kernels.attention import AttentionPlan
from shared.decoding import LowConfidenceStatic
from worker.models.checkpoint import Checkpoint
from worker.models.facts import gather_facts
from worker.models.layers import ForwardContext, LayerShape, Linear, empty_parameter
from worker.models.qwen import refuse
from worker.models.spec import Attention, Commit, ModelSpec

BLOCK_LENGTH = 32


class LayerNorm(nn.Module):
    """Layer norm (arXiv 1607.06450), with or without a bias."""

    def __init__(self, size: int, eps: float, bias: bool, *, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter(size, device=device, dtype=dtype)
        self.bias = empty_parameter(size, device=device, dtype=dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def attend(
    q: Tensor, k: Tensor, v: Tensor, layer: int, context: ForwardContext, plan: AttentionPlan | None = None
) -> Tensor:
    """Write k and v [tokens, heads, head_dim] to the layer's pages; return what q sees, [tokens, heads * head_dim]."""
    plan = plan or context.attention
    k_pages, v_pages = context.kv[layer][:2]
    kernels.kv_write(k, v, k_pages, v_pages, plan.slots)
    mixed = kernels.attention(q, k_pages, v_pages, plan, 1.0 / math.sqrt(q.shape[-1]))
    return mixed.reshape(q.shape[0], -1)


def name_linear(name: str, linear: Linear | LayerNorm) -> dict[str, tuple[Tensor, ...]]:
    """Return the places of a module's weight and bias; a linear notes its name."""
    slots: dict[str, tuple[Tensor, ...]] = {f"{name}.weight": (linear.weight,)}
    if isinstance(linear, Linear):
        linear.pieces[name] = (0, linear.weight.shape[0])
    if linear.bias is not None:
        slots[f"{name}.bias"] = (linear.bias,)
    return slots


def read_encoder_shape(checkpoint: Checkpoint, eps: str, activation: str) -> LayerShape:
    """Read the shape of an encoder's layers; `eps` and `activation` are its keys. Raises `ModelError`."""
    hidden, heads = checkpoint.integer("hidden_size"), checkpoint.integer("num_attention_heads")
    if hidden % heads:
        raise refuse(checkpoint, "num_attention_heads", f"{heads} does not divide hidden_size {hidden}")
    if checkpoint.config.get(activation, "gelu") != "gelu":
        raise refuse(checkpoint, activation, f"{checkpoint.config[activation]!r} is not supported, only 'gelu'")
    return LayerShape(
        hidden, heads, heads, hidden // heads, checkpoint.integer("intermediate_size"), checkpoint.number(eps, 1e-5)
    )


def gather_encoder_facts(
    checkpoint: Checkpoint,
    shape: LayerShape,
    family: str,
    mask_token_id: int,
    sep_token_id: int,
    sliding_window: int = 0,
) -> ModelSpec:
    """Return the facts of a masked language model that answers by filling a canvas behind its prompt (MDLM, BERT-Chat).

    The two ids are the usual ones of the family's tokenizer; an answer ends at the separator. Raises `ModelError`.
    """
    return gather_facts(
        checkpoint,
        shape,
        family=family,
        attention=Attention.BIDIRECTIONAL,
        commit=Commit.REFRESHED,
        blocks_after_prompt=True,
        block_length=BLOCK_LENGTH,
        mask_token_id=mask_token_id,
        stop_token_ids=checkpoint.special("eos_token_id") or checkpoint.special("sep_token_id") or (sep_token_id,),
        decoding=LowConfidenceStatic(),
        sliding_window=sliding_window,
    )
