"""Let steps run with the tiles that `tests.bench.gpu.kernels` has found best, beside those that the code chooses."""

import json
import re
from pathlib import Path

import torch
from torch import Tensor

import kernels.gpu.attention as attention_twin
import kernels.gpu.linear as linear_twin
from kernels.attention import AttentionPlan
from kernels.gpu.attention import Tile, attend
from kernels.gpu.linear import Tiling, stream

_PRODUCTS = {
    "qkv": (6144, 4096, False),
    "out": (4096, 4096, False),
    "gate_up": (24576, 4096, True),
    "down": (4096, 12288, False),
    "head": (151936, 4096, False),
}
_HEADS = {"sdar": (32, 8), "prefill": (32, 8), "llada": (32, 32), "llada2": (16, 4)}


def use_best(path: Path) -> dict[str, str]:
    """Replace the twins' choices by the fastest of each measured case; return what was chosen."""
    best: dict[tuple[str, str, int, str], tuple[float, str]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if row.get("op") not in ("linear", "attention") or row["us"] <= 0 or "sdpa" in row["how"]:
            continue
        query = re.match(r"q=\d+", row["how"])
        key = (row["op"], row["shape"], row["tokens"], query.group() if query else "")
        best[key] = min(best.get(key, (1e9, "")), (row["us"], row["how"]))
    products: dict[tuple[int, int, bool, int], Tiling | None] = {}
    tiles: dict[tuple[int, int, int, int], tuple[Tile, int]] = {}
    for (op, shape, tokens, query), (_, how) in best.items():
        if op == "linear":
            products[*_PRODUCTS[shape], tokens] = None if how == "cublas" else eval(how)
        elif "Tile" in how:
            found = re.match(r"q=\d+ (Tile\(.*\)) splits=(\d+)", how)
            assert found
            heads = _HEADS[shape.split()[0]]
            tiles[*heads, tokens, int(query[2:])] = eval(found.group(1)), int(found.group(2))
    _replace_linear(products)
    _replace_attention(tiles)
    return {" ".join(map(str, key)): how for key, (_, how) in best.items()}


def _replace_linear(products: dict[tuple[int, int, bool, int], Tiling | None]) -> None:
    linear, gated_linear = linear_twin.linear, linear_twin.gated_linear

    def tuned(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        key = (weight.shape[0], weight.shape[1], False, x.shape[0])
        if key not in products:
            return linear(x, weight, bias)
        tiling = products[key]
        plain = torch.nn.functional.linear
        return plain(x, weight, bias) if tiling is None else stream(x, weight, bias, tiling, gated=False)

    def tuned_gated(x: Tensor, weight: Tensor) -> Tensor:
        key = (weight.shape[0], weight.shape[1], True, x.shape[0])
        if key not in products:
            return gated_linear(x, weight)
        tiling = products[key]
        if tiling is None:
            return linear_twin.swiglu(torch.nn.functional.linear(x, weight))
        return stream(x, weight, None, tiling, gated=True)

    linear_twin.linear, linear_twin.gated_linear = tuned, tuned_gated


def _replace_attention(tiles: dict[tuple[int, int, int, int], tuple[Tile, int]]) -> None:
    attention = attention_twin.attention

    def tuned(
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        plan: AttentionPlan,
        scale: float,
        scales: Tensor | None = None,
    ) -> Tensor:
        longest = max(group.query for group in plan.groups)
        found = tiles.get((q.shape[1], k_pages.shape[2], plan.page_table.shape[0], longest))
        if found is None:
            return attention(q, k_pages, v_pages, plan, scale, scales)
        return attend(q, k_pages, v_pages, plan, scale, longest, *found, torch.empty_like(q), scales)

    attention_twin.attention = tuned
