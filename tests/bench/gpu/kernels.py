"""Each kernel at the shapes of a step, beside PyTorch's own operation: python -m tests.bench.gpu.kernels [names]"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels.gpu.attention
import kernels.gpu.linear
import kernels.gpu.moe
import kernels.gpu.rms_norm
import kernels.gpu.rope
import kernels.gpu.swiglu
import kernels.gpu.token_stats
from kernels.attention import AttentionPlan, RowGroup
from kernels.gpu.attention import Tile, attend, choose_splits
from kernels.gpu.linear import Tiling
from kernels.moe import Router
from kernels.rope import rope_tables
from tests.bench.gpu.timing import device_ms, measure_ceilings

_SHARED = {"device": "cuda", "dtype": torch.bfloat16}


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, **_SHARED) * 0.02


def uniform_plan(rows: int, query: int, context: int, page: int) -> AttentionPlan:
    """Return rows that each ask for the last `query` of `context` positions, over shuffled pages."""
    tokens, width = rows * query, -(-context // page)
    pages = torch.randperm(rows * width, device="cuda").view(rows, width).int()
    position = torch.arange(context - query, context, device="cuda")
    slots = pages[:, position // page].long() * page + position % page
    return AttentionPlan(
        slots=slots.view(-1),
        row_offsets=torch.arange(0, tokens + 1, query, dtype=torch.int32, device="cuda"),
        visible_end=torch.full((tokens,), context, dtype=torch.int32, device="cuda"),
        page_table=pages,
        groups=(RowGroup(slice(0, tokens), slice(0, 0), rows, query, context, None),),
    )


def bench_linear(report: Callable[..., None]) -> None:
    """SDAR-8B's four products; copies of the weights so that none stays in the cache."""
    shapes = {"qkv": (6144, 4096, False), "out": (4096, 4096, False), "gate_up": (24576, 4096, True)}
    shapes |= {"down": (4096, 12288, False)}
    for name, (rows, inputs, gated) in shapes.items():
        copies = max(2, 400_000_000 // (2 * rows * inputs))
        weights = [_normal(rows, inputs) for _ in range(copies)]
        gigabytes = 2 * rows * inputs / 1e9
        for tokens in (32, 64):
            x = _normal(tokens, inputs)

            def plain(w: Tensor, x: Tensor = x, gated: bool = gated) -> Tensor:
                y = F.linear(x, w)
                return kernels.gpu.swiglu.swiglu(y) if gated else y

            ms = device_ms([lambda w=w: plain(w) for w in weights])
            report("linear", name, tokens, "cublas", ms, gigabytes / ms)
            for tiling in _tilings(rows // 2 if gated else rows, inputs, gated, tokens):

                def ours(w: Tensor, x: Tensor = x, tiling: Tiling = tiling, gated: bool = gated) -> Tensor:
                    return kernels.gpu.linear.stream(x, w, None, tiling, gated=gated)

                try:
                    ms = device_ms([lambda w=w: ours(w) for w in weights])
                except Exception as error:  # a tiling may not fit; the others count
                    report("linear", name, tokens, f"{tiling} {type(error).__name__}", 0.0, 0.0)
                    continue
                report("linear", name, tokens, str(tiling), ms, gigabytes / ms)


def _tilings(columns: int, inputs: int, gated: bool, tokens: int) -> list[Tiling]:
    if gated:
        found = [Tiling(64, 64, 1, 4, 4), Tiling(64, 64, 2, 4, 4), Tiling(64, 128, 1, 4, 3), Tiling(32, 128, 1, 4, 4)]
        return found if tokens == 32 else found[:2]
    some = [Tiling(64, 128, s, 4, 3) for s in (1, 2, 4)] + [Tiling(64, 64, s, 4, 6) for s in (2, 4)]
    some += [Tiling(128, 64, 4, 8, 5), Tiling(32, 128, 2, 4, 5)]
    return some if tokens == 32 else some[1:5]


def bench_attention(report: Callable[..., None]) -> None:
    for name, heads, kv_heads, rows, query, context in (
        ("sdar b32", 32, 8, 1, 32, 1056),
        ("sdar b32 pair", 32, 8, 1, 64, 1056),
        ("sdar b32", 32, 8, 8, 32, 1056),
        ("sdar b32", 32, 8, 32, 32, 1056),
        ("sdar b32", 32, 8, 64, 32, 1056),
        ("sdar b4 pair", 32, 8, 1, 8, 1056),
        ("sdar b4 pair", 32, 8, 64, 8, 1056),
        ("llada", 32, 32, 8, 32, 1280),
        ("llada2", 16, 4, 32, 32, 1056),
        ("prefill", 32, 8, 1, 1024, 1024),
    ):
        plan = uniform_plan(rows, query, context, 32)
        pages = plan.page_table.numel()
        caches = [(_normal(pages, 32, kv_heads, 128), _normal(pages, 32, kv_heads, 128)) for _ in range(4)]
        q = _normal(rows * query, heads, 128) * 50

        def ours(k: Tensor, v: Tensor, q: Tensor = q, plan: AttentionPlan = plan) -> Tensor:
            return kernels.gpu.attention.attention(q, k, v, plan, 128**-0.5)

        ms = device_ms([lambda c=c: ours(*c) for c in caches])
        flops = 4 * heads * 128 * context * rows * query
        report("attention", name, rows, f"paged q={query}", ms, flops / ms / 1e9)
        _sweep_tiles(report, name, q, caches, plan, flops)
        dense = [tuple(t.view(rows, -1, kv_heads, 128)[:, :context].transpose(1, 2) for t in c) for c in caches]
        qd = q.view(rows, query, heads, 128).transpose(1, 2)
        sdpa = [lambda k=k, v=v: F.scaled_dot_product_attention(qd, k, v, enable_gqa=True) for k, v in dense]
        ms = device_ms(sdpa)
        report("attention", name, rows, "sdpa, dense cache", ms, flops / ms / 1e9)


def _sweep_tiles(
    report: Callable[..., None],
    name: str,
    q: Tensor,
    caches: list[tuple[Tensor, Tensor]],
    plan: AttentionPlan,
    flops: int,
) -> None:
    rows, query = plan.groups[0].rows, plan.groups[0].query
    kv_heads = caches[0][0].shape[2]
    packed = query * q.shape[1] // kv_heads
    for tile in (
        Tile(128, 64, 8, 3), Tile(128, 128, 8, 2), Tile(128, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 128, 4, 2),
        Tile(64, 32, 4, 4), Tile(32, 64, 4, 3), Tile(32, 128, 4, 2), Tile(16, 128, 4, 2), Tile(16, 64, 2, 4),
    ):  # fmt: skip
        if tile.block_m > max(64, packed) or tile.block_m * 4 < min(packed, 128):
            continue
        programs = rows * -(-packed // tile.block_m) * kv_heads
        choices = {choose_splits(programs, 16, q.device), choose_splits(max(1, programs // 2), 16, q.device)}
        for splits in sorted(choices):

            def ours(k: Tensor, v: Tensor, tile: Tile = tile, splits: int = splits) -> Tensor:
                return attend(q, k, v, plan, 128**-0.5, query, tile, splits, torch.empty_like(q))

            try:
                ms = device_ms([lambda c=c: ours(*c) for c in caches], repeats=3, least_ms=4)
            except Exception as error:  # a tile may not fit; the others count
                report("attention", name, rows, f"{tile} {splits} {type(error).__name__}", 0.0, 0.0)
                continue
            report("attention", name, rows, f"q={query} {tile} splits={splits}", ms, flops / ms / 1e9)


def bench_small(report: Callable[..., None]) -> None:
    for tokens in (32, 256, 2048):
        x, r, w = _normal(tokens, 4096), _normal(tokens, 4096), _normal(4096)
        ms = device_ms([lambda: kernels.gpu.rms_norm.rms_norm(x, w, 1e-6, r)] * 8)
        report("rms_norm", "4096 + residual", tokens, "triton", ms, tokens * 4096 * 8 / ms / 1e6)
        ms = device_ms([lambda: F.rms_norm(x + r, (4096,), w, 1e-6)] * 8)
        report("rms_norm", "4096 + residual", tokens, "torch", ms, tokens * 4096 * 8 / ms / 1e6)
        g = _normal(tokens, 24576)
        ms = device_ms([lambda: kernels.gpu.swiglu.swiglu(g)] * 8)
        report("swiglu", "12288", tokens, "triton", ms, tokens * 12288 * 6 / ms / 1e6)
        qkv, weight = _normal(tokens, 48, 128), _normal(40, 128)
        inv_freq = 1e6 ** -(torch.arange(0, 128, 2, device="cuda").float() / 128)
        cos, sin = rope_tables(torch.arange(tokens, device="cuda"), inv_freq, torch.bfloat16)
        pages, slots = _normal(tokens, 32, 8, 128), torch.randperm(tokens * 32, device="cuda")[:tokens]
        ms = device_ms([lambda: kernels.gpu.rope.rope_write(qkv, cos, sin, weight, 1e-6, pages, pages, slots)] * 8)
        report("rope_write", "48 heads", tokens, "triton", ms, tokens * 48 * 128 * 4 / ms / 1e6)


def bench_stats(report: Callable[..., None]) -> None:
    barred = torch.zeros(151936, dtype=torch.bool, device="cuda")
    for rows in (32, 256, 2048):
        logits = [torch.randn(rows, 151936, **_SHARED) for _ in range(2 if rows == 2048 else 8)]
        gigabytes = logits[0].nbytes / 1e9
        ms = device_ms([lambda z=z: kernels.gpu.token_stats.token_stats(z, barred=barred) for z in logits])
        report("token_stats", "greedy", rows, "triton", ms, gigabytes / ms)
        stats = [lambda z=z: kernels.gpu.token_stats.token_stats(z, entropy=True, margin=True) for z in logits]
        ms = device_ms(stats)
        report("token_stats", "entropy, margin", rows, "triton", ms, gigabytes / ms)
        ms = device_ms([lambda z=z: torch.softmax(z.float(), -1).max(-1) for z in logits])
        report("token_stats", "softmax, max", rows, "torch", ms, gigabytes / ms)


def bench_moe(report: Callable[..., None]) -> None:
    """LLaDA2-mini's expert layer."""
    router = Router(8, "sigmoid", 8, 4, True, 2.5)
    gate_up, down, bias = _normal(256, 1024, 2048), _normal(256, 2048, 512), torch.zeros(256, device="cuda")
    for tokens in (32, 256, 1024, 2048):
        x, logits = _normal(tokens, 2048), torch.randn(tokens, 256, device="cuda")
        ids, weights = kernels.gpu.moe.route(logits, router, bias)
        touched = ids.unique().numel()
        ms = device_ms([lambda: kernels.gpu.moe.route(logits, router, bias)] * 4)
        report("route", "llada2-mini", tokens, "triton", ms, 0.0)
        ms = device_ms([lambda: kernels.gpu.moe.experts(x, ids, weights, gate_up, down)] * 4)
        report("experts", f"llada2-mini, {touched} touched", tokens, "triton", ms, touched * 6.29e-3 / ms)


_BENCHES = {
    "linear": bench_linear,
    "attention": bench_attention,
    "small": bench_small,
    "stats": bench_stats,
    "moe": bench_moe,
}


def main(names: list[str]) -> None:
    out = Path(os.environ.get("OUT", ".")) / "kernels.jsonl"
    with out.open("a") as file, torch.inference_mode():
        ceilings = measure_ceilings()
        print(ceilings, flush=True)
        file.write(json.dumps(vars(ceilings)) + "\n")

        def report(op: str, shape: str, tokens: int, how: str, ms: float, rate: float) -> None:
            row = {
                "op": op,
                "shape": shape,
                "tokens": tokens,
                "how": how,
                "us": round(ms * 1e3, 2),
                "rate": round(rate, 4),
            }
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(f"{op:11s} {shape:24s} {tokens:5d} {how:60s} {ms * 1e3:9.2f} us {rate:8.3f}", flush=True)

        for name in names or _BENCHES:
            _BENCHES[name](report)


if __name__ == "__main__":
    main(sys.argv[1:])
