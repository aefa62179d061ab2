"""A worker whose device fails as told by what a request asks: `python -m tests.fleet.faulty_worker`, flags as usual.

A prompt that begins with one of these token ids brings its fault into every forward that it is part of.
"""

import os
import signal
import sys
import time

import torch

import worker.assembly
from worker.device import guarded
from worker.engine.plan import Plan
from worker.engine.ports import Decision, Forward
from worker.process import main

KILLS = 300
"""The process dies at once, as of a segmentation fault in a kernel."""
HANGS = 301
"""The forward never returns."""
FILLS_MEMORY = 302
"""The device is out of memory as long as the request is in the batch."""
NOT_A_NUMBER = 303
"""Its own row has NaN for logits."""
TAKES_ITS_TIME = 304
"""A step takes half a second: long against the way of a message, also on a busy machine."""


class FaultyDevice:
    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._firsts: dict[str, int] = {}

    def __call__(self, plan: Plan) -> Decision:
        self._firsts |= {row.request_id: row.token_ids[0] for row in plan.rows if row.start == 0}
        faults = [self._firsts.get(row.request_id) for row in plan.rows]
        if KILLS in faults:
            os.kill(os.getpid(), signal.SIGKILL)
        if HANGS in faults:
            time.sleep(3600)
        if TAKES_ITS_TIME in faults:
            time.sleep(0.5)
        if FILLS_MEMORY in faults:
            raise torch.OutOfMemoryError("told so")
        decision = self._forward(plan)
        for index, fault in enumerate(faults):
            if fault == NOT_A_NUMBER and plan.rows[index].canvas is not None:
                decision.failed[index] = "NaN in the logits"
        return decision


if __name__ == "__main__":
    worker.assembly.guarded = lambda forward: guarded(FaultyDevice(forward))  # pyright: ignore[reportPrivateImportUsage]
    sys.exit(main())
