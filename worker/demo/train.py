"""Train the demo model from generated text.

    python -m worker.demo.train --size demo --minutes 8 --out worker/demo/models/demo
    python -m worker.demo.train --size nano --minutes 1 --out DIR --rows 8 --data-workers 0      # on a CPU

The learning rate follows the elapsed time, so a run ends annealed after the minutes it was given on any machine.
"""

import argparse
import json
import math
import multiprocessing
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from worker.demo.chatml import FILLER_ID
from worker.demo.evaluate import MODES, SEED, dress, evaluate, items_wanted, table, write_report
from worker.demo.export import copy_tokenizer, load_model, save_model, write_card
from worker.demo.feed import Feed
from worker.demo.items import Item
from worker.demo.mix import held_out_draws, redraw
from worker.demo.model import SHAPES, DemoModel, dense_attend, visible
from worker.demo.optimizer import build_optimizers
from worker.demo.reference_decoder import ReferenceDecoder
from worker.demo.rows import BLOCKS, DOCUMENTS, IDS, LABELS, POSITIONS, SEGMENTS, Int16
from worker.demo.tasks import TASKS

MODELS = Path(__file__).parent / "models"
PROBED = ("add", "add_long", "subtract_long", "multiply", "word_problem", "reverse", "sort", "to_json", "capital",
          "definition", "story", "tool_call")  # fmt: skip
FILLER_WEIGHT = 0.2  # of the loss at a filler, which is easy and frequent
HIDDEN_SHARE = 0.3  # room for hidden positions in a batch, as a share of all
WARMUP_STEPS = 100
EMA = 0.998

LossFunction = Callable[["Batch"], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Options:
    """What a run is given."""

    size: str
    out: Path
    minutes: float  # from the start of the process until training stops, compilation included
    rows: int
    row_len: int
    lr: float
    data_workers: int
    attention: str
    evaluate_items: int
    probe_s: float
    tokenizer: Path
    init: Path | None  # go on from these weights
    seed: int


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's input on the device."""

    packed: Tensor  # [6, rows, row_len] int32
    index: Tensor  # [hidden] flat positions of hidden tokens, padded to a fixed count
    labels: Tensor  # [hidden]
    weights: Tensor  # [hidden] float, 0 where padded


def main(argv: Sequence[str] | None = None) -> None:
    """Train, export and evaluate."""
    started = time.monotonic()
    options = parse(argv)
    shape = SHAPES[options.size]
    with Feed(options.tokenizer, options.rows, options.row_len, options.data_workers, options.seed) as feed:
        wanted = EvaluationItems(options.evaluate_items, options.data_workers)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.set_float32_matmul_precision("high")
        model, average = DemoModel(shape, options.seed).to(device), DemoModel(shape, options.seed).to(device)
        if options.init is not None:
            weights = load_model(options.init)[0].state_dict()
            model.load_state_dict(weights)
            average.load_state_dict(weights)
        if device.type == "cuda":
            model.stream_dtype = average.stream_dtype = torch.bfloat16
        tokenizer = Tokenizer.from_file(str(options.tokenizer / "tokenizer.json"))
        facts = fit(model, average, feed, tokenizer, wanted, options, started)
    facts["device"] = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    save_model(average.state_dict(), shape, options.out, shards=2 if options.size == "demo" else 1)
    copy_tokenizer(options.tokenizer, options.out)
    write_card(options.out, shape, facts, sum(p.numel() for p in model.parameters()))
    if items := wanted.get():
        begun = time.monotonic()
        average.load_state_dict({k: v.bfloat16().float() for k, v in average.state_dict().items()})  # as it ships
        report = evaluate(ReferenceDecoder(average).generate, tokenizer, items)
        write_report(report, options.out, str(facts["device"]), time.monotonic() - begun, facts)
        print(table(report), flush=True)


def parse(argv: Sequence[str] | None) -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train the demo model from generated text.")
    parser.add_argument("--size", choices=sorted(SHAPES), default="demo")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="until training stops, start and compilation included"
    )
    parser.add_argument("--rows", type=int, default=160, help="packed rows in a step")
    parser.add_argument("--row-len", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--data-workers", type=int, default=14, help="processes that generate text; 0 uses this one")
    parser.add_argument("--attention", choices=("auto", "flex", "dense"), default="auto")
    parser.add_argument("--evaluate-items", type=int, default=200, help="held-out items a task after training")
    parser.add_argument("--probe-s", type=float, default=90.0, help="seconds between short evaluations; 0 for none")
    parser.add_argument("--tokenizer", type=Path, default=MODELS / "demo", help="folder with tokenizer.json")
    parser.add_argument("--init", type=Path, help="folder of a trained model to go on from")
    parser.add_argument("--seed", type=int, default=1)
    return Options(**vars(parser.parse_args(argv)))


class EvaluationItems:
    """The held-out items of every task; processes look for them while the network compiles."""

    def __init__(self, count: int, processes: int) -> None:
        jobs = [(name, items_wanted(TASKS[name], count), SEED) for name in TASKS] if count else []
        self._pool = multiprocessing.get_context("fork").Pool(min(8, processes)) if processes and jobs else None
        if self._pool is not None:
            self._draws = self._pool.starmap_async(held_out_draws, jobs, chunksize=1)
        self._jobs = jobs
        self._items: dict[str, list[Item]] | None = None

    def get(self) -> dict[str, list[Item]]:
        """Wait for the search and make the items."""
        if self._items is not None:
            return self._items
        if self._pool is None:
            draws = [held_out_draws(*job) for job in self._jobs]
        else:
            draws = self._draws.get(timeout=300)
            self._pool.close()
        drawn = {job[0]: redraw(job[0], SEED, numbers) for job, numbers in zip(self._jobs, draws, strict=True)}
        self._items = {name: dress(items, TASKS[name], SEED) for name, items in drawn.items() if items}
        return self._items


def fit(
    model: DemoModel,
    average: DemoModel,
    feed: Feed,
    tokenizer: Tokenizer,
    wanted: EvaluationItems,
    options: Options,
    started: float,
) -> dict[str, Any]:
    """Train until the minutes are over and leave the averaged weights in ``average``; return the facts of the run."""
    device = next(model.parameters()).device
    optimizers = build_optimizers(model, options.lr)
    loss_of = build_loss(model, device, options.attention, to_device(feed.next(), device))
    print(f"ready after {time.monotonic() - started:.0f} s", flush=True)
    begun, stop_at = time.monotonic(), started + 60 * options.minutes
    probed, step, tokens, answers, recent = begun, 0, 0, 0, torch.zeros((), device=device)
    loss_value = math.nan
    while (now := time.monotonic()) < stop_at:
        set_rate(optimizers, options.lr, (now - begun) / (stop_at - begun), step)
        batch = to_device(packed := feed.next(), device)
        loss, plain = loss_of(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_lerp_(
                list(average.parameters()), list(model.parameters()), 1 - min(EMA, (1 + step) / (10 + step))
            )
            recent += plain
        step += 1
        tokens += int((packed[DOCUMENTS] >= 0).sum())
        answers += int((packed[LABELS] >= 0).sum())
        if step % 25 == 0:  # reading the loss waits for the device, which keeps the schedule honest
            loss_value = float(recent) / 25
            recent.zero_()
            if step % 100 == 0 or step == 25:
                spent = time.monotonic() - begun
                print(
                    f"{spent:6.1f} s  step {step:6d}  loss {loss_value:.4f}  {tokens / spent / 1e3:.0f} k positions/s",
                    flush=True,
                )
        if options.probe_s and now - probed > options.probe_s:
            probed = now
            probe(average, tokenizer, wanted.get())
            model.train()
    seconds = time.monotonic() - begun
    return {
        "size": options.size,
        "seconds": round(seconds, 1),
        "steps": step,
        "tokens": tokens,
        "answer_tokens": answers,
        "loss": round(loss_value, 5),
        "rows": options.rows,
        "row_len": options.row_len,
        "lr": options.lr,
        "seed": options.seed,
        "continues": None if options.init is None else json.loads((options.init / "eval.json").read_text())["training"],
    }


def to_device(packed: Int16, device: torch.device) -> Batch:
    """Move a batch to the device with its hidden positions listed."""
    flat = packed[LABELS].reshape(-1)
    room = int(HIDDEN_SHARE * flat.size)
    found = np.flatnonzero(flat >= 0)[:room]
    index, labels, weights = np.zeros(room, np.int64), np.zeros(room, np.int64), np.zeros(room, np.float32)
    index[: found.size], labels[: found.size] = found, flat[found]
    weights[: found.size] = np.where(flat[found] == FILLER_ID, FILLER_WEIGHT, 1.0)
    arrays = (packed.astype(np.int32), index, labels, weights)
    return Batch(*(torch.from_numpy(array).to(device, non_blocking=True) for array in arrays))


def set_rate(optimizers: Sequence[torch.optim.Optimizer], lr: float, fraction: float, step: int) -> None:
    """Warm up, then follow a cosine over the elapsed share of the time."""
    warm = min(1.0, max((1 + step) / WARMUP_STEPS, fraction / 0.05))
    scale = warm * (0.01 + 0.99 * (0.5 + 0.5 * math.cos(math.pi * min(1.0, fraction))))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * scale


def build_loss(model: DemoModel, device: torch.device, attention: str, sample: Batch) -> LossFunction:
    """Return a function from a batch to its training loss and its plain mean cross entropy.

    On a GPU it is compiled, with block-sparse attention where that works; the sample batch makes it compile now.
    """
    if device.type == "cpu":
        return lambda batch: dense_loss(model, batch.packed, batch.index, batch.labels, batch.weights)
    kinds = {"auto": ("flex", "dense"), "flex": ("flex",), "dense": ("dense",)}[attention]
    for kind in kinds:
        try:
            loss_of = flex_loss_function(model) if kind == "flex" else compiled_dense_loss_function(model)
            for _ in range(2):
                loss_of(sample)[0].backward()
            model.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
        except Exception as error:  # any failure of the compiler means: try the plainer kind
            print(f"{kind} attention does not work here: {type(error).__name__}: {str(error)[:2000]}", flush=True)
            if kind == kinds[-1]:
                raise
        else:
            print(f"attention: {kind}", flush=True)
            return loss_of
    raise AssertionError("unreachable: the last kind returns or raises")


def compiled_dense_loss_function(model: DemoModel) -> LossFunction:
    """Attention through a boolean mask for whole rows."""
    compiled = torch.compile(dense_loss, dynamic=False)

    def loss_of(batch: Batch) -> tuple[Tensor, Tensor]:
        with torch.autocast("cuda", torch.bfloat16):
            return compiled(model, batch.packed, batch.index, batch.labels, batch.weights)

    return loss_of


def flex_loss_function(model: DemoModel) -> LossFunction:
    """Attention that skips the blocks of keys nobody in a block of queries may see."""
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

    build_mask = torch.compile(create_block_mask, dynamic=False)

    @torch.compile(dynamic=False)
    def compiled(
        packed: Tensor, index: Tensor, labels: Tensor, weights: Tensor, mask: BlockMask
    ) -> tuple[Tensor, Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

        hidden = model(packed[IDS], packed[POSITIONS], attend)
        return cross_entropy(model, hidden, index, labels, weights)

    def loss_of(batch: Batch) -> tuple[Tensor, Tensor]:
        documents, blocks, segments = batch.packed[DOCUMENTS], batch.packed[BLOCKS], batch.packed[SEGMENTS]

        def sees(row: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            earlier = (segments[row, k] == 0) & (blocks[row, k] < blocks[row, q])
            own = (segments[row, q] == segments[row, k]) & (blocks[row, q] == blocks[row, k])
            return (documents[row, q] == documents[row, k]) & (earlier | own)

        rows, length = documents.shape
        mask = build_mask(sees, rows, None, length, length, device=documents.device)
        with torch.autocast("cuda", torch.bfloat16):
            return compiled(batch.packed, batch.index, batch.labels, batch.weights, mask)

    return loss_of


def dense_loss(
    model: DemoModel, packed: Tensor, index: Tensor, labels: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """The loss in its plainest form."""
    attend = dense_attend(visible(packed[DOCUMENTS], packed[BLOCKS], packed[SEGMENTS]))
    return cross_entropy(model, model(packed[IDS], packed[POSITIONS], attend), index, labels, weights)


def cross_entropy(
    model: DemoModel, hidden: Tensor, index: Tensor, labels: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Weighted cross entropy at the hidden positions, and its detached value over answer tokens alone."""
    logits = model.logits(hidden.flatten(0, 1)[index]).float()  # [hidden, vocabulary]
    each = F.cross_entropy(logits, labels, reduction="none")
    answer = (weights == 1.0).float()
    plain = (each * answer).sum() / answer.sum()
    return (each * weights).sum() / weights.sum(), plain.detach()


def probe(average: DemoModel, tokenizer: Tokenizer, items: dict[str, list[Item]]) -> None:
    """Print exact matches of a few items a task: the mean loss hides which tasks have not made their jump."""
    few = {name: items[name][:48] for name in PROBED if name in items}
    report = evaluate(ReferenceDecoder(average).generate, tokenizer, few, {"threshold": MODES["threshold"]})
    cells = (f"{name} {100 * entry['threshold']['accuracy']:.0f}" for name, entry in report["tasks"].items())
    print("  right: " + ", ".join(cells), flush=True)


if __name__ == "__main__":
    main()
