"""Sums and gathers among the ranks, by torch.distributed: NCCL between GPUs, Gloo between processes on a CPU.

GPUs that read each other's memory add up without NCCL (`worker.parallel.near`).

Ranks that share a GPU, as in tests on a machine that has one, exchange by way of the host: NCCL refuses them.
"""

import os
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from worker.parallel.near import NearSum, are_near, met_alike

_PATIENCE = timedelta(minutes=5)
"""Ranks load at different speeds. One that dies is noticed otherwise, at once."""


# Renamed in PyTorch 2.13.
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TorchPeers:
    """Implements `worker.models.layers.Peers`; one in a process."""

    def __init__(self, rank: int, size: int, meeting: Path, device: torch.device) -> None:
        """Wait for all ranks; they meet by the file `meeting`, which must not exist before."""
        self.rank = rank
        self.size = size
        self._by_host = device.type == "cuda" and torch.cuda.device_count() < size
        self._device = torch.device("cpu") if self._by_host else device
        # All ranks are on this host, whatever its name may resolve to.
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")
        store = dist.FileStore(str(meeting), size)  # pyright: ignore[reportPrivateImportUsage]
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        own = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_PATIENCE, device_id=own)
        near = own is not None and are_near(size) and met_alike(self.least)
        self._near = NearSum(size, device) if near else None

    def sum(self, x: Tensor) -> Tensor:
        if self._near is not None and self._near.takes(x):
            return self._near.sum(x)
        part = x.to(self._device) if self._by_host else x
        dist.all_reduce(part)
        return part.to(x.device)

    def gather(self, x: Tensor) -> Tensor:
        part = x.to(self._device) if self._by_host else x
        every = part.new_empty((self.size, *part.shape))
        _gather_single(every.view(-1), part.reshape(-1))
        return every.to(x.device)

    def least(self, value: int) -> int:
        """Return the least of all ranks' values."""
        number = torch.tensor([value], dtype=torch.int64, device=self._device)
        dist.all_reduce(number, op=dist.ReduceOp.MIN)
        return cast(int, number.item())

    def close(self) -> None:
        """Leave the group, whose other ranks leave as well."""
        dist.destroy_process_group()
