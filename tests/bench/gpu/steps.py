"""Whole denoise steps of models with random weights: python -m tests.bench.gpu.steps

A step here is what the device does for one: input ids from the canvas, the forward, statistics, acceptance of a forced
number of tokens, and the canvas moved on, all in one graph. The host reads each step's answer while the next one runs.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from kernels.attention import AttentionPlan, RowGroup
from tests.bench.gpu.timing import measure_ceilings
from worker.models.layers import Decoder, ForwardContext, LayerShape

SDAR_8B = LayerShape(4096, 32, 8, 128, 12288, 1e-6, head_norm=True)
LAYERS, VOCAB = 36, 151936
PAGE = 32
MASK = 151669


def random_decoder(shape: LayerShape, layers: int, vocab: int) -> Decoder:
    decoder = Decoder(shape, layers, vocab, 1e6, False, device=torch.device("cuda"), dtype=torch.bfloat16)
    for parameter in decoder.parameters():
        if parameter.dim() > 1 and parameter.shape[-1] > 128:
            parameter.normal_(0, 0.02)
        else:
            parameter.fill_(1.0)
    return decoder.eval()


class Steps:
    """Rows of one block each, in a graph; PAIR: the block before is written again in front of the active one."""

    def __init__(self, decoder: Decoder, rows: int, block: int, per_step: int, context: int, room: int, pair: bool):
        device = decoder.embedding.device
        self.rows, self.block, self.per_step, self.pair = rows, block, per_step, pair
        self.decoder = decoder
        width = -(-(context + room) // PAGE)
        shape = decoder.layers[0].attention.shape
        pages = torch.randn(
            2, LAYERS, rows * width, PAGE, shape.num_kv_heads, shape.head_dim, device=device, dtype=torch.bfloat16
        )
        self.kv = tuple(zip(*pages, strict=True))
        self.table = torch.randperm(rows * width, device=device).view(rows, width).int()
        self.canvas = torch.full((rows, block), MASK, device=device)
        self.before = torch.randint(0, VOCAB, (rows, block), device=device)
        self.masked = torch.ones(rows, block, dtype=torch.bool, device=device)
        self.start = torch.full((rows,), context, device=device)
        # In a single-width graph the finished block is written by a pass of its own.
        self.commit = torch.zeros(rows, dtype=torch.bool, device=device)
        self.answer = torch.zeros(rows, 3, block, dtype=torch.int64, device=device)
        self.query = 2 * block if pair else block
        self.offsets = torch.arange(0, rows * self.query + 1, self.query, dtype=torch.int32, device=device)
        self.wanted = torch.arange(rows * self.query, device=device).view(rows, -1)[:, -block:].reshape(-1)
        self.barred = torch.zeros(VOCAB, dtype=torch.bool, device=device)
        self.barred[MASK] = True
        self.longest = context + room
        self.graph: torch.cuda.CUDAGraph | None = None

    def reset(self, context: int) -> None:
        self.canvas.fill_(MASK)
        self.masked.fill_(True)
        self.start.fill_(context)
        self.commit.fill_(False)

    def body(self) -> None:
        block, rows = self.block, self.rows
        within = torch.arange(block, device=self.start.device)
        first = torch.where(self.commit, self.start - block, self.start)
        position = first[:, None] + within
        ids = torch.where(self.commit[:, None], self.before, self.canvas)
        if self.pair:
            position = torch.cat((position - block, position), 1)
            ids = torch.cat((self.before, ids), 1)
        ends = (position // block + 1) * block
        slots = self.table.long().gather(1, position // PAGE) * PAGE + position % PAGE
        tokens = rows * self.query
        plan = AttentionPlan(
            slots.view(-1), self.offsets, ends.int().view(-1), self.table,
            (RowGroup(slice(0, tokens), slice(0, 0), rows, self.query, self.longest, None),),
        )  # fmt: skip
        context = ForwardContext(plan, position.view(-1), self.kv)
        hidden = self.decoder.forward(ids.view(-1), context, self.wanted)
        found = kernels.token_stats(self.decoder.logits(hidden), barred=self.barred)
        score = found.confidence.view(rows, block).masked_fill(~self.masked, -1.0)
        rank = score.argsort(-1, descending=True).argsort(-1)
        accept = (rank < self.per_step) & self.masked & ~self.commit[:, None]
        token = found.token.view(rows, block)
        self.answer.copy_(
            torch.stack((accept.long(), token, found.confidence.view(rows, block).view(torch.int32).long()), 1)
        )
        canvas = torch.where(accept, token, self.canvas)
        masked = self.masked & ~accept
        done = ~masked.any(-1)
        opened = done & ~self.commit
        self.before.copy_(torch.where(opened[:, None], canvas, self.before))
        self.canvas.copy_(torch.where(opened[:, None], MASK, canvas))
        self.masked.copy_(masked | opened[:, None])
        self.start.add_(opened * block)
        self.commit.copy_(opened & (not self.pair))

    def capture(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.body()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.body()


def device_step_ms(steps: Steps, context: int, count: int = 16) -> float:
    steps.reset(context)
    steps.graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        steps.graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


def decode(steps: Steps, context: int, tokens: int) -> tuple[float, int]:
    """Decode `tokens` for every row; return (seconds, steps). The host reads step n while n + 1 runs."""
    steps.reset(context)
    pinned = [torch.empty(steps.answer.shape, dtype=torch.int64, pin_memory=True) for _ in range(2)]
    ready = [torch.cuda.Event() for _ in range(2)]
    produced = [0] * steps.rows
    text: list[list[int]] = [[] for _ in range(steps.rows)]
    torch.cuda.synchronize()
    began = time.perf_counter()
    number = 0

    def launch(n: int) -> None:
        steps.graph.replay()
        pinned[n % 2].copy_(steps.answer, non_blocking=True)
        ready[n % 2].record()

    launch(0)
    while min(produced) < tokens:
        launch(number + 1)
        ready[number % 2].synchronize()
        accepts, ids, _ = pinned[number % 2].unbind(1)
        for row, (take, token) in enumerate(zip(accepts.tolist(), ids.tolist(), strict=True)):
            text[row].extend(t for t, a in zip(token, take, strict=True) if a)
            produced[row] += sum(take)
        number += 1
    seconds = time.perf_counter() - began
    torch.cuda.synchronize()
    return seconds, number


def floor_ms(rows: int, block: int, context: int, read: float, matrix: float) -> tuple[float, float]:
    """performance.md section 6: all weights read once, the KV once; 2 operations a weight and row, 4 for attention."""
    weights = 7.568e9
    tokens = rows * block
    memory = (2 * weights + rows * (context + block) * 147456) / read
    compute = (2 * weights * tokens + 4 * LAYERS * 32 * 128 * (context + block) * tokens) / matrix
    return memory * 1e3, compute * 1e3


class Baseline:
    """The plain loop: dense cache, SDPA, PyTorch's operations, one graph; same weights."""

    def __init__(self, decoder: Decoder, rows: int, block: int, context: int):
        self.decoder, self.rows, self.block, self.context = decoder, rows, block, context
        shape = (LAYERS, 2, rows, 8, context + block, 128)
        self.cache = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        self.ids = torch.full((rows, block), MASK, device="cuda")
        position = torch.arange(context, context + block, device="cuda").repeat(rows)
        self.rotation = decoder.rotary.forward(position)

    def body(self) -> Tensor:
        x = F.embedding(self.ids.view(-1), self.decoder.embedding)
        rows, block = self.rows, self.block
        for number, layer in enumerate(self.decoder.layers):
            attention, mlp = layer.attention, layer.mlp
            h = F.rms_norm(x, (4096,), layer.attention_norm.weight, 1e-6)
            qkv = F.linear(h, attention.qkv.weight).view(-1, 48, 128)
            qk = F.rms_norm(qkv[:, :40], (128,), None, 1e-6) * attention.head_norm
            qk = torch.addcmul(qk * self.rotation.cos, qk.roll(64, -1), self.rotation.sin)
            k, v = self.cache[number]
            k[:, :, self.context :] = qk[:, 32:].view(rows, block, 8, 128).transpose(1, 2)
            v[:, :, self.context :] = qkv[:, 40:].view(rows, block, 8, 128).transpose(1, 2)
            q = qk[:, :32].view(rows, block, 32, 128).transpose(1, 2)
            mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            x = x + F.linear(mixed.transpose(1, 2).reshape(-1, 4096), attention.out.weight)
            h = F.rms_norm(x, (4096,), layer.mlp_norm.weight, 1e-6)
            gate, up = F.linear(h, mlp.gate_up.weight).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, mlp.down.weight)
        logits = F.linear(F.rms_norm(x, (4096,), self.decoder.norm.weight, 1e-6), self.decoder.head)
        confidence, token = logits.float().softmax(-1).max(-1)
        best = confidence.view(rows, block).topk(min(4, block), -1).indices
        self.ids.scatter_(1, best, token.view(rows, block).gather(1, best) % MASK)
        return logits

    def step_ms(self) -> float:
        from tests.bench.gpu.timing import device_ms

        return device_ms([self.body], repeats=3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32, 64])
    parser.add_argument("--blocks", type=int, nargs="*", default=[32, 4])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--baseline", action="store_true")
    arguments = parser.parse_args()
    out = (Path(os.environ.get("OUT", ".")) / "steps.jsonl").open("a")
    with torch.inference_mode():
        ceilings = measure_ceilings()
        print(ceilings, flush=True)
        out.write(json.dumps(vars(ceilings)) + "\n")
        began = time.perf_counter()
        decoder = random_decoder(SDAR_8B, LAYERS, VOCAB)
        print(f"weights {torch.cuda.memory_allocated() / 1e9:.1f} GB {time.perf_counter() - began:.1f} s", flush=True)
        for block in arguments.blocks:
            per_step = {32: 4, 4: 2}.get(block, max(1, block // 8))
            for rows in arguments.rows:
                for pair in (False, True):
                    torch.cuda.reset_peak_memory_stats()
                    began = time.perf_counter()
                    steps = Steps(decoder, rows, block, per_step, arguments.context, 512, pair)
                    steps.capture()
                    captured = time.perf_counter() - began
                    ms = device_step_ms(steps, arguments.context)
                    seconds, count = decode(steps, arguments.context, 256)
                    memory, compute = floor_ms(rows, block, arguments.context, 3.35e12, 790e12)
                    own = max(floor_ms(rows, block, arguments.context, ceilings.read, ceilings.matrix))
                    floor = max(memory, compute)
                    row = {
                        "block": block, "rows": rows, "pair": pair, "step_ms": ms, "floor_ms": floor, "ratio": ms / floor,
                        "floor_measured_ms": own, "ratio_measured": ms / own, "tokens_s": rows * 256 / seconds,
                        "steps": count, "host_share": 1 - ms * 1e-3 * count / seconds,
                        "peak_gb": torch.cuda.max_memory_allocated() / 1e9, "capture_s": captured,
                    }  # fmt: skip
                    out.write(json.dumps(row) + "\n")
                    out.flush()
                    print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
                    del steps
                if arguments.baseline:
                    ms = Baseline(decoder, rows, block, arguments.context).step_ms()
                    row = {"baseline": "sdpa, dense cache, graph", "block": block, "rows": rows, "step_ms": ms}
                    out.write(json.dumps(row) + "\n")
                    print(row, flush=True)


if __name__ == "__main__":
    main()
