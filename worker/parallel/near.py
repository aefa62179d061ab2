"""Sums among GPUs of one host that read each other's memory, by PyTorch's symmetric memory.

A sum behind every attention and MLP is short, and most of it is what NCCL takes to begin: two H200 sum 32, 256 and
1,024 tokens of 4,096 in 8.9, 15 and 36 us where NCCL takes 11, 28 and 50 (docs/benchmarks/gpu.md). Each rank adds up
its part of the numbers and all of them fetch the parts, so that every rank has the same bits.
"""

import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

_MOST_BYTES = 32 * 2**20
_WORD = 16
"""Bytes that a thread moves at once; each rank's part is whole words."""
_meetings = 0
"""Of this process."""


class NearSum:
    """Owns memory that all ranks of the group see. Every rank makes the same calls, in order."""

    def __init__(self, size: int, device: torch.device) -> None:
        """Take all the memory at once: before it is planned what else there is room for, and before captured steps
        know its address."""
        import torch.distributed._symmetric_memory as symmetric

        global _meetings
        _meetings += 1
        self._size = size
        assert dist.group.WORLD is not None
        self._group = dist.group.WORLD.group_name
        with torch.inference_mode(False):
            self._room = symmetric.empty(_MOST_BYTES // 2, dtype=torch.bfloat16, device=device)
            symmetric.rendezvous(self._room, self._group)

    def takes(self, x: Tensor) -> bool:
        fits = 0 < x.nbytes <= _MOST_BYTES and x.nbytes % (_WORD * self._size) == 0
        return fits and x.dtype in (torch.bfloat16, torch.float32)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x, which lasts until the next one."""
        flat = self._room.view(x.dtype)[: x.numel()]
        flat.view(x.shape).copy_(x)
        torch.ops.symm_mem.two_shot_all_reduce_(flat, "sum", self._group)
        return flat.view(x.shape)


def met_alike(least: Callable[[int], int]) -> bool:
    """Return whether all ranks' processes have met others as often; `least` gives the least of all ranks' values.

    PyTorch numbers meetings by process (issue 196082 of its repository): a process that leads its second group would
    wait for ever for ranks that are in their first one.
    """
    return least(_meetings) == -least(-_meetings)


def are_near(size: int) -> bool:
    """Return whether GPUs 0 to size - 1 read each other's memory, and this PyTorch knows how to use it."""
    pairs = itertools.permutations(range(size), 2)
    return hasattr(torch.ops.symm_mem, "two_shot_all_reduce_") and all(
        torch.cuda.can_device_access_peer(one, other) for one, other in pairs
    )
