"""python -m tests.bench.gpu.parallel [SDAR-8B] [LLaDA2-mini] --ranks 2: a step of a model that several GPUs share.

Beside it, on one of the same cards, the step of the whole model. Every rank captures the same steps and launches them
in the same order, as `worker.parallel` has them do. `--silent` needs one card: it runs a rank's share without
exchanging anything, which is what is left of a step if sums were free. The lines go to $OUT/parallel.jsonl.
"""

import argparse
import gc
import json
import os
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.multiprocessing as processes

from tests.bench.gpu.shapes import SHAPES, random_model
from tests.bench.gpu.steps import Loop
from tests.bench.gpu.timing import device_ms
from tests.worker.parallel.ranks import SilentPeers
from worker.models.layers import Peers
from worker.parallel.peers import TorchPeers

CONTEXT = 1024
PRODUCE = 256


def step_ms(name: str, rows: int, block: int, per_step: int, device: torch.device, peers: Peers | None) -> float:
    """Return the mean step over a few blocks, ms; every rank calls this."""
    shape = SHAPES[name]
    torch.manual_seed(0)
    model = random_model(shape, device, peers=peers)
    loop = Loop(model, shape, rows, block, block // per_step, CONTEXT, PRODUCE, slots=False)
    loop.capture()
    ms = loop.step_ms()
    del loop, model
    gc.collect()
    torch.cuda.empty_cache()
    return ms


def sum_us(peers: Peers, rows: int, width: int) -> float:
    """Return what one sum over the ranks takes in a graph, us."""
    parts = [torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) for _ in range(8)]
    return 1e3 * device_ms([partial(peers.sum, part) for part in parts], count=50)


def follow(number: int, names: list[str], rows: list[int], block: int, per_step: int, ranks: int, meeting: str) -> None:
    """Be one of the ranks; the first one reports."""
    torch.cuda.set_device(number)
    device = torch.device("cuda", number)
    with torch.inference_mode():
        peers = TorchPeers(number, ranks, Path(meeting), device)
        for name in names:
            for count in rows:
                sums = sum_us(peers, count * block, SHAPES[name].layer.hidden_size)
                shared = step_ms(name, count, block, per_step, device, peers)
                if number == 0:
                    alone = step_ms(name, count, block, per_step, device, None)
                    report(name, count, block, ranks, shared, alone, sum_us=sums)
                # The others wait in the next exchange until the first has measured alone.
                peers.least(0)
        peers.close()


def report(name: str, rows: int, block: int, ranks: int, shared: float, alone: float, **more: float) -> None:
    row = {
        "bench": "parallel",
        "card": torch.cuda.get_device_name(),
        "model": name,
        "rows": rows,
        "block": block,
        "ranks": ranks,
        "step_ms": shared,
        "alone_ms": alone,
        "ratio": shared / alone,
        **more,
    }
    with (Path(os.environ.get("OUT", ".")) / "parallel.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=["SDAR-8B", "LLaDA2-mini"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", default="1,8,32,64")
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--per-step", type=int, default=4)
    parser.add_argument("--silent", action="store_true", help="one card, a rank's share alone")
    arguments = parser.parse_args()
    rows = [int(count) for count in arguments.rows.split(",")]
    block, per_step, ranks = arguments.block, arguments.per_step, arguments.ranks
    if not arguments.silent:
        if torch.cuda.device_count() < ranks:
            parser.error(f"--ranks {ranks}: only {torch.cuda.device_count()} CUDA devices are visible; try --silent")
        with tempfile.TemporaryDirectory() as folder:
            facts = (arguments.names, rows, block, per_step, ranks, str(Path(folder) / "ranks"))
            processes.spawn(follow, facts, nprocs=ranks)  # pyright: ignore[reportPrivateImportUsage]
        return
    device = torch.device("cuda")
    with torch.inference_mode():
        for name in arguments.names:
            for count in rows:
                share = step_ms(name, count, block, per_step, device, SilentPeers(0, ranks))
                report(name, count, block, ranks, share, step_ms(name, count, block, per_step, device, None), silent=1)


if __name__ == "__main__":
    main()
