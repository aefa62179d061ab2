"""python -m tests.bench.gpu [SDAR-8B] [LLaDA2-mini] [LLaDA-8B]: a table of steps, beside PyTorch's own, as JSON lines.

The raw lines go to $OUT/steps.jsonl (or the current directory); `python -m tests.bench.gpu.plot` draws them.
"""

import argparse
import gc
import json
import os
from pathlib import Path

import torch

from tests.bench.gpu.shapes import LLADA2_MINI, LLADA_8B, SDAR_8B, SHAPES, Shape, random_model
from tests.bench.gpu.steps import Report, bench_baseline, bench_dual_cache, bench_prefill, bench_steps
from tests.bench.gpu.timing import Ceilings, measure_ceilings
from tests.bench.gpu.tuned import use_best
from worker.models import LoadedModel

CONTEXT = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=", ".join(SHAPES))
    parser.add_argument("--tiles", type=Path, help="the kernels.jsonl of a run of tests.bench.gpu.kernels")
    parser.add_argument("--label", default="as chosen")
    arguments = parser.parse_args()
    if arguments.tiles is not None:
        print(use_best(arguments.tiles), flush=True)
    with (Path(os.environ.get("OUT", ".")) / "steps.jsonl").open("a") as file, torch.inference_mode():

        def report(row: dict[str, object]) -> None:
            row = {**row, "tiles": arguments.label}
            file.write(json.dumps(row) + "\n")
            file.flush()
            print({key: round(v, 3) if isinstance(v, float) else v for key, v in row.items()}, flush=True)

        ceilings = measure_ceilings()
        report({"bench": "ceilings", **vars(ceilings), "torch": torch.__version__})
        for name in arguments.names or ("SDAR-8B", "LLaDA2-mini", "LLaDA-8B"):
            shape = SHAPES[name]
            model = random_model(shape, torch.device("cuda"))
            if shape is SDAR_8B:
                _sdar(model, shape, ceilings, report)
            elif shape is LLADA2_MINI:
                for rows in (1, 8, 32, 64):
                    for slots in {rows <= 8, False}:
                        _steps(model, shape, ceilings, report, rows, 32, 4, slots)
                bench_prefill(model, shape, report, rows=1, tokens=CONTEXT)
            elif shape is LLADA_8B:
                for rows in (1, 8):
                    bench_dual_cache(model, shape, ceilings, report, rows=rows)
            del model
            gc.collect()
            torch.cuda.empty_cache()


def _sdar(model: LoadedModel, shape: Shape, ceilings: Ceilings, report: Report) -> None:
    for rows in (1, 8, 32, 64):
        for slots in (False, True) if rows == 1 else (False,):
            _steps(model, shape, ceilings, report, rows, 32, 4, slots)
        bench_baseline(model, shape, report, rows=rows, block=32, context=CONTEXT, cached=True)
    for rows in (1, 8, 32, 64):
        for slots in (True, False):
            _steps(model, shape, ceilings, report, rows, 4, 2, slots)
    bench_baseline(model, shape, report, rows=1, block=32, context=CONTEXT, cached=False)
    bench_prefill(model, shape, report, rows=1, tokens=CONTEXT)
    bench_prefill(model, shape, report, rows=8, tokens=CONTEXT)


def _steps(
    model: LoadedModel,
    shape: Shape,
    ceilings: Ceilings,
    report: Report,
    rows: int,
    block: int,
    per_step: int,
    slots: bool,
) -> None:
    bench_steps(
        model,
        shape,
        ceilings,
        report,
        rows=rows,
        block=block,
        per_step=per_step,
        context=CONTEXT,
        slots=slots,
        profiled=block == 32,
    )
    gc.collect()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
