"""Dream's golden runs as requests: the plain loop with its schedules, and Fast-dLLM's with and without blocks."""

from typing import Any, Literal

import torch
from torch import Tensor

from shared.commands import Generate, Limits, Sampling
from shared.decoding import Decoding, Entropy, MaskgitPlus, Origin, Threshold, ThresholdQuota, TopkMargin
from tests.goldens.folder import Entry, GoldenFolder
from tests.goldens.runs import Run

_EPS = 1e-3
_TIMED: dict[str, type[Origin | MaskgitPlus | TopkMargin | Entropy]] = {
    "origin": Origin,
    "maskgit_plus": MaskgitPlus,
    "topk_margin": TopkMargin,
    "entropy": Entropy,
}


def to_runs(folder: GoldenFolder, entry: Entry) -> list[Run]:
    """Return a run for each row; padding is left away, for a row sees nothing of it."""
    args = entry["args"]
    cache: Literal["none", "prefix", "dual"] = "none"
    if "block_length" in args:
        cache = "dual" if args.get("dual_cache") else "prefix"
    runs: list[Run] = []
    for row, prompt in enumerate(entry["prompts"]):
        output: list[int] = entry["output"][row]
        request = Generate(
            id=f"{entry['name']}-{row}",
            model="golden",
            prompt=tuple(prompt),
            sampling=Sampling(
                temperature=args["temperature"],
                top_p=args.get("top_p", 1.0),
                top_k=args.get("top_k", 0),
                seed=entry.get("torch_seed", 0),
            ),
            limits=Limits(max_tokens=len(output), ignore_eos=True),
            decoding=_decoding(args),
            block_length=args.get("block_length"),
            cache=cache,
        )
        uniforms = _spread(folder, entry) if "rand_key" in entry else None
        runs.append(Run(request, output, entry["nfe"], uniforms))
    return runs


def _decoding(args: dict[str, Any]) -> Decoding:
    # Temperature and filters are applied before the confidence is read.
    exact: dict[str, Any] = {"filler_rules": False, "early_stop": False, "confidence": "filtered"}
    steps, length = args["steps"], args.get("block_length")
    if length is not None:
        exact["renewal_decides"] = "first"
        steps //= args["max_new_tokens"] // length
    if args["alg"] != "confidence_threshold":
        return _TIMED[args["alg"]](steps=steps, eps=args.get("eps", _EPS), **exact)
    if length is not None:
        return Threshold(threshold=args["threshold"], **exact)
    return ThresholdQuota(threshold=args["threshold"], steps=steps, **exact)


def _spread(folder: GoldenFolder, entry: Entry) -> Tensor:
    """Return the drawn numbers by step and position; a step drew one for each position still masked, in order."""
    accept = torch.tensor(entry["accept_step"][0])
    parts = folder.arrays()[entry["rand_key"]].split(entry["rand_lens"])
    uniforms = torch.ones(len(parts), len(accept))
    for step, part in enumerate(parts):
        uniforms[step, accept >= step] = part
    return uniforms
