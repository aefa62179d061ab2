"""A device whose memory gives out in the middle of the work."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from worker.engine.plan import Plan
from worker.engine.ports import Decision, Forward


class Exhausted(TorchDispatchMode):
    """Lets so many operations pass, and has no memory for the next one."""

    def __init__(self, passes: int) -> None:
        super().__init__()
        self.left = passes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.left == 0:
            raise torch.OutOfMemoryError("no memory")
        self.left -= 1
        return func(*args, **(kwargs or {}))


def gives_out(work: Callable[[], object], passes: int) -> bool:
    """Run some work with memory for so many operations; tell whether it gave out."""
    try:
        with Exhausted(passes):
            work()
    except torch.OutOfMemoryError:
        return True
    return False


class Shaky:
    """A forward that finds no memory several times before each step, anywhere in it."""

    def __init__(self, forward: Forward, tries: int = 2) -> None:
        self._forward = forward
        self._tries = tries
        self._draw = random.Random(0)
        self._operations = 1
        """Of the step before."""
        self.gave_out = 0

    def __call__(self, plan: Plan) -> Decision:
        for number in range(self._tries):
            # Half of them near the end, where a step notes what it has decided.
            first = 0 if number % 2 else self._operations * 4 // 5
            try:
                return self._run(plan, self._draw.randrange(first, self._operations))
            except torch.OutOfMemoryError:
                self.gave_out += 1
        return self._run(plan, 10**9)

    def _run(self, plan: Plan, passes: int) -> Decision:
        with Exhausted(passes) as device:
            decision = self._forward(plan)
        self._operations = max(1, passes - device.left)
        return decision


class Tight:
    """A forward that finds memory, anywhere in it, for one step of several and for those of few tokens."""

    def __init__(self, forward: Forward, room: int, seed: int) -> None:
        self._forward = forward
        self._room = room
        self._draw = random.Random(seed)
        self._operations = 2
        """Of the last step that went well."""
        self.gave_out = 0

    def __call__(self, plan: Plan) -> Decision:
        short = plan.tokens > self._room and self._draw.random() < 0.7
        with Exhausted(self._draw.randrange(self._operations) if short else 10**9) as device:
            try:
                decision = self._forward(plan)
            except torch.OutOfMemoryError:
                self.gave_out += 1
                raise
        if not short:
            self._operations = max(2, 10**9 - device.left)
        return decision
