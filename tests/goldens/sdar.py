"""SDAR's golden runs as requests: three published loops, told apart by `variant`."""

from shared.commands import Generate, Limits, Sampling
from shared.decoding import (
    Confidence,
    Decoding,
    EntropyBounded,
    LowConfidenceDynamic,
    LowConfidenceStatic,
    Sequential,
)
from tests.goldens.folder import Entry, GoldenFolder
from tests.goldens.runs import Run

# Defaults of the references' own signatures, for arguments that a run leaves out.
_THRESHOLD = 0.85
_ENTROPY_BOUND = 0.35


def to_runs(folder: GoldenFolder, entry: Entry) -> list[Run]:
    return [Run(to_request(entry), expected_tokens(entry), expected_nfe(entry))]


def to_request(entry: Entry) -> Generate:
    """Return the request that asks for what the reference ran, its whole last block included."""
    args = entry["args"]
    stops = tuple(args.get("stopping_criteria_idx") or ())
    return Generate(
        id=entry["name"],
        model="golden",
        prompt=tuple(entry["prompt"]),
        # Every run is deterministic, by top_k 1 or by an argmax that replaced the reference's draw.
        sampling=Sampling(temperature=args.get("temperature", 1.0), top_k=1, top_p=args.get("top_p", 1.0)),
        limits=Limits(max_tokens=len(entry["output"]), ignore_eos=not stops, stop_token_ids=stops),
        decoding=_decoding(entry),
        block_length=args["block_length"],
    )


def _decoding(entry: Entry) -> Decoding:
    args, variant = entry["args"], entry["variant"]
    argmax = entry["sampling"].startswith("argmax")
    confidence: Confidence = "filtered" if variant == "sdar" and not argmax else "tempered"
    steps = args.get("denoising_steps")
    if variant == "opencompass":
        strategy = "low_confidence_dynamic" if args["threshold"] < 1 else "low_confidence_static"
        threshold = args["threshold"]
    else:
        strategy = args["remasking_strategy"]
        threshold = args.get("confidence_threshold", _THRESHOLD)
    match strategy:
        case "sequential":
            return Sequential(steps=steps, confidence=confidence, filler_rules=False, early_stop=False)
        case "low_confidence_static":
            return LowConfidenceStatic(steps=steps, confidence=confidence, filler_rules=False, early_stop=False)
        case "low_confidence_dynamic":
            return LowConfidenceDynamic(
                steps=steps,
                threshold=threshold,
                fallback="leftmost" if variant == "jetengine" else "confidence",
                confidence=confidence,
                filler_rules=False,
                early_stop=False,
            )
        case "entropy_bounded":
            bound = args.get("eb_threshold", _ENTROPY_BOUND)
            return EntropyBounded(bound=bound, confidence=confidence, filler_rules=False, early_stop=False)
        case _:
            raise ValueError(f"{entry['name']}: unknown strategy {strategy!r}")


def expected_tokens(entry: Entry) -> list[int]:
    """Return what the engine promises: everything after the prompt, up to the first stop id if there is one."""
    output: list[int] = entry["output"]
    stops = set(entry["args"].get("stopping_criteria_idx") or ())
    end = next((i for i, token in enumerate(output) if token in stops), len(output))
    return output[:end]


def expected_nfe(entry: Entry) -> int:
    """Return the reference's denoising forwards.

    It also counts one prefill if the prompt has a whole block, and one store for each block that it finished: ours are
    part of denoising forwards.
    """
    block_length, prompt = entry["args"]["block_length"], len(entry["prompt"])
    first = prompt // block_length * block_length
    undecided = [False] * (prompt - first) + [step < 0 for step in entry["accept_step"]]
    blocks = [undecided[start : start + block_length] for start in range(0, len(undecided), block_length)]
    stores = sum(not any(block) for block in blocks)
    return entry["nfe"] - stores - (1 if first else 0)
