"""Fast-dLLM v2's golden runs as requests."""

from shared.commands import Generate, Limits, Sampling
from shared.decoding import SubBlock
from tests.goldens.folder import Entry, GoldenFolder
from tests.goldens.runs import Run


def to_runs(folder: GoldenFolder, entry: Entry) -> list[Run]:
    """Return a run for each row. The reference's answers reach one token into the block behind the last."""
    args = entry["args"]
    runs: list[Run] = []
    for row, prompt in enumerate(entry["prompts"]):
        output: list[int] = entry["output"][row]
        stop = args["stop_token"]
        end = output.index(stop) if stop in output else len(output)
        request = Generate(
            id=f"{entry['name']}-{row}",
            model="golden",
            prompt=tuple(prompt),
            sampling=Sampling(temperature=args["temperature"]),
            limits=Limits(max_tokens=args["max_new_tokens"] if stop in output else len(output), stop_token_ids=(stop,)),
            decoding=SubBlock(
                threshold=args["threshold"],
                sub_block_length=args["small_block_size"],
                block_cache=args.get("use_block_cache", False),
                confidence="tempered",
                filler_rules=False,
            ),
            block_length=args["block_size"],
        )
        runs.append(Run(request, output[:end], _nfe(entry, row)))
    return runs


def _nfe(entry: Entry, row: int) -> int:
    """Return the row's forwards, less a prefill that proposes no token; ours is part of no count."""
    prompts, length = entry["prompts"], entry["args"]["block_size"]
    if len(prompts) > 1:
        # Rows of a batch wait for each other; each of a row's own forwards accepts something.
        return len(set(entry["accept_step"][row]))
    return entry["nfe"] - (len(prompts[0]) > length and len(prompts[0]) % length > 0)
