"""Sums and gathers among the ranks, by torch.distributed: NCCL between GPUs, Gloo between processes on a CPU."""

import os
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

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
        self._device = device
        # All ranks are on this host, whatever its name may resolve to.
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")
        store = dist.FileStore(str(meeting), size)  # pyright: ignore[reportPrivateImportUsage]
        backend = "nccl" if device.type == "cuda" else "gloo"
        own = torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else None
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_PATIENCE, device_id=own)

    def sum(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def gather(self, x: Tensor) -> Tensor:
        every = x.new_empty((self.size, *x.shape))
        _gather_single(every.view(-1), x.reshape(-1))
        return every

    def least(self, value: int) -> int:
        """Return the least of all ranks' values."""
        number = torch.tensor([value], dtype=torch.int64, device=self._device)
        dist.all_reduce(number, op=dist.ReduceOp.MIN)
        return cast(int, number.item())

    def close(self) -> None:
        """Leave the group, whose other ranks leave as well."""
        dist.destroy_process_group()
