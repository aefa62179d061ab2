"""The plain loop to compare with: dense cache, SDPA, PyTorch's own operations, one graph, the same weights."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.bench.gpu.shapes import Shape
from tests.bench.gpu.timing import device_ms
from worker.models.layers import Decoder, GatedMLP


class Baseline:
    """One denoise step of a dense decoder; `cached` False recomputes prompt and block in every step."""

    def __init__(self, decoder: Decoder, shape: Shape, rows: int, block: int, context: int, cached: bool = True):
        self.decoder, self.shape, self.rows, self.cached = decoder, shape, rows, cached
        self.block, self.context = block, context
        layer, device = shape.layer, torch.device("cuda")
        self.query = block if cached else context + block
        if cached:
            cache = (shape.layers, 2, rows, layer.num_kv_heads, context + block, layer.head_dim)
            self.cache = torch.randn(cache, device=device, dtype=torch.bfloat16)
        self.ids = torch.full((rows, self.query), shape.vocab - 1, device=device)
        position = torch.arange(context + block - self.query, context + block, device=device).repeat(rows)
        self.rotation = decoder.rotary.forward(position)

    def body(self) -> Tensor:
        layer_shape, rows, query = self.shape.layer, self.rows, self.query
        hidden, heads, kv = layer_shape.hidden_size, layer_shape.num_heads, layer_shape.num_kv_heads
        width, eps = layer_shape.head_dim, layer_shape.eps
        x = F.embedding(self.ids.view(-1), self.decoder.embedding)
        for number, layer in enumerate(self.decoder.layers):
            attention, mlp = layer.attention, layer.mlp
            assert isinstance(mlp, GatedMLP)
            h = F.rms_norm(x, (hidden,), layer.attention_norm.weight, eps)
            qkv = F.linear(h, attention.qkv.weight).view(-1, heads + 2 * kv, width)
            qk = qkv[:, : heads + kv]
            if attention.head_norm is not None:
                qk = F.rms_norm(qk, (width,), None, eps) * attention.head_norm
            qk = torch.addcmul(qk * self.rotation.cos, qk.roll(width // 2, -1), self.rotation.sin)
            q, k = qk.view(rows, query, -1, width).transpose(1, 2).split((heads, kv), 1)
            v = qkv[:, heads + kv :].view(rows, query, kv, width).transpose(1, 2)
            if self.cached:
                keys, values = self.cache[number]
                keys[:, :, self.context :], values[:, :, self.context :] = k, v
                k, v = keys, values
            mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=heads != kv)
            x = x + F.linear(mixed.transpose(1, 2).reshape(-1, heads * width), attention.out.weight)
            h = F.rms_norm(x, (hidden,), layer.mlp_norm.weight, eps)
            gate, up = F.linear(h, mlp.gate_up.weight).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, mlp.down.weight)
        x = x.view(rows, query, hidden)[:, -self.block :].reshape(-1, hidden)
        logits = F.linear(F.rms_norm(x, (hidden,), self.decoder.norm.weight, eps), self.decoder.head)
        confidence, token = logits.float().softmax(-1).max(-1)
        best = confidence.view(rows, -1).topk(min(4, self.block), -1).indices
        chosen = token.view(rows, -1).gather(1, best).clamp(max=self.shape.vocab - 2)
        self.ids[:, -self.block :].scatter_(1, best, chosen)
        return logits

    def step_ms(self) -> float:
        return device_ms([self.body], repeats=3)
