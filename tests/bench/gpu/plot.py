"""Draw tokens/s over batch under the roofline: python -m tests.bench.gpu.plot FOLDER, with its steps and servings."""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from tests.bench.gpu.shapes import SHAPES
from tests.bench.gpu.steps import DATASHEET

_CONTEXT = 1024
_PANELS = (("SDAR-8B", 32, 4), ("SDAR-8B", 4, 2), ("LLaDA2-mini", 32, 4))
# LMDeploy 0.18's PyTorch engine on such a card, the fastest peer that could be run; from issue 6.
_PEER = {("SDAR-8B", 32): (480, 2872, 3681, 3758), ("SDAR-8B", 4): (177, 1330, 4145, 6095)}
_ROWS = (1, 8, 32, 64)


def main(folder: Path) -> None:
    rows = [json.loads(line) for path in sorted(folder.glob("*-steps.jsonl")) for line in path.read_text().splitlines()]
    steps = [row for row in rows if row.get("bench") == "steps"]
    served = [json.loads(line) for path in folder.glob("*-serving.jsonl") for line in path.read_text().splitlines()]
    engine = [row for row in served if row["bench"] == "engine" and row["ahead"]]
    figure, panels = plt.subplots(1, len(_PANELS), figsize=(15, 4.6))
    for panel, (name, block, per_step) in zip(panels, _PANELS, strict=True):
        shape = SHAPES[name]
        batches = range(1, 65)
        roof = [n * per_step / max(shape.floor_ms(n, block, _CONTEXT, *DATASHEET)) * 1e3 for n in batches]
        panel.plot(batches, roof, color="0.6", label="roofline: 3.35 TB/s, 790 TFLOP/s")
        for commits, style in ((("own pass",), "o-"), (("paired", "slots"), "s--")):
            best: dict[int, float] = {}
            for row in steps:
                if (row["model"], row["block"]) == (name, block) and row["commit"] in commits:
                    best[row["rows"]] = max(best.get(row["rows"], 0.0), row["tokens_s"])
            if best:
                label = "Diffleet, block committed " + ("with the next" if "slots" in commits else "by its own pass")
                panel.plot(*zip(*sorted(best.items()), strict=True), style, label=label)
        for weights, label in (("stored", "Diffleet's engine"), ("fp8", "Diffleet's engine, weights of 8 bits")):
            best = {}
            for row in engine:
                if (row["model"], row["block"], row.get("weights", "stored")) == (name, block, weights):
                    best[row["rows"]] = max(best.get(row["rows"], 0.0), row["tokens_s"])
            if best:
                panel.plot(*zip(*sorted(best.items()), strict=True), "D-.", markersize=4, label=label)
        if (name, block) in _PEER:
            panel.plot(_ROWS, _PEER[name, block], "x:", color="tab:red", label="LMDeploy 0.18")
        panel.set(title=f"{name}, block {block}, {per_step} tokens a step", xlabel="sequences", ylabel="tokens/s")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.grid(True, which="both", alpha=0.3)
        panel.legend(fontsize=8)
    figure.suptitle("One H100, bf16, 1,024-token prompt, 256 generated tokens, random weights")
    figure.tight_layout()
    figure.savefig(folder / "tokens.png", dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the raw files lie and the plot goes")
    main(parser.parse_args().folder)
