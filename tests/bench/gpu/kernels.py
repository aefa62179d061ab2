"""Each kernel at the shapes of a step, beside PyTorch's own operation: python -m tests.bench.gpu.kernels [names]"""

import argparse
import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels.gpu.attention
import kernels.gpu.linear
import kernels.gpu.moe
import kernels.gpu.rms_norm
import kernels.gpu.rope
import kernels.gpu.router
import kernels.gpu.swiglu
import kernels.gpu.token_stats
from kernels.attention import AttentionPlan, RowGroup
from kernels.gpu import clusters
from kernels.gpu.attention import Tile, attend, choose_splits
from kernels.gpu.linear import Tiling, stream
from kernels.moe import Experts, Router, route, router_logits
from kernels.rms_norm import rms_norm
from kernels.rope import rope_tables
from kernels.rope_write import rope_write
from kernels.swiglu import swiglu
from kernels.token_stats import Noise
from tests.bench.gpu.shapes import experts_in_blocks
from tests.bench.gpu.timing import device_ms, measure_ceilings
from worker.models.fp8 import quantize_experts

Report = Callable[[str, str, int, str, float, float], None]
Pace = Callable[[Sequence[Callable[[], object]]], float]
Case = tuple[str, int, int, int, int, int]

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


def bench_linear(report: Report, pace: Pace) -> None:
    """SDAR-8B's products; copies of the weights so that none stays in the cache."""
    shapes = {"qkv": (6144, 4096, False), "out": (4096, 4096, False), "gate_up": (24576, 4096, True)}
    shapes |= {"down": (4096, 12288, False), "head": (151936, 4096, False), "gate_up, adapters": (24832, 4096, False)}
    for name, (rows, inputs, gated) in shapes.items():
        copies = max(2, 300_000_000 // (2 * rows * inputs))
        weights = [_normal(rows, inputs) for _ in range(copies)]
        gigabytes = 2 * rows * inputs / 1e9
        for tokens in (8, 32, 64, 128, 160, 192, 256, 288, 320, 384, 512, 1024):
            x = _normal(tokens, inputs)
            ms = pace([partial(_plain, x, w, gated) for w in weights])
            report("linear", name, tokens, "cublas", ms, gigabytes / ms)
            chosen = kernels.gpu.linear.gated_linear if gated else kernels.gpu.linear.linear
            ms = pace([partial(chosen, x, w) for w in weights])
            report("linear", name, tokens, "as chosen", ms, gigabytes / ms)
            for tiling in _tilings(name, tokens):
                calls = [partial(stream, x, w, None, tiling, gated=gated) for w in weights]
                _try(report, pace, "linear", name, tokens, str(tiling), calls, gigabytes)
            if clusters.able(x.device):
                tiling = clusters.choose(rows, inputs, tokens, clusters.room_of(x.device), gated=gated)
                calls = [partial(clusters.multiply, x, w, None, tiling, gated=gated) for w in weights]
                _try(report, pace, "linear", name, tokens, str(tiling), calls, gigabytes)


def bench_shares(report: Report, pace: Pace) -> None:
    """Smaller products: what each of two ranks has of SDAR-8B's layers, and LLaDA2-mini's."""
    shapes = {"half a qkv": (3072, 4096, False), "half an out": (4096, 2048, False)}
    shapes |= {"half a gate_up": (12288, 4096, True), "half a down": (4096, 6144, False)}
    shapes |= {"llada2-mini's qkv": (3072, 2048, False), "llada2-mini's out": (2048, 2048, False)}
    for name, (rows, inputs, gated) in shapes.items():
        weights = [_normal(rows, inputs) for _ in range(max(2, 300_000_000 // (2 * rows * inputs)))]
        gigabytes = 2 * rows * inputs / 1e9
        for tokens in (32, 64, 128, 256):
            x = _normal(tokens, inputs)
            tiling = clusters.choose(rows, inputs, tokens, clusters.room_of(x.device), gated=gated)
            ways = {
                "cublas": partial(_plain, gated=gated),
                "as chosen": kernels.gpu.linear.gated_linear if gated else kernels.gpu.linear.linear,
                str(tiling): partial(clusters.multiply, bias=None, tiling=tiling, gated=gated),
            }
            for how, multiply in ways.items():
                _try(report, pace, "share", name, tokens, how, [partial(multiply, x, w) for w in weights], gigabytes)


def bench_layer(report: Report, pace: Pace) -> None:
    """SDAR-8B's products and the norms between them, from the output projection to the next layer's qkv."""
    shapes = ((4096, 4096), (24576, 4096), (4096, 12288), (6144, 4096))
    layers = [[_normal(*shape) for shape in shapes] for _ in range(3)]
    gigabytes = sum(2 * rows * inputs for rows, inputs in shapes) / 1e9
    norm = torch.ones(4096, **_SHARED)
    for tokens in (4, 32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352):
        x, residual = _normal(tokens, 4096), _normal(tokens, 4096)
        for how, chain in (("norms by themselves", _layer), ("norms folded", _folded_layer)):
            calls = [partial(chain, x, residual, norm, *weights) for weights in layers]
            _try(report, pace, "layer", "SDAR-8B", tokens, how, calls, gigabytes)


def _layer(
    x: Tensor, residual: Tensor, norm: Tensor, out: Tensor, gate_up: Tensor, down: Tensor, qkv: Tensor
) -> Tensor:
    normed, total = kernels.rms_norm(kernels.linear(x, out), norm, 1e-6, residual)
    inner = kernels.gated_linear(normed, gate_up)
    normed, _ = kernels.rms_norm(kernels.linear(inner, down), norm, 1e-6, total)
    return kernels.linear(normed, qkv)


def _folded_layer(
    x: Tensor, residual: Tensor, norm: Tensor, out: Tensor, gate_up: Tensor, down: Tensor, qkv: Tensor
) -> Tensor:
    between, total = kernels.unscaled_linear(x, out, None, residual, norm, 1e-6)
    inner = kernels.scaled_gated_linear(between.values, between.squares, between.eps, gate_up)
    between, _ = kernels.unscaled_linear(inner, down, None, total, norm, 1e-6)
    return kernels.scaled_linear(between.values, between.squares, between.eps, qkv)


def _plain(x: Tensor, weight: Tensor, gated: bool) -> Tensor:
    y = F.linear(x, weight)
    return kernels.gpu.swiglu.swiglu(y) if gated else y


def _try(
    report: Report,
    pace: Pace,
    op: str,
    shape: str,
    tokens: int,
    how: str,
    calls: Sequence[Callable[[], object]],
    work: float,
) -> None:
    """Report work per ms; a tile that does not fit is reported as such, the others count."""
    try:
        ms = pace(calls)
    except Exception as error:
        report(op, shape, tokens, f"{how} {type(error).__name__}", 0.0, 0.0)
        return
    report(op, shape, tokens, how, ms, work / ms)


def _tilings(name: str, tokens: int) -> list[Tiling]:
    if tokens > 64:
        return []
    if name == "head":
        return [Tiling(64, 128, 1, 4, 3), Tiling(128, 64, 1, 4, 4)]
    if name == "gate_up":
        return [Tiling(64, 64, 1, 4, 4), Tiling(64, 128, 1, 4, 3), Tiling(32, 128, 1, 4, 4)]
    return [Tiling(64, 128, 2, 4, 3), Tiling(64, 64, 2, 4, 6), Tiling(64, 128, 4, 4, 3), Tiling(128, 64, 4, 8, 5)]


_ATTENTION = (
    ("sdar b32", 32, 8, 1, 32, 1056),
    ("sdar b32 pair", 32, 8, 1, 64, 1056),
    ("sdar b32", 32, 8, 8, 32, 1056),
    ("sdar b32", 32, 8, 32, 32, 1056),
    ("sdar b32", 32, 8, 64, 32, 1056),
    ("sdar b4 pair", 32, 8, 1, 8, 1056),
    ("sdar b4 pair", 32, 8, 64, 8, 1056),
    ("sdar b4", 32, 8, 8, 4, 1056),
    ("sdar b4", 32, 8, 32, 4, 1056),
    ("sdar b4", 32, 8, 64, 4, 1056),
    ("llada", 32, 32, 8, 32, 1280),
    ("llada2", 16, 4, 32, 32, 1056),
    ("prefill", 32, 8, 1, 1024, 1024),
)


def bench_attention(report: Report, pace: Pace, cases: Sequence[Case] | None = None) -> None:
    for name, heads, kv_heads, rows, query, context in cases or _ATTENTION:
        plan = uniform_plan(rows, query, context, 32)
        pages = plan.page_table.numel()
        caches = [(_normal(pages, 32, kv_heads, 128), _normal(pages, 32, kv_heads, 128)) for _ in range(4)]
        q = _normal(rows * query, heads, 128) * 50
        flops = 4 * heads * 128 * context * rows * query / 1e9
        ms = pace([partial(kernels.gpu.attention.attention, q, k, v, plan, 128**-0.5) for k, v in caches])
        report("attention", name, rows, f"q={query} as chosen", ms, flops / ms)
        packed = query * heads // kv_heads
        for tile in _TILES:
            if tile.block_m > max(64, packed) or tile.block_m * 4 < min(packed, 128):
                continue
            programs = rows * -(-packed // tile.block_m) * kv_heads
            few = choose_splits(programs, 16, q.device)
            for splits in sorted({few, max(1, few // 2), min(16, few * 2)}):
                out = torch.empty_like(q)
                calls = [partial(attend, q, k, v, plan, 128**-0.5, query, tile, splits, out) for k, v in caches]
                _try(report, pace, "attention", name, rows, f"q={query} {tile} splits={splits}", calls, flops)
        dense = [tuple(t.view(rows, -1, kv_heads, 128)[:, :context].transpose(1, 2) for t in c) for c in caches]
        qd = q.view(rows, query, heads, 128).transpose(1, 2)
        ms = pace([partial(F.scaled_dot_product_attention, qd, k, v, enable_gqa=True) for k, v in dense])
        report("attention", name, rows, "sdpa, dense cache", ms, flops / ms)


_TILES = (
    Tile(64, 64, 4, 3, ahead=True),
    Tile(64, 64, 4, 4, ahead=True),
    Tile(128, 32, 8, 3, ahead=True, registers=128),
    Tile(128, 64, 8, 2, ahead=True, registers=128),
    Tile(64, 64, 4, 2, ahead=True),
    Tile(128, 64, 8, 3, ahead=True),
    Tile(16, 32, 4, 3, ahead=True),
    Tile(16, 64, 4, 3, ahead=True),
    Tile(16, 64, 2, 4, ahead=True),
    Tile(128, 64, 8, 3),
    Tile(128, 128, 8, 2),
    Tile(128, 64, 8, 2),
    Tile(64, 64, 4, 3),
    Tile(64, 64, 4, 2),
    Tile(64, 128, 4, 2),
    Tile(32, 64, 4, 3),
    Tile(16, 128, 4, 2),
    Tile(16, 64, 2, 4),
)


def bench_small(report: Report, pace: Pace) -> None:
    for tokens in (32, 256, 2048):
        x, r, w = _normal(tokens, 4096), _normal(tokens, 4096), _normal(4096)
        ms = pace([partial(kernels.gpu.rms_norm.rms_norm, x, w, 1e-6, r)] * 8)
        report("rms_norm", "4096 + residual", tokens, "triton", ms, tokens * 4096 * 8 / ms / 1e9)
        ms = pace([partial(rms_norm, x, w, 1e-6, r)] * 8)
        report("rms_norm", "4096 + residual", tokens, "torch", ms, tokens * 4096 * 8 / ms / 1e9)
        g = _normal(tokens, 24576)
        ms = pace([partial(kernels.gpu.swiglu.swiglu, g)] * 8)
        report("swiglu", "12288", tokens, "triton", ms, tokens * 12288 * 6 / ms / 1e9)
        ms = pace([partial(swiglu, g)] * 8)
        report("swiglu", "12288", tokens, "torch", ms, tokens * 12288 * 6 / ms / 1e9)
        qkv, weight = _normal(tokens, 48, 128), _normal(40, 128)
        inv_freq = 1e6 ** -(torch.arange(0, 128, 2, device="cuda").float() / 128)
        cos, sin = rope_tables(torch.arange(tokens, device="cuda"), inv_freq, torch.bfloat16)
        pages, slots = _normal(tokens, 32, 8, 128), torch.randperm(tokens * 32, device="cuda")[:tokens]
        arguments = (qkv, cos, sin, weight, 1e-6, pages, pages, slots)
        ms = pace([partial(kernels.gpu.rope.rope_write, *arguments)] * 8)
        report("rope_write", "48 heads", tokens, "triton", ms, tokens * 48 * 128 * 4 / ms / 1e9)
        ms = pace([partial(rope_write, *arguments)] * 8)
        report("rope_write", "48 heads", tokens, "torch", ms, tokens * 48 * 128 * 4 / ms / 1e9)


def bench_stats(report: Report, pace: Pace) -> None:
    barred = torch.zeros(151936, dtype=torch.bool, device="cuda")
    for rows in (32, 256, 2048):
        logits = [torch.randn(rows, 151936, **_SHARED) for _ in range(2 if rows == 2048 else 8)]
        gigabytes = logits[0].nbytes / 1e9
        ms = pace([partial(kernels.gpu.token_stats.token_stats, z, barred=barred) for z in logits])
        report("token_stats", "greedy", rows, "triton", ms, gigabytes / ms)
        full = {"barred": barred, "entropy": True, "margin": True}
        ms = pace([partial(kernels.gpu.token_stats.token_stats, z, **full) for z in logits])
        report("token_stats", "entropy, margin", rows, "triton", ms, gigabytes / ms)
        number = torch.arange(rows, device="cuda")
        noise = Noise(number, number, number, number)
        ms = pace([partial(kernels.gpu.token_stats.token_stats, z, noise=noise) for z in logits])
        report("token_stats", "sampled", rows, "triton", ms, gigabytes / ms)
        ms = pace([partial(_softmax_max, z) for z in logits])
        report("token_stats", "softmax, max", rows, "torch", ms, gigabytes / ms)


def _softmax_max(logits: Tensor) -> object:
    return torch.softmax(logits.float(), -1).max(-1)


def bench_moe(report: Report, pace: Pace, tiles: Sequence[kernels.gpu.moe.Tile] = ()) -> None:
    """LLaDA2-mini's expert layer; rates are TB/s of the weights that are touched.

    With tiles, experts of 8 bits are cut by those of them that suit the tokens too.
    """
    router = Router(8, "sigmoid", 8, 4, True, 2.5)
    bias = torch.zeros(256, device="cuda")
    wide = Experts(_normal(257, 1024, 2048), _normal(257, 2048, 512), shared=True)
    stacks = {"bf16": wide, "e4m3, outputs": quantize_experts(wide), "e4m3, blocks": experts_in_blocks(wide)}
    for tokens in (32, 256, 1024, 1152, 2048, 2304):
        x, logits = _normal(tokens, 2048), torch.randn(tokens, 256, device="cuda")
        weight = torch.randn(256, 2048, device="cuda")
        for how, multiply in (("triton", kernels.gpu.router.multiply_exactly), ("torch", router_logits)):
            ms = pace([partial(multiply, x, weight)] * 4)
            report("router's product", "llada2-mini", tokens, how, ms, 2 * tokens * 256 * 2048 / ms * 1e-9)
        ids, weights = kernels.gpu.router.route(logits, router, bias)
        touched = ids.unique().numel()
        ms = pace([partial(kernels.gpu.router.route, logits, router, bias)] * 4)
        report("route", "llada2-mini", tokens, "triton", ms, 0.0)
        ms = pace([partial(route, logits, router, bias)] * 2)
        report("route", "llada2-mini", tokens, "torch", ms, 0.0)
        for name, stack in stacks.items():
            shape = f"llada2-mini, {touched} touched, {name}"
            gigabytes = (touched + 1) * 3 * 2048 * 512 * stack.down.element_size() / 1e9
            calls = [partial(kernels.gpu.moe.mix, x, logits, router, stack, bias)] * 4
            _try(report, pace, "choice, experts, shared one", shape, tokens, "as chosen", calls, gigabytes)
            calls = [partial(kernels.gpu.moe.experts, x, ids, weights, stack)] * 4
            _try(report, pace, "experts, shared one", shape, tokens, "as chosen", calls, gigabytes)
            for tile in tiles if stack.down_scale is not None else ():
                if max(16, tokens // 64) <= tile.tokens <= max(32, tokens // 16):
                    calls = [partial(kernels.gpu.moe.multiply, x, ids, weights, stack, tile)] * 4
                    _try(report, pace, "experts, shared one", shape, tokens, str(tile), calls, gigabytes)


_EXPERT_TILES = (
    "16,64,128,64,4,5",
    "16,64,128,64,4,6",
    "16,64,128,64,4,8",
    "16,64,128,128,4,4",
    "16,64,64,128,4,5",
    "16,128,128,64,8,5",
    "32,64,128,64,4,4",
    "32,64,128,64,4,5",
    "32,64,128,64,4,6",
    "32,64,128,128,4,3",
    "32,128,128,64,8,5",
    "64,64,128,64,4,3",
    "64,64,128,64,4,4",
    "64,64,128,64,8,4,128",
    "64,128,128,64,8,4",
    "64,64,128,128,8,3",
    "128,64,128,64,8,3,128",
    "128,64,128,64,8,4",
    "128,128,128,64,8,4",
)
"""Tokens, columns of the gate and of the second product, inputs, warps, stages, registers."""


def _tile(text: str) -> kernels.gpu.moe.Tile:
    return kernels.gpu.moe.Tile(*map(int, text.split(",")))


_BENCHES = {
    "linear": bench_linear,
    "shares": bench_shares,
    "layer": bench_layer,
    "attention": bench_attention,
    "small": bench_small,
    "stats": bench_stats,
    "moe": bench_moe,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--warm", action="store_true", help="run everything once, so that it is compiled; no report")
    parser.add_argument(
        "--tiles", nargs="*", type=_tile, help="of experts; alone: a list of them", metavar="TOKENS,GATE,DOWN,..."
    )
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--parts", type=int, default=1, help="take every n-th case of attention")
    arguments = parser.parse_args()
    out = Path(os.environ.get("OUT", ".")) / ("warm.jsonl" if arguments.warm else "kernels.jsonl")

    def pace(calls: Sequence[Callable[[], object]]) -> float:
        if arguments.warm:
            calls[0]()
            return 1.0
        return device_ms(calls, repeats=3, least_ms=4)

    with out.open("a") as file, torch.inference_mode():
        if not arguments.warm:
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
            if not arguments.warm:
                print(f"{op:11s} {shape:24s} {tokens:5d} {how:62s} {ms * 1e3:9.2f} us {rate:8.3f}", flush=True)

        for name in arguments.names or _BENCHES:
            if name == "attention":
                bench_attention(report, pace, _ATTENTION[arguments.part :: arguments.parts])
            elif name == "moe":
                tiles = arguments.tiles
                bench_moe(report, pace, [*map(_tile, _EXPERT_TILES)] if tiles == [] else tiles or ())
            else:
                _BENCHES[name](report, pace)


if __name__ == "__main__":
    main()
