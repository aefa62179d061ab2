"""The network: an SDAR-shaped (Qwen3-shaped) decoder, with parameter names as the checkpoint has them."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q [rows, heads, length, dim], k and v with kv heads -> like q


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the network."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int = 64
    vocabulary: int = 4096
    context: int = 1024
    rope_theta: float = 10_000.0
    eps: float = 1e-6


SHAPES = {
    "demo": Shape(hidden=384, layers=7, intermediate=896, heads=6, kv_heads=2),
    "nano": Shape(hidden=128, layers=2, intermediate=320, heads=2, kv_heads=1),
}


class Norm(nn.Module):
    """RMS norm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Grouped-query attention with a norm on each head's queries and keys."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.q_norm, self.k_norm = Norm(shape.head_dim, shape.eps), Norm(shape.head_dim, shape.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        rows, length, _ = x.shape
        q = self.q_proj(x).view(rows, length, self.heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(rows, length, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(rows, length, self.kv_heads, self.head_dim).transpose(1, 2)
        out = attend(_rotate(self.q_norm(q), cos, sin), _rotate(self.k_norm(k), cos, sin), v)
        return self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))


class Feed(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm attention, then pre-norm feed-forward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)
        self.mlp = Feed(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.eps)


class DemoModel(nn.Module):
    """The network with its tied output head. Logits are read at the masked position itself, without a shift."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.stream_dtype = torch.float32  # of the residual stream; bfloat16 under autocast, as it is served
        self.model = Backbone(shape)
        half = shape.head_dim // 2
        angles = torch.arange(shape.context)[:, None] * shape.rope_theta ** (-torch.arange(half) / half)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Outputs into the residual stream start smaller, so that depth does not raise its variance.
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.02 / math.sqrt(2 * shape.layers) if deep else 0.02
                nn.init.normal_(parameter, std=std, generator=generator)

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return final hidden states [rows, length, hidden] for ids and positions [rows, length]."""
        x = self.model.embed_tokens(ids).to(self.stream_dtype)
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]  # [rows, 1, length, head_dim / 2]
        for layer in self.model.layers:
            x = layer(x, cos, sin, attend)
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the vocabulary for any hidden states [..., hidden]."""
        return F.linear(hidden, self.model.embed_tokens.weight)


def visible(documents: Tensor, blocks: Tensor, segments: Tensor) -> Tensor:
    """Say who sees whom in packed rows: [rows, 1, length, length], queries first.

    Segment 0 is the clean copy. Everybody sees the clean blocks before the own one; a clean block sees itself; a
    noisy block sees itself in both directions and no other noisy block.
    """
    same_document = documents[:, :, None] == documents[:, None, :]
    earlier = (segments[:, None, :] == 0) & (blocks[:, None, :] < blocks[:, :, None])
    own = (segments[:, :, None] == segments[:, None, :]) & (blocks[:, :, None] == blocks[:, None, :])
    return (same_document & (earlier | own))[:, None]


def dense_attend(mask: Tensor) -> Attend:
    """Attention under a boolean mask that broadcasts to [rows, heads, queries, keys]."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return attend


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
