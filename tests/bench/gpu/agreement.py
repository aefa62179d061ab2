"""DIFFLEET_DEVICE=cuda DIFFLEET_DTYPE=bfloat16 python -m tests.bench.gpu.agreement sdar llada: tokens equal to goldens.

The goldens are float32; the models are tiny and random, so that near ties are many.
"""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.goldens.folder import AHEAD, DEVICE, DTYPE, SMALL_KV, find_folders
from tests.goldens.test_goldens import FAMILIES, make_engine, run


def main() -> None:
    with (Path(os.environ.get("OUT", ".")) / "agreement.jsonl").open("a") as file:
        for folder in find_folders():
            if folder.name not in sys.argv[1:]:
                continue
            equal = total = whole = runs = 0
            for entry in folder.generate:
                for each in FAMILIES[folder.family](folder, entry):
                    try:
                        result = run(make_engine(folder, [each], each.request.block_length or 16), [[each.request]])
                    except pytest.fail.Exception as failure:
                        print(folder.name, entry["name"], failure)
                        continue
                    tokens = each.observe(result[each.request.id])[0]
                    wanted = each.answer[0]
                    same = sum(a == b for a, b in zip(tokens, wanted, strict=False))
                    equal, total = equal + same, total + max(len(wanted), len(tokens))
                    whole, runs = whole + (list(tokens) == list(wanted)), runs + 1
            row = {
                "bench": "agreement", "family": folder.name, "device": DEVICE, "dtype": str(DTYPE), "ahead": AHEAD,
                "kv_8_bits": SMALL_KV,
                "tokens": total, "equal": equal / max(1, total), "runs": runs, "runs_equal": whole,
            }  # fmt: skip
            file.write(json.dumps(row) + "\n")
            print(row, flush=True)


if __name__ == "__main__":
    main()
