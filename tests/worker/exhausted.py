"""A device whose memory gives out in the middle of the work."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


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
