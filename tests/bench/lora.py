"""What adapters cost: one denoise forward of a batch under several different adapters, over the same forward without.

On CUDA a model of 8B shape with random weights and captured forwards, on a CPU the bundled model and the time of the
processor: `python -m tests.bench.lora [--shape SDAR-8B] [--rows 32] [--block 4 32] [--rank 16] [--adapters 8]`.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

import torch

from kernels.attention import plan_attention
from shared.commands import Sampling
from shared.decoding import LowConfidenceStatic
from worker.adapters.bank import AdapterBank
from worker.adapters.stack import AdapterStack, Uses
from worker.adapters.targets import find_targets
from worker.adapters.weights import Adapter, ends_of
from worker.ahead import make_graphs
from worker.bundled import bundled_folder
from worker.engine.plan import Canvas, Row
from worker.leadable import canvas_state
from worker.models import LoadedModel, load_model
from worker.models.layers import Decoder, ForwardContext, Linear, LowRank
from worker.models.qwen import name_slots
from worker.runner import Runner

_PAGE = 32
_CONTEXT = 512


class _Shelf:
    def __init__(self, adapters: dict[str, Adapter]) -> None:
        self._adapters = adapters

    def get(self, digest: str) -> Adapter | None:
        return self._adapters.get(digest)

    def held(self) -> set[str]:
        return set(self._adapters)


def random_adapter(model: LoadedModel, rank: int) -> Adapter:
    """Return an adapter on every linear layer."""
    factors: dict[Linear, tuple[torch.Tensor, torch.Tensor]] = {}
    options = {"device": model.device, "dtype": model.dtype}
    for linear in {target.linear: None for target in find_targets(model).values()}:
        outputs, inputs = linear.weight.shape
        a = torch.randn(len(ends_of(linear)) * rank, inputs, **options) * inputs**-0.5
        factors[linear] = a, torch.randn(outputs, rank, **options) * 1e-3
    return Adapter(rank, 1.0, factors)


@torch.inference_mode()
def forwards(model: LoadedModel, rows: int, block: int, lora: LowRank | None) -> Callable[[], object]:
    """Return a forward over the last block of `rows` texts, with its logits."""
    spec, pages = model.spec, -(-(_CONTEXT + block) // _PAGE)
    table = torch.randperm(rows * pages).view(rows, pages).tolist()
    ends = [[_CONTEXT + block] * block] * rows
    plan = plan_attention([_CONTEXT] * rows, ends, table, _PAGE, device=model.device, dtype=model.dtype)
    shape = (2, spec.num_layers, rows * pages + 1, _PAGE, spec.num_kv_heads, spec.head_dim)
    keys, values = torch.randn(shape, device=model.device, dtype=model.dtype)
    positions = torch.arange(_CONTEXT, _CONTEXT + block, device=model.device).repeat(rows)
    context = ForwardContext(plan, positions, tuple(zip(keys, values, strict=True)), lora=lora)
    ids = torch.randint(0, spec.vocab_size - 1, (rows * block,), device=model.device)
    return lambda: model.module.logits(model.module.forward(ids, context))


def eager_ms(call: Callable[[], object], model: LoadedModel, repeats: int = 7) -> float:
    """Return the median of a call: processor time on a CPU, time on the wall on a GPU, kernels launched one by one."""
    clock = time.perf_counter if model.device.type == "cuda" else time.process_time
    times: list[float] = []
    for _ in range(repeats):
        began = clock()
        call()
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (clock() - began))
    return median(times[1:])


@torch.inference_mode()
def steps(
    model: LoadedModel, rows: Sequence[Uses], block: int, bank: AdapterBank, shelf: _Shelf
) -> Callable[[], object]:
    """Return a captured step of the engine over rows that run under `rows`, one position of each accepted."""
    spec = replace(model.spec, block_length=block, max_model_len=2 * _CONTEXT)
    pages = -(-2 * _CONTEXT // _PAGE)
    runner = Runner(replace(model, spec=spec), len(rows) * pages, _PAGE, model.device, adapters=shelf, bank=bank)
    graphs = make_graphs(runner, len(rows))
    adapted = any(rows)
    graphs.capture(len(rows), 0, adapted)
    graphs.capture_head(len(rows), len(rows) * block)
    bank.bring(rows)
    for number, uses in enumerate(rows):
        ids = tuple(range(block))
        masked, ends = (True,) * block, (_CONTEXT + block,) * block
        canvas = Canvas(_CONTEXT, masked, 0, False, Sampling(), LowConfidenceStatic(), (), limit=2 * _CONTEXT)
        held = tuple(range(number * pages, (number + 1) * pages))
        row = Row("", _CONTEXT, ids, ends, held, canvas, lora=uses)
        state = canvas_state(row, graphs.layout, bank.find(uses) if uses else None)
        assert state is not None
        graphs.put(number, [*state, *row.pages, *[graphs.layout.scratch] * (graphs.layout.pages - pages)])
    return lambda: graphs.launch(len(rows), adapted=adapted)


def launched_ms(call: Callable[[], object], repeats: int = 5, count: int = 8) -> float:
    """Return the median time of a launched step by the device's own clock; `count` of them are under way at a time."""
    times: list[float] = []
    for _ in range(repeats + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / count)
    return median(times[1:])


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--shape", default="SDAR-8B", help="on CUDA: a shape of tests.bench.gpu.shapes")
    parser.add_argument("--rows", type=int, default=32 if on_gpu else 8)
    parser.add_argument("--block", type=int, nargs="+", default=[4, 8, 32] if on_gpu else [8])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=8 if on_gpu else 4)
    options = parser.parse_args()
    if on_gpu:
        from tests.bench.gpu.shapes import SHAPES, random_model

        model, name = random_model(SHAPES[options.shape], torch.device("cuda")), options.shape
        assert isinstance(model.module, Decoder)
        name_slots(model.module)
    else:
        torch.set_num_threads(1)
        model, name = load_model(bundled_folder("demo")), "demo"
    bank: AdapterBank | None = None
    adapters = {f"a{number}": random_adapter(model, options.rank) for number in range(options.adapters)}
    shelf = _Shelf(adapters)
    if on_gpu:
        # What captured steps run under.
        linears = [target.linear for target in find_targets(model).values()]
        bank = AdapterBank(linears, options.adapters, options.rank, shelf, model.device, model.dtype)
    print(f"{name}, {options.rows} rows, {options.adapters} adapters of rank {options.rank} on every linear layer")
    print("block  way       none ms  one ms  ratio  all ms  ratio")
    for block in options.block:
        counts = [block] * options.rows
        rows: list[Uses] = [((f"a{row % options.adapters}", 0.5),) for row in range(options.rows)]
        alone = [rows[0]] * options.rows
        if bank is None:
            mixed, single = (AdapterStack(shelf, model.device).of(each, counts) for each in (rows, alone))
        else:
            bank.bring(rows)
            mixed, single = bank.of(rows, counts), bank.of(alone, counts)
        calls = [forwards(model, options.rows, block, lora) for lora in (None, single, mixed)]
        ways: list[tuple[str, Callable[[Callable[[], object]], float]]] = [
            ("eager" if on_gpu else "cpu", lambda call: eager_ms(call, model))
        ]
        if on_gpu:
            from tests.bench.gpu.timing import device_ms

            ways.append(("captured", lambda call: device_ms([call])))
        timed = [(way, [measure(call) for call in calls]) for way, measure in ways]
        if bank is not None:
            batches = ([()] * options.rows, alone, rows)
            timed.append(("step", [launched_ms(steps(model, each, block, bank, shelf)) for each in batches]))
        for way, (none, one, every) in timed:
            print(
                f"{block:5}  {way:8}  {none:7.2f} {one:7.2f} {one / none:6.3f} {every:7.2f} {every / none:6.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
