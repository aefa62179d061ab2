"""Rows with blocks of several lengths, all led by the device.

A captured step knows one block length. So each length has a lane: its own steps, and an `AheadRunner` that leads them
over the same pages. Every lane sees each plan whole, leads the rows whose blocks have its length, and knows from the
plan who only sits out; whatever none leads is run by the plain runner, once for all.
"""

from collections.abc import Callable
from collections.abc import Sequence as ReadOnly

from worker.ahead import AheadRunner, Progress, bucket_sizes, make_graphs, run_others
from worker.engine.plan import Plan
from worker.engine.ports import Decision
from worker.foresight import Offer
from worker.graphs import Recorder
from worker.runner import Runner

_OTHERS = Offer(slots=(0, 1 / 4, 1 / 2, 1), room=(1 / 4, 1 / 2, 3 / 4))
"""For lengths that are not the model's own: each capture is time at start."""
_STRIDE = 32
"""The same for the numbers of rows."""


class Lanes:
    """Implements `worker.engine.ports.Forward`."""

    def __init__(self, runner: Runner, lanes: ReadOnly[AheadRunner]) -> None:
        """`lanes` are over the runner's pages, each of another block length."""
        self._runner = runner
        self.lanes = lanes

    def capture(self, progress: Progress) -> None:
        """Capture all lanes' steps, and learn what they take."""
        counts = [len(lane.captures()) for lane in self.lanes]
        for number, lane in enumerate(self.lanes):
            lane.capture(_counting(progress, sum(counts[:number]), sum(counts)))

    def __call__(self, plan: Plan) -> Decision:
        decision = Decision.open(len(plan.rows))
        turns = [lane.begin(plan) for lane in self.lanes]
        # First, for it may fail for want of memory, and nothing has changed then.
        run_others(self._runner, plan, turns, decision)
        # All lanes' next steps are under way before the first answer is waited for.
        for lane, turn in zip(self.lanes, turns, strict=True):
            lane.launch(turn)
        for lane, turn in zip(self.lanes, turns, strict=True):
            lane.end(turn, decision)
        return decision


def make_lanes(runner: Runner, max_rows: int, lengths: ReadOnly[int] = ()) -> list[AheadRunner]:
    """Return a lane for the model's own block length and for each other, the longest first: its steps take the most
    memory, in which the others' find room.

    The page size has to be a multiple of each length.
    """
    own, recorder = runner.model.spec.block_length, Recorder(runner.model.device)
    lanes: list[AheadRunner] = []
    for length in sorted({own, *lengths}, reverse=True):
        graphs = make_graphs(runner, max_rows, length, recorder)
        sizes = bucket_sizes(max_rows) if length == own else bucket_sizes(max_rows, _STRIDE)
        lanes.append(AheadRunner(runner, graphs, sizes, None if length == own else _OTHERS))
    return lanes


def _counting(progress: Progress, before: int, total: int) -> Callable[[int, int], None]:
    """Return the progress of one lane, told as that of all."""
    return lambda done, of: progress(before + done, total)
