"""Whole denoise steps of models with random weights, at a forced number of tokens a step.

A step is one graph (`worker.graphs`): input from the canvas, the forward, statistics, acceptance, the canvas moved on.
The host reads each step's answer while the next one runs. The cache holds random keys and values for the prompt.
"""

import time
from collections.abc import Callable

import torch

from kernels.canvas import Field, Layout, Rule
from tests.bench.gpu.baseline import Baseline
from tests.bench.gpu.frontier import per_step, profile, share_out
from tests.bench.gpu.shapes import Shape
from tests.bench.gpu.timing import Ceilings
from worker.graphs import Answer, StepGraphs
from worker.models import LoadedModel
from worker.models.layers import Decoder, ForwardContext

PAGE = 32
DATASHEET = (3.35e12, 790e12)
"""Bandwidth and matrix rate that the issue's floors are computed with."""

Report = Callable[[dict[str, object]], None]


def bench_steps(
    model: LoadedModel,
    shape: Shape,
    ceilings: Ceilings,
    report: Report,
    *,
    rows: int,
    block: int,
    per_step: int,
    context: int,
    slots: bool,
    produce: int = 256,
    profiled: bool = False,
) -> float:
    """Measure one step alone and the loop with the host; return the step's ms."""
    torch.cuda.reset_peak_memory_stats()
    loop = Loop(model, shape, rows, block, block // per_step, context, produce, slots)
    began = time.perf_counter()
    loop.capture()
    torch.cuda.synchronize()
    captured = time.perf_counter() - began
    ms = loop.step_ms()
    seconds, steps, tokens = loop.decode()
    profile = _profile(loop) if profiled else {}
    floor = max(shape.floor_ms(rows, block, context, *DATASHEET))
    own = max(shape.floor_ms(rows, block, context, ceilings.read, ceilings.matrix))
    report(
        {
            "bench": "steps",
            "model": shape.name,
            "block": block,
            "per_step": per_step,
            "rows": rows,
            "commit": "slots" if slots else "own pass",
            "step_ms": ms,
            "floor_ms": floor,
            "ratio": ms / floor,
            "floor_measured_ms": own,
            "ratio_measured": ms / own,
            "tokens_s": tokens / seconds,
            "steps": steps,
            "loop_step_ms": seconds / steps * 1e3,
            "host_share": max(0.0, 1 - ms * 1e-3 * steps / seconds),
            "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
            "capture_s": captured,
            **profile,
        }
    )
    return ms


def _profile(loop: "Loop") -> dict[str, object]:
    """Return the kernels that a step spends its time in: {name: [us a step, launches]}."""
    loop.reset()
    torch.cuda.synchronize()
    count = 4

    def some_steps() -> None:
        for _ in range(count):
            loop.graphs.launch(loop.rows, 0)

    kernels = per_step(share_out(profile(some_steps)), count)
    return {"kernels": dict(list(kernels.items())[:14])}


class Loop:
    """Rows that decode side by side, and a host that follows them."""

    def __init__(
        self,
        model: LoadedModel,
        shape: Shape,
        rows: int,
        block: int,
        steps: int,
        context: int,
        produce: int,
        slots: bool,
    ) -> None:
        device = model.device
        self.rows, self.block, self.context, self.produce = rows, block, context, produce
        width = -(-(context + produce + 2 * block) // PAGE)
        layout = Layout(block, width, PAGE, scratch=rows * width)
        size = (2, shape.layers, rows * width + 1, PAGE, model.spec.num_kv_heads, model.spec.head_dim)
        keys, values = torch.randn(size, device=device, dtype=model.dtype)
        barred = torch.zeros(shape.vocab, dtype=torch.bool, device=device)
        barred[model.spec.mask_token_id] = True
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        self.graphs = StepGraphs(model, tuple(zip(keys, values, strict=True)), barred, nothing, layout, rows)
        pages = torch.randperm(rows * width).view(rows, width).tolist()
        self._steps = steps
        self._slots = slots
        self._states = []
        for numbers in pages:
            state = [0] * layout.width
            state[Field.LIVE], state[Field.START], state[Field.LIMIT] = 1, context, context + produce + block
            state[Field.RULE], state[Field.STEPS] = Rule.STATIC, steps
            state[Field.MISSING] = block
            state[layout.tokens] = [model.spec.mask_token_id] * block
            state[layout.masked] = [1] * block
            state[layout.before] = torch.randint(0, 1000, (block,)).tolist()
            state[layout.table] = numbers
            self._states.append(state)

    def capture(self) -> None:
        for slots in (self.rows, 0) if self._slots else (0,):
            self.graphs.capture(self.rows, slots)
        for step in range(self._steps):
            self.graphs.capture_head(self.rows, self._room(step))

    def _room(self, step: int) -> int:
        """Return how many positions are masked before a step, of rows that all began together."""
        return self.rows * (self.block - self.block // self._steps * step)

    def _launch(self, number: int) -> Answer:
        """Launch the step of that number; a block has one more where it is written by a pass of its own."""
        if self._slots:
            step = number % self._steps
            return self.graphs.launch(self.rows, self.rows if number and not step else 0, self._room(step))
        step = number % (self._steps + 1)
        return self.graphs.launch(self.rows, 0, self._room(min(step, self._steps - 1)))

    def reset(self) -> None:
        for row, state in enumerate(self._states):
            self.graphs.put(row, state)

    def step_ms(self) -> float:
        """Return the mean over a few blocks, ms."""
        self.reset()
        period = self._steps if self._slots else self._steps + 1
        for number in range(period):
            self._launch(number)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for number in range(period, 3 * period):
            self._launch(number)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / (2 * period)

    def decode(self) -> tuple[float, int, int]:
        """Return (seconds, steps, tokens) until every row has produced its tokens."""
        self.reset()
        texts: list[list[int]] = [[] for _ in range(self.rows)]
        torch.cuda.synchronize()
        began = time.perf_counter()
        steps = 1
        waiting: Answer = self._launch(0)
        while min(map(len, texts)) < self.produce:
            following = self._launch(steps)
            flags, tokens, _ = waiting.read().unbind(1)
            for text, take, proposed in zip(texts, flags.tolist(), tokens.tolist(), strict=True):
                text.extend(token for token, flag in zip(proposed, take, strict=True) if flag == 1)
            waiting = following
            steps += 1
        seconds = time.perf_counter() - began
        torch.cuda.synchronize()
        # The step in flight is not needed any more.
        return seconds, steps - 1, self.rows * self.produce


def bench_baseline(
    model: LoadedModel, shape: Shape, report: Report, *, rows: int, block: int, context: int, cached: bool
) -> None:
    assert isinstance(model.module, Decoder)
    ms = Baseline(model.module, shape, rows, block, context, cached).step_ms()
    how = "PyTorch, SDPA, dense cache, graph" if cached else "PyTorch, SDPA, full forward, graph"
    report({"bench": "baseline", "model": shape.name, "block": block, "rows": rows, "how": how, "step_ms": ms})


def bench_prefill(model: LoadedModel, shape: Shape, report: Report, *, rows: int, tokens: int) -> None:
    """The forward of whole prompts, launched op by op."""
    from tests.bench.gpu.kernels import uniform_plan

    layer, device = shape.layer, model.device
    plan = uniform_plan(rows, tokens, tokens, PAGE)
    pages = plan.page_table.numel()
    size = (2, shape.layers, pages, PAGE, layer.num_kv_heads, layer.head_dim)
    keys, values = torch.zeros(size, device=device, dtype=model.dtype)
    ends = (torch.arange(tokens, device=device) // 32 + 1) * 32
    plan.visible_end.copy_(ends.repeat(rows))
    context = ForwardContext(
        plan, torch.arange(tokens, device=device).repeat(rows), tuple(zip(keys, values, strict=True))
    )
    ids = torch.randint(0, 1000, (rows * tokens,), device=device)
    wanted = torch.tensor([rows * tokens - 1], device=device)

    def forward() -> None:
        model.module.forward(ids, context, wanted)

    for _ in range(2):
        forward()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(3):
        forward()
    end.record()
    end.synchronize()
    ms = start.elapsed_time(end) / 3
    attention = 2 * shape.layers * layer.num_heads * layer.head_dim * tokens * tokens
    floor = rows * (2 * shape.active * tokens + attention) / DATASHEET[1] * 1e3
    floor = max(floor, 2 * shape.touched(rows * tokens) / DATASHEET[0] * 1e3)
    report(
        {
            "bench": "prefill",
            "model": shape.name,
            "rows": rows,
            "tokens": tokens,
            "ms": ms,
            "floor_ms": floor,
            "ratio": ms / floor,
        }
    )


def bench_dual_cache(model: LoadedModel, shape: Shape, ceilings: Ceilings, report: Report, *, rows: int) -> None:
    """LLaDA: at each block's start the whole canvas, whose logits are the first step, then seven steps of the block."""
    bench_prefill(model, shape, report, rows=rows, tokens=1280)
    bench_steps(model, shape, ceilings, report, rows=rows, block=32, per_step=4, context=1248, slots=False, produce=128)
