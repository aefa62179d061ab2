"""LLaDA's golden runs as requests: the plain loop, and Fast-dLLM's without, with prefix and with dual cache."""

from typing import Any, Literal

from shared.commands import Generate, Limits, Sampling
from shared.decoding import Decoding, Factor, LowConfidenceStatic, RandomOrder, Threshold
from tests.goldens.folder import Entry, GoldenFolder
from tests.goldens.runs import Run
from worker.models.spec import Attention

_CACHES: dict[str, Literal["none", "prefix", "dual"]] = {
    "generate": "none",
    "generate_with_prefix_cache": "prefix",
    "generate_with_dual_cache": "dual",
}


def to_runs(folder: GoldenFolder, entry: Entry) -> list[Run]:
    """Return a run for each row; padding is left away, for a row sees nothing of it."""
    args = entry["args"]
    eos = folder.special["eos"]
    striking = args.get("logits_eos_inf", False)
    stops: tuple[int, ...] = ()
    if striking:
        stops = (eos,)
    elif args.get("confidence_eos_eot_inf"):
        stops = (eos, folder.special["eot"])
    runs: list[Run] = []
    for row, prompt in enumerate(entry["prompts"]):
        output = entry["output"][row]
        seed = entry.get("torch_seed", 0)
        request = Generate(
            id=f"{entry['name']}-{row}",
            model="golden",
            prompt=tuple(prompt),
            sampling=Sampling(temperature=args["temperature"], seed=seed),
            limits=Limits(
                max_tokens=len(output),
                # Before its least number of tokens a request's stop ids are struck from the logits.
                min_tokens=len(output) if striking else 0,
                stop_token_ids=stops,
                ignore_eos=not stops,
            ),
            decoding=_decoding(args),
            block_length=args["block_length"],
            cache=_CACHES[entry["function"]],
            cfg_scale=args.get("cfg_scale", 0.0),
        )
        uniforms = None
        if "rand_key" in entry:
            uniforms = folder.arrays()[entry["rand_key"]][:, row, -len(output) :]
        end = next((i for i, token in enumerate(output) if token in stops), len(output))
        # The reference's model takes a causal mask as soon as one key is padding, against its own text.
        causal = folder.family == "llada" and entry.get("attention_mask") == "left padding"
        facts = {"attention": Attention.CAUSAL} if causal else {}
        per_block = _steps(args) if uniforms is not None else 0
        runs.append(Run(request, output[:end], _nfe(entry, row), uniforms, per_block, facts))
    return runs


def _steps(args: dict[str, Any]) -> int:
    return args["steps"] // (args["gen_length"] // args["block_length"])


def _decoding(args: dict[str, Any]) -> Decoding:
    exact: dict[str, Any] = {
        "filler_rules": False,
        "early_stop": False,
        "stops_last": args.get("confidence_eos_eot_inf", False),
    }
    if args.get("threshold") is not None:
        return Threshold(threshold=args["threshold"], **exact)
    if args.get("factor") is not None:
        return Factor(factor=args["factor"], **exact)
    if args.get("remasking") == "random":
        return RandomOrder(steps=_steps(args), **exact)
    return LowConfidenceStatic(steps=_steps(args), **exact)


def _nfe(entry: Entry, row: int) -> int:
    """Return the row's own forwards: rows of a batch share the reference's loop and wait for the slowest."""
    accept, length = entry["accept_step"][row], entry["args"]["block_length"]
    blocks = [range(start, start + length) for start in range(0, len(accept), length)]
    if len(entry["prompts"]) == 1:
        return entry["nfe"]
    begins = [
        min(min(entry["accept_step"][r][i] for i in block) for r in range(len(entry["prompts"]))) for block in blocks
    ]
    return sum(max(accept[i] for i in block) + 1 - begin for block, begin in zip(blocks, begins, strict=True))
