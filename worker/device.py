"""Where the arithmetic runs, and in which precision."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from worker.engine.plan import Plan
from worker.engine.ports import Decision, DeviceFull, Forward

log = logging.getLogger(__name__)

_CGROUP_LIMIT = Path("/sys/fs/cgroup/cpu.max")


class DeviceError(Exception):
    """The requested device is not there, or cannot do what is asked."""


def guarded(forward: Forward) -> Forward:
    """Return a forward that tells an exhausted device by `DeviceFull`, its memory tidied up."""

    def run(plan: Plan) -> Decision:
        try:
            return forward(plan)
        except (torch.OutOfMemoryError, MemoryError):
            pass
        except RuntimeError as error:
            # What the allocator of the CPU raises has no class of its own.
            if "can't allocate memory" not in str(error):
                raise
        # Here, because the exception kept the failed step's tensors alive.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        log.warning("the device has no memory for a step of %d rows and %d tokens", len(plan.rows), plan.tokens)
        raise DeviceFull

    return run


@dataclass(frozen=True, slots=True)
class Placement:
    device: torch.device
    dtype: torch.dtype
    threads: int
    """Threads of CPU arithmetic."""


def place(device: str = "auto", dtype: str = "auto", threads: int = 0) -> Placement:
    """Resolve what the settings ask for; raises `DeviceError`.

    float32 is the CPU's default because it is what the reference outputs are exact in.
    """
    chosen = torch.device(_best_device() if device == "auto" else device)
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError("device cuda: no CUDA device is visible; use device cpu or auto")
    if chosen.type == "mps" and not torch.backends.mps.is_available():
        raise DeviceError("device mps: not available on this machine; use device cpu or auto")
    if dtype == "auto":
        dtype = "bfloat16" if chosen.type == "cuda" else "float32"
    precision = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    return Placement(chosen, precision, threads or max(1, usable_cores() - 1))


def usable_cores(limit: Path = _CGROUP_LIMIT) -> int:
    """Return the cores that this process may use: its affinity, cut by the container's CPU quota."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = limit.read_text().split()
    except (OSError, ValueError):
        return affinity
    if quota == "max":
        return affinity
    return max(1, min(affinity, int(quota) // int(period)))


def free_memory(device: torch.device) -> int | None:
    """Return the free bytes of an accelerator's own memory; None where it is the host's."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def _best_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"
