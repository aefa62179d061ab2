"""What steps take whose rows the device leads, by block length: measured by answering requests of nobody's.

Such a step goes on from the one before, and the host works beside it. So what counts is the pace at which whole steps
of the engine follow each other, while rows decide, finish their blocks and begin others.
"""

from collections.abc import Sequence as ReadOnly
from itertools import count

from shared.commands import Generate, Limits, Sampling
from worker.engine.engine import Engine
from worker.engine.load_aware import StepPrices
from worker.engine.plan import Plan
from worker.engine.ports import Arrival, Decision, Forward, Inbox
from worker.engine.scheduler import BatchLimits, CacheShape
from worker.models.spec import ModelSpec
from worker.step_prices import CONTEXT, Clock

_STEPS = 8
"""That count, of each try."""
_WARM = 3
"""Before those: what has been launched for others is still on its way."""
_BLOCKS = 8
"""That a row may finish meanwhile."""
_ROUNDS = 3
_DEAR_S = 0.05
"""Behind a step that takes so long no larger one is tried."""


class _NoText:
    """Implements `worker.engine.ports.TextDecoder` for tokens that nobody reads."""

    stopped = False

    def push(self, token_ids: ReadOnly[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


class LedSteps:
    """Times steps of rows with blocks of one length, which `forward` has the device lead.

    What is in the pages afterwards is worth nothing.
    """

    def __init__(
        self, forward: Forward, spec: ModelSpec, cache: CacheShape, limits: BatchLimits, length: int, clock: Clock
    ) -> None:
        self._forward, self._clock, self._length = forward, clock, length
        self._planned = Plan(())
        self._numbers = count()
        produce = max(1, min(_BLOCKS * length, spec.max_model_len // 2))
        # Whole pages of it are found written by all rows but the first.
        context = max(1, min(CONTEXT, spec.max_model_len - produce) // cache.page_size * cache.page_size)
        self._request = Generate(
            id="",
            model="",
            prompt=tuple(number % spec.text_vocab_size for number in range(context)),
            limits=Limits(max_tokens=produce, ignore_eos=True),
            block_length=length,
        )
        self._temperature = spec.temperature
        self._engine = Engine(spec, cache, limits, self._run, lambda request, resume: _NoText())
        # Behind the text ends the last block, and one more is held ahead.
        pages = -(-(context + produce + 2 * length) // cache.page_size)
        # All rows may have a finished block to write in the same step.
        self.most = max(1, min(limits.max_rows, limits.token_budget // (2 * length), cache.num_pages // pages))
        """Rows that can be timed together."""

    def prices(self) -> StepPrices:
        """Time steps of one row, two, four, and so on; of each the best of several rounds."""
        self.time(1)  # it writes the text that all begin with
        rows = 1
        found = self.time(rows)
        while found and found[-1][1] < _DEAR_S and 2 * rows <= self.most:
            rows *= 2
            found += self.time(rows)
        # In rounds, so that a slow moment of the machine meets one try of each size and not all tries of one.
        sizes = [2**power for power in range(rows.bit_length())] * (_ROUNDS - 1)
        return StepPrices.of([*found, *(point for size in sizes for point in self.time(size))])

    def time(self, rows: int) -> list[tuple[int, float]]:
        """Return (positions, seconds) of a step of so many rows, the mean of some that follow each other; nothing if
        the rows never decide together."""
        coming = [self._row(f"price-{next(self._numbers)}", seed) for seed in range(rows)]
        inbox, steps = Inbox(arrivals=[Arrival(each, epoch=1) for each in coming]), list[tuple[int, float]]()
        while inbox.arrivals or not (self._engine.idle or len(steps) == _WARM + _STEPS):
            self._planned, began = Plan(()), self._clock()
            self._engine.step(inbox)
            seconds, inbox = self._clock() - began, Inbox()
            if self._decides(rows):
                steps.append((self._planned.tokens, seconds))
        self._engine.step(Inbox(aborts=[(each.id, "cancelled") for each in coming]))
        if not steps:
            return []
        counted = steps[_WARM:] or steps
        tokens, seconds = (sum(column) / len(counted) for column in zip(*counted, strict=True))
        return [(round(tokens), seconds)]

    def _run(self, plan: Plan) -> Decision:
        self._planned = plan
        return self._forward(plan)

    def _row(self, name: str, seed: int) -> Generate:
        sampling = Sampling(temperature=self._temperature, seed=seed)
        return self._request.model_copy(update={"id": name, "sampling": sampling})

    def _decides(self, count: int) -> bool:
        """Tell whether the last step was one in which so many rows decided, and nothing else ran."""
        rows = self._planned.rows
        short = all(row.canvas is not None and len(row.token_ids) <= 2 * self._length for row in rows)
        return short and len(rows) == count
