"""WeDLM's golden runs as requests."""

from shared.commands import Generate, Limits, Sampling
from shared.decoding import Decoding, LowConfidenceStatic, Threshold
from tests.goldens.folder import Entry, GoldenFolder
from tests.goldens.runs import Run


def to_runs(folder: GoldenFolder, entry: Entry) -> list[Run]:
    args = entry["args"]
    # The reference reads no end of text, and every run is greedy whatever its temperature.
    request = Generate(
        id=entry["name"],
        model="golden",
        prompt=tuple(entry["prompt"]),
        sampling=Sampling(temperature=args["temperature"], top_k=1),
        limits=Limits(max_tokens=len(entry["output"]), ignore_eos=True),
        decoding=_decoding(args["confidence_threshold"]),
        block_length=args["block_size"],
    )
    return [Run(request, entry["output"], entry["nfe"])]


def _decoding(threshold: float) -> Decoding:
    if threshold == 0:
        return LowConfidenceStatic(confidence="tempered", filler_rules=False, early_stop=False)
    return Threshold(threshold=threshold, confidence="tempered", filler_rules=False, early_stop=False)
