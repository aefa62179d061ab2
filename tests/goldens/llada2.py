"""LLaDA2.0's and 2.1's golden runs as requests."""

from shared.commands import Generate, Limits, Sampling
from shared.decoding import Decoding, JointThreshold, LowConfidenceDynamic
from tests.goldens.folder import Entry, GoldenFolder
from tests.goldens.runs import Run


def to_runs(folder: GoldenFolder, entry: Entry) -> list[Run]:
    """The references cache nothing and store nothing apart, so each of their forwards decides."""
    args = entry["args"]
    return [
        Run(
            to_request(entry),
            expected_tokens(entry),
            entry["nfe"],
            shown=args["gen_length"],
            cut_at=None if _ends_at_eos(entry) else args["eos_id"],
        )
    ]


def to_request(entry: Entry) -> Generate:
    """Return the request that asks for what the reference ran, its whole last block included."""
    args = entry["args"]
    block_length, prompt = args["block_length"], entry["prompt"]
    whole = -(-(len(prompt) + args["gen_length"]) // block_length) * block_length
    return Generate(
        id=entry["name"],
        model="golden",
        prompt=tuple(prompt),
        sampling=Sampling(temperature=args["temperature"]),
        limits=Limits(
            max_tokens=whole - len(prompt), ignore_eos=not _ends_at_eos(entry), stop_token_ids=(args["eos_id"],)
        ),
        decoding=_decoding(entry),
        block_length=block_length,
    )


def _ends_at_eos(entry: Entry) -> bool:
    """2.0 looks for eos after every block; 2.1 only if it is asked to, and else generates on and cuts the result."""
    return "editing_threshold" not in entry["args"] or entry["args"].get("eos_early_stop", False)


def _decoding(entry: Entry) -> Decoding:
    args = entry["args"]
    if "editing_threshold" in args:
        # Early or not, 2.1 stops between blocks.
        return JointThreshold(
            threshold=args["threshold"],
            editing_threshold=args["editing_threshold"],
            num_to_transfer=args.get("num_to_transfer", 1),
            max_post_steps=args["max_post_steps"],
            confidence="tempered",
            filler_rules=False,
            early_stop=False,
        )
    return LowConfidenceDynamic(
        threshold=args["threshold"],
        steps=min(args["steps"], args["gen_length"] // args.get("minimal_topk", 1)),
        confidence="tempered",
        filler_rules=False,
        early_stop=args.get("eos_early_stop", False),
    )


def expected_tokens(entry: Entry) -> list[int]:
    """Return the reference's output without the closing eos, which is no output here."""
    tokens, eos = entry["output"], entry["args"]["eos_id"]
    return tokens[: tokens.index(eos)] if eos in tokens else tokens
