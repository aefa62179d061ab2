"""Nemotron-Labs-Diffusion's golden runs as requests, and its forwards as rows."""

from typing import Any

import torch

from shared.commands import Generate, Limits, Sampling
from shared.decoding import Decoding, LinearSpeculation, LowConfidenceStatic, Threshold
from tests.goldens.folder import Entry, GoldenFolder
from tests.goldens.passes import Pass
from tests.goldens.runs import Run
from worker.models.spec import Commit


def to_runs(folder: GoldenFolder, entry: Entry) -> list[Run]:
    """Return the entry's run."""
    args, output = entry["args"], entry["output"]
    stop = args["eos_token_id"]
    end = output.index(stop) if stop in output else len(output)
    speculative = entry["function"] == "linear_spec_generate"
    facts: dict[str, Any] = {}
    if not args.get("causal_context", True):
        facts = {"commit": Commit.FUSED, "context": None}
    threshold = args.get("threshold")
    request = Generate(
        id=entry["name"],
        model="golden",
        prompt=tuple(entry["prompt"]),
        sampling=Sampling(temperature=args["temperature"]),
        limits=Limits(max_tokens=args["max_new_tokens"], stop_token_ids=(stop,)),
        decoding=LinearSpeculation(threshold=threshold) if speculative else _decoding(threshold),
        block_length=args["block_length"],
    )
    if speculative:
        # The reference keeps what its last check brings beyond the limit.
        return [Run(request, output[: min(end, args["max_new_tokens"])], entry["nfe"])]
    return [Run(request, output[:end], _nfe(entry), facts=facts)]


def _decoding(threshold: float | None) -> Decoding:
    if threshold is None:
        return LowConfidenceStatic(confidence="tempered", filler_rules=False)
    return Threshold(threshold=threshold, confidence="tempered", filler_rules=False)


def _nfe(entry: Entry) -> int:
    """Return the reference's forwards less those that we spare.

    Nothing follows the forward that decides the last token: the reference stores the last block too, and runs a block
    whose first token is already the stop. Without seeds we store a block in the next one's first forward.
    """
    last = max(entry["accept_step"]) + 1
    if entry["args"].get("causal_context", True):
        return last
    return last - sum(entry["forward_stores_kv"][:last])


def to_passes(folder: GoldenFolder, entry: Entry) -> list[Pass]:
    arrays, name = folder.arrays(), entry["name"]
    prompt, block = arrays[f"{name}.prompt_ids"][0], arrays[f"{name}.block_ids"][0]
    both, length = torch.cat((prompt, block)), len(prompt) + len(block)
    causal = tuple(range(1, len(prompt) + 1))
    return [
        Pass(prompt, torch.arange(len(prompt)), causal, arrays[f"{name}.logits_prompt_causal"][0]),
        Pass(
            both,
            torch.arange(length),
            (*causal, *[length] * len(block)),
            arrays[f"{name}.logits_block_bidirectional"][0],
        ),
        Pass(both, torch.arange(length), (length,) * length, arrays[f"{name}.logits_all_bidirectional"][0]),
    ]
